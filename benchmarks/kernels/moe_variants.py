"""The second half of a layer of experts for 1 to 4 tokens: `benchmarks.kernels.moe --variants`.

Microseconds per layer, from the residual stream to the residual stream, in a replayed CUDA graph of
a chain of layers: each reads what the one before it wrote. Each variant is checked first: against
the plain twin for one layer, and for the chain, bit for bit over many replays, against itself
without programmatic dependent launch, where nothing starts early. Kernels are compiled ahead by
several processes.
"""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.kernels.moe import LAYERS, Layer
from kernels import plain
from kernels.device import DeviceFacts
from kernels.gemm import add_norm
from kernels.tuning import MoEGemvConfig
from services.common.model_spec import TextSpec
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.experts import moe as plain_moe
from services.common.nn.layers import RMSNorm
from services.common.nn.weights import materialize
from services.decoder.operations.kernel_facts import KernelFacts
from services.decoder.operations.moe import MoEKernels

CHAIN = 24  # layers
_CHECKED, _TIMED = 50, 12  # replays
_WORKERS = 14
_BASE = MoEGemvConfig()
# Predicted µs per layer of the 30B-A3B for one token.
VARIANTS: dict[str, tuple[MoEGemvConfig, float]] = {"five kernels": (_BASE, 25.2)}
# Rows, columns and warps of gate and up; the same of down.
_UPS = (
    (1, 2048, 2), (1, 2048, 4), (2, 2048, 4), (2, 512, 4), (2, 1024, 2), (4, 1024, 4),
    (4, 1024, 8), (4, 2048, 8),
)  # fmt: skip
_DOWNS = (
    (2, 128, 2), (2, 256, 2), (2, 256, 4), (4, 64, 4), (4, 128, 2), (4, 128, 4), (4, 256, 8),
    (8, 64, 4), (8, 128, 4), (8, 128, 8),
)  # fmt: skip


def sweeps() -> Iterator[MoEGemvConfig]:
    """Other divisions."""
    for rows, columns, warps in _UPS:
        yield replace(_BASE, up_rows=rows, up_columns=columns, up_warps=warps)
    for rows, columns, warps in _DOWNS:
        yield replace(_BASE, down_rows=rows, down_columns=columns, down_warps=warps)


class Variants:
    """Layers of one shape and format; without `values` they are not filled."""

    def __init__(
        self, text: TextSpec, weight_format: str, *, num_layers: int = LAYERS, values: bool = True
    ) -> None:
        assert text.moe is not None
        self.text = text
        self.layers: list[tuple[Layer, RMSNorm]] = []
        for seed in range(num_layers):
            with torch.device("meta"):
                layer, norm = Layer(text, weight_format), RMSNorm(text.hidden_size, 1e-6)
            if values:
                load_dummy(layer, seed, device="cuda", dtype=torch.bfloat16)
            else:
                materialize(layer, "cuda", torch.bfloat16)
                for stack in layer.experts.stacks.values():
                    stack.method.process_weights_after_loading(stack)
            materialize(norm, "cuda", torch.bfloat16)
            torch.nn.init.uniform_(norm.weight, 0.8, 1.2)
            self.layers.append((layer, norm))
        device = DeviceFacts.of(torch.device("cuda"))
        facts = KernelFacts(device, text, torch.bfloat16, weight_format)
        self.pdl = {True: facts.pdl, False: 0}
        self.kernels = {pdl: MoEKernels(device, text.moe, mode) for pdl, mode in self.pdl.items()}
        # Small, so that the sum rounds little of an output away.
        self.starts = {
            count: (torch.randn(count, text.hidden_size, device="cuda") * 0.01).bfloat16()
            for count in (1, 2, 3, 4)
        }

    def layer(self, config: MoEGemvConfig, residual: Tensor, index: int, *, pdl: bool) -> None:
        """Adds a layer's output to the residual stream."""
        layer, norm = self.layers[index % len(self.layers)]
        x = add_norm.rms_norm(residual, norm.weight, norm.eps, pdl=self.pdl[pdl])
        self.kernels[pdl].gemv(x, layer.router, layer.experts, residual, config=config)

    def graph(self, config: MoEGemvConfig, count: int, *, pdl: bool) -> tuple[Tensor, object]:
        """The chain's residual stream, and the graph that fills it."""
        residual = self.starts[count].clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            for index in range(2):
                self.layer(config, residual, index, pdl=pdl)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                torch.mul(self.starts[count], 1, out=residual)  # by a kernel, as in a step
                for index in range(CHAIN):
                    self.layer(config, residual, index, pdl=pdl)
        torch.cuda.synchronize()
        return residual, graph

    def error(self, config: MoEGemvConfig, count: int) -> float:
        """Relative, of the norm, against the plain twin."""
        start, (layer, norm) = self.starts[count], self.layers[0]
        with torch.inference_mode():
            x = plain.rms_norm(start, norm.weight, norm.eps)
            twin = plain_moe(x, layer.router, layer.experts, start).float()
            found = start.clone()
            self.layer(config, found, 0, pdl=True)
            expected = (start.float() + twin).bfloat16().float()
        return float((found.float() - expected).norm() / twin.norm())

    def is_exact(
        self, config: MoEGemvConfig, count: int, other: MoEGemvConfig | None = None
    ) -> bool:
        """Whether each replay of the chain leaves what it, or the other, leaves without PDL."""
        expected, graph = self.graph(other or config, count, pdl=False)
        graph.replay()  # type: ignore[attr-defined]
        found, graph = self.graph(config, count, pdl=True)
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(_CHECKED):
            graph.replay()  # type: ignore[attr-defined]
            same &= (found == expected).all()
        return bool(same)

    def time_us(self, config: MoEGemvConfig, count: int) -> float:
        """Median of one layer."""
        _, graph = self.graph(config, count, pdl=True)
        times: list[float] = []
        for _ in range(_TIMED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()  # type: ignore[attr-defined]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CHAIN)
        return statistics.median(times[2:])

    def row(self, label: str, config: MoEGemvConfig, counts: tuple[int, ...]) -> list[float]:
        """Prints a line; the times, infinite where a check fails."""
        times, cells = [], []
        for count in counts:
            try:
                error, exact = self.error(config, count), self.is_exact(config, count)
                micros = self.time_us(config, count)
                times.append(micros if exact and error < 0.02 else float("inf"))
                mark = "" if exact else " NOT EXACT"
                cells.append(f"{micros:7.2f} ({error:.1e}{mark})")
            except Exception as failure:
                torch.cuda.synchronize()
                times.append(float("inf"))
                cells.append(f"{type(failure).__name__}: {str(failure)[:30]}")
        print(f"{label:40} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)
        return times


def compile_ahead(
    text: TextSpec, weight_format: str, counts: tuple[int, ...], configs: list[MoEGemvConfig]
) -> None:
    """Fills Triton's cache by several processes."""
    work = [(config, pdl) for pdl in (True, False) for config in configs]
    workers = min(_WORKERS, len(work))
    shares = [(text, weight_format, counts, work[first::workers]) for first in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(_compile, shares))


def _compile(
    share: tuple[TextSpec, str, tuple[int, ...], list[tuple[MoEGemvConfig, bool]]],
) -> None:
    text, weight_format, counts, work = share
    variants = Variants(text, weight_format, num_layers=1, values=False)
    for config, pdl in work:
        for count in counts:
            try:
                with torch.inference_mode():
                    variants.layer(config, variants.starts[count], 0, pdl=pdl)
            except Exception as error:
                print(f"{config}: {type(error).__name__}: {str(error)[:80]}")
    torch.cuda.synchronize()


def run(
    text: TextSpec, weight_format: str, counts: tuple[int, ...], bandwidth: float, *, sweep: bool
) -> None:
    """Prints the variants and, if `sweep`, the fastest divisions."""
    named = [config for config, _ in VARIANTS.values()]
    others = [config for config in sweeps() if config not in named] if sweep else []
    configs, started = named + others, time.monotonic()
    compile_ahead(text, weight_format, counts, configs)
    print(f"{len(configs)} variants compiled in {time.monotonic() - started:.0f} s")
    variants = Variants(text, weight_format)
    assert text.moe is not None
    size = 1 if weight_format != "plain" else 2
    expert = 3 * text.hidden_size * text.moe.intermediate_size * size
    heads = " ".join(f"T = {count:14}" for count in counts)
    floor = text.moe.top_k * expert / bandwidth * 1e6
    print(f"us per layer (error); floor of one token {floor:.1f}\n{'':40} {heads}")
    found: dict[MoEGemvConfig, list[float]] = {}
    for name, (config, predicted) in VARIANTS.items():
        found[config] = variants.row(f"{name} [{predicted}]", config, counts)
    for config in others:
        found[config] = variants.row(_shown(config), config, counts)
    if not sweep:
        return
    for index, count in enumerate(counts):  # the best of each together
        up = min((c for c in found if replace(_BASE, **_division(c, "up")) == c),
                 key=lambda config: found[config][index])  # fmt: skip
        down = min((c for c in found if replace(_BASE, **_division(c, "down")) == c),
                   key=lambda config: found[config][index])  # fmt: skip
        both = replace(_BASE, **_division(up, "up"), **_division(down, "down"))
        if both not in found:
            found[both] = variants.row(f"best of T = {count}: {_shown(both)}", both, counts)
    for index, count in enumerate(counts):
        print(f"\nT = {count}, fastest first")
        for config in sorted(found, key=lambda config: found[config][index])[:4]:
            print(f"{found[config][index]:8.2f}  {config}")
    print(f"{time.monotonic() - started:.0f} s in all")


def _division(config: MoEGemvConfig, which: str) -> dict[str, int]:
    names = ("rows", "columns", "warps")
    return {f"{which}_{name}": getattr(config, f"{which}_{name}") for name in names}


def _shown(config: MoEGemvConfig) -> str:
    up, down = (tuple(_division(config, which).values()) for which in ("up", "down"))
    return f"{up} {down}"
