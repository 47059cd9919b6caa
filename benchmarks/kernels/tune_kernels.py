"""Times candidate configurations of the decoder's GEMM kernels on a GPU and prints the winners.

    python -m benchmarks.kernels.tune_kernels --shapes 8b --kernels gemv,split_k,swiglu,swiglu_gemm

Each candidate is compared with its plain twin, then timed as a CUDA graph of launches over copies
of the weight that together exceed L2, by programmatic dependent launch where the device has it.
`share` is the weight's bytes per second relative to what a device-to-device copy moves. Winners are
printed as rows for the tables in `kernels/tuning.py`. Worker processes compile
ahead into Triton's cache.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.text_shapes import TEXT_SHAPES
from kernels import plain, tuning
from kernels.device import DeviceFacts
from kernels.tuning import GemvConfig, SkinnyConfig, SwigluGemmConfig
from services.decoder.operations.kernel_facts import KernelFacts

Config = GemvConfig | SkinnyConfig | SwigluGemmConfig
_EPS = 1e-6
_TOLERANCE = 8e-3  # relative L2 in bfloat16: two roundings follow each other, see tests/gpu/twins
_COLD_BYTES = 300 << 20  # of weight copies: several times the L2 of an H200
_LAUNCHES = 12  # of a graph, at least
_KERNELS = ("gemv", "split_k", "swiglu", "swiglu_gemm")


class Gemm(NamedTuple):
    """One GEMM of a model: what is computed, and the weight's shape."""

    kind: str  # of `tuning.gemv_config`, or split_k, swiglu, swiglu_gemm
    num_rows: int
    num_columns: int

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_rows * self.num_columns


@dataclass(frozen=True)
class Case:
    """A candidate for a GEMM of this many tokens."""

    gemm: Gemm
    num_tokens: int
    config: Config


@dataclass(frozen=True)
class Timed:
    """A candidate's median time in µs; None: it failed, and why."""

    case: Case
    time_us: float | None
    why: str = ""


def gemms_of(shape: str, kernels: list[str], ranks: int) -> Iterator[Gemm]:
    """The GEMMs of one of a model's ranks that the kernels serve."""
    text = TEXT_SHAPES[shape]
    hidden, inner = text.hidden_size, text.intermediate_size // ranks
    query = text.num_heads * text.head_dim // ranks
    qkv = query + 2 * max(1, text.num_kv_heads // ranks) * text.head_dim
    moe = text.moe
    # What several ranks sum, they add to the residual after the sum.
    projected = "linear_residual" if ranks == 1 else "linear"
    if "gemv" in kernels:
        yield Gemm("norm_linear", qkv, hidden)
        yield Gemm(projected, hidden, query)
        if moe is None:
            yield Gemm("norm_swiglu", 2 * inner, hidden)
            yield Gemm(projected, hidden, inner)
        else:
            yield Gemm("linear", moe.num_experts, hidden)
        yield Gemm("linear", text.vocab_size // ranks, hidden)
    if "split_k" in kernels:
        yield Gemm("split_k", qkv, hidden)
        yield Gemm("split_k", hidden, query)
        yield Gemm("split_k", *((hidden, inner) if moe is None else (moe.num_experts, hidden)))
    if moe is not None:
        return
    if "swiglu" in kernels:
        yield Gemm("swiglu", 2 * inner, hidden)
    if "swiglu_gemm" in kernels:
        yield Gemm("swiglu_gemm", 2 * inner, hidden)


def tokens_of(kind: str) -> tuple[int, ...]:
    """Numbers of tokens to time."""
    return {"split_k": (16, 64), "swiglu": (16, 64), "swiglu_gemm": (2112, 8192)}.get(kind, (1,))


def candidates(gemm: Gemm, device: DeviceFacts) -> list[Config]:
    """What is timed; the configuration of `tuning` is the first."""
    kind, rows, columns = gemm
    if kind == "swiglu_gemm":
        made: list[Config] = [
            SwigluGemmConfig(device.num_sms, stages=stages, group=group)
            for stages, group in ((3, 16), (4, 16), (3, 8), (3, 32))
        ]
        return made
    if kind in ("split_k", "swiglu"):
        find = tuning.split_k_config if kind == "split_k" else tuning.skinny_swiglu_config
        present = find(device, rows, columns)
        found = [] if present is None else [present]
        return [*found, *(c for c in _skinny(gemm, device) if c not in found)]
    return list(dict.fromkeys([tuning.gemv_config(kind, rows, columns), *_gemv(gemm)]))


def _gemv(gemm: Gemm) -> Iterator[GemvConfig]:
    doubled = 2 if gemm.kind == "norm_swiglu" else 1
    whole = 1 << (gemm.num_columns - 1).bit_length()
    tiles = {t for t in (512, 1024, 2048, 4096) if tuning.pads_little(gemm.num_columns, t)}
    tiles |= {min(whole, 16384)}
    for rows, tile, warps in product((1, 2, 4, 8), sorted(tiles), (2, 4, 8)):
        held = rows * tile * doubled // (32 * warps)
        if not 32 <= held <= 128:
            continue
        yield GemvConfig(rows, tile, 0, warps)
        if gemm.num_columns // tile >= 4 and held == 32:
            yield GemvConfig(rows, tile, 3, warps)


def _skinny(gemm: Gemm, device: DeviceFacts) -> Iterator[SkinnyConfig]:
    for rows, tile, ctas_per_sm in product((64, 128), (64, 128), (1, 2, 3, 4)):
        for splits in range(1, 9) if gemm.kind == "split_k" else (1,):
            if gemm.num_rows % rows or gemm.num_columns % tile:
                continue
            waves = gemm.num_rows // rows * splits / device.num_sms
            if gemm.kind == "split_k" and not ctas_per_sm - 1 < waves <= ctas_per_sm + 0.05:
                continue
            config = SkinnyConfig(rows, tile, rows // 16, ctas_per_sm, 6, splits)
            if config.stages(64, device.shared_memory_bytes) >= 2:
                yield config


class Runner:
    """Inputs of one GEMM for one number of tokens, and its kernels' calls."""

    def __init__(self, gemm: Gemm, num_tokens: int, device: DeviceFacts, copies: int) -> None:
        torch.manual_seed(0)
        self.gemm, self.device = gemm, device
        # Nothing is quantized, whatever the shape.
        self.pdl = KernelFacts(device, TEXT_SHAPES["8b"], torch.bfloat16).pdl
        rows, columns = gemm.num_rows, gemm.num_columns
        self.x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
        self.norm = torch.randn(columns, device="cuda").bfloat16()
        self.start = torch.randn(num_tokens, rows, device="cuda").bfloat16()
        self.residual = self.start.clone()  # what timed launches add to
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        weight.normal_(0.0, columns**-0.5)
        self.weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def plain(self) -> Tensor:
        """The twin's output."""
        x, weight = self.x, self.weights[0]
        if self.gemm.kind == "norm_linear":
            return plain.norm_linear(x, self.norm, _EPS, weight)
        if self.gemm.kind == "norm_swiglu":
            return plain.norm_swiglu(x, self.norm, _EPS, weight)
        if self.gemm.kind == "linear_residual":
            out = self.start.clone()
            plain.linear_residual(x, weight, None, out)
            return out
        if self.gemm.kind in ("swiglu", "swiglu_gemm"):
            return plain.linear_swiglu(x, weight)
        return plain.linear(x, weight)

    def call(self, weight: Tensor, config: Config) -> Tensor:
        """The kernel's output."""
        from kernels.gemm import gemv, skinny_gemm, swiglu_gemm

        kind, x, pdl = self.gemm.kind, self.x, self.pdl
        if isinstance(config, SwigluGemmConfig):
            return swiglu_gemm.linear_swiglu(x, weight, config)
        if isinstance(config, SkinnyConfig):
            shared = self.device.shared_memory_bytes
            run = skinny_gemm.linear_swiglu if kind == "swiglu" else skinny_gemm.split_k_partials
            return run(x, weight, None, config, shared_memory_bytes=shared, pdl=pdl)
        if kind == "norm_linear":
            return gemv.norm_linear(x, self.norm, _EPS, weight, pdl=pdl, config=config)
        if kind == "norm_swiglu":
            return gemv.norm_swiglu(x, self.norm, _EPS, weight, pdl=pdl, config=config)
        if kind == "linear_residual":
            out = self.start.clone()
            gemv.linear_residual(x, weight, None, out, pdl=pdl, config=config)
            return out
        return gemv.linear(x, weight, pdl=pdl, config=config)

    def launch(self, weight: Tensor, config: Config) -> None:
        """One launch for timing; results go to memory of their own."""
        if self.gemm.kind == "linear_residual" and isinstance(config, GemvConfig):
            from kernels.gemm import gemv

            residual = self.residual
            gemv.linear_residual(self.x, weight, None, residual, pdl=self.pdl, config=config)
        else:
            self.call(weight, config)

    def library(self, weight: Tensor) -> None:
        """CuBLAS and what follows, for comparison."""
        out = torch.mm(self.x, weight.t())
        if "swiglu" in self.gemm.kind:
            from kernels.gemm import silu_mul

            silu_mul.silu_and_mul(out, pdl=self.pdl)


def error(found: Tensor, twin: Tensor) -> float:
    """Relative L2."""
    found = plain.reduce_split_k(found, twin.dtype).float()
    return ((found - twin.float()).norm() / twin.float().norm()).item()


def time_us(launch: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Median µs of one launch, from replays of a CUDA graph."""
    count = max(_LAUNCHES, len(weights))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(weights[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                launch(weights[index % len(weights)])
        times: list[float] = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[1:])


def copy_bandwidth() -> float:
    """Bytes per second that a device-to-device copy reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    found = time_us(lambda _: torch.neg(source, out=target), [source])
    return 8 * source.numel() / found * 1e6


def compile_case(case: Case) -> str:
    """Launches a candidate once in a worker process; returns why it failed, or ""."""
    try:
        runner = Runner(case.gemm, case.num_tokens, DeviceFacts.of(torch.device("cuda")), 1)
        runner.call(runner.weights[0], case.config)
        torch.cuda.synchronize()
        return ""
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]


def time_gemm(
    gemm: Gemm, cases: list[Case], failed: dict[Case, str], device: DeviceFacts, bandwidth: float
) -> None:
    """Times a GEMM's candidates and prints the best ones."""
    copies = max(2, min(16, -(-_COLD_BYTES // gemm.weight_bytes)))
    results: dict[Config, list[float]] = {}
    for num_tokens in tokens_of(gemm.kind):
        runner = Runner(gemm, num_tokens, device, copies)
        twin = runner.plain()
        timed: list[Timed] = []
        for case in (case for case in cases if case.num_tokens == num_tokens):
            if case in failed:
                timed.append(Timed(case, None, failed[case]))
                continue
            config = case.config
            off = error(runner.call(runner.weights[0], config), twin)
            if not off <= _TOLERANCE:
                timed.append(Timed(case, None, f"differs from its twin by {off:.4f}"))
                continue
            launch = partial(runner.launch, config=config)
            took = time_us(launch, runner.weights)
            timed.append(Timed(case, took))
            results.setdefault(config, []).append(took)
        library = time_us(runner.library, runner.weights)
        floor = gemm.weight_bytes / bandwidth * 1e6
        print(
            f"\n{gemm.kind} [{gemm.num_rows}, {gemm.num_columns}], {num_tokens} tokens: floor "
            f"{floor:.1f} us, cuBLAS {library:.1f} us ({floor / library:.0%})"
        )
        done = sorted(
            ((t.time_us, t.case.config) for t in timed if t.time_us is not None), key=lambda t: t[0]
        )
        for took, config in done[:4]:
            print(f"  {took:7.2f} us  {floor / took:4.0%}  {config}")
        present = next((t for t in timed if t.case.config == cases[0].config), None)
        if present is not None and present.time_us is not None:
            print(f"  {present.time_us:7.2f} us  {floor / present.time_us:4.0%}  (as it is)")
        for one in timed:
            if one.time_us is None:
                print(f"  failed: {one.case.config}: {one.why}")
        if gemm.kind in ("norm_linear", "norm_swiglu", "linear", "linear_residual") and done:
            print(f"  row: {tuple(gemm)!r}, {num_tokens} tokens: {done[0][1]}")
    if gemm.kind in ("split_k", "swiglu", "swiglu_gemm"):
        whole = {c: sum(t) for c, t in results.items() if len(t) == len(tokens_of(gemm.kind))}
        if whole:
            best = min(whole, key=lambda config: whole[config])
            print(f"  row: {(gemm.num_rows, gemm.num_columns)}: {best}")


def main(arguments: list[str] | None = None) -> None:
    """The command; `arguments` instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="8b", help="comma-separated, of text_shapes")
    parser.add_argument("--kernels", default="gemv,split_k,swiglu", help=", ".join(_KERNELS))
    parser.add_argument("--ranks", type=int, default=1, help="that the model is divided among")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    chosen = parser.parse_args(arguments)
    started, device = time.monotonic(), DeviceFacts.of(torch.device("cuda"))
    gemms = list(
        dict.fromkeys(
            gemm
            for shape in chosen.shapes.split(",")
            for gemm in gemms_of(shape, chosen.kernels.split(","), chosen.ranks)
        )
    )
    cases = {
        gemm: [
            Case(gemm, num_tokens, config)
            for num_tokens in tokens_of(gemm.kind)
            for config in candidates(gemm, device)
        ]
        for gemm in gemms
    }
    every = [case for some in cases.values() for case in some]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.workers, mp_context=context) as pool:
        answers = list(pool.map(compile_case, every, chunksize=4))
    failed = {case: why for case, why in zip(every, answers, strict=True) if why}
    bandwidth = copy_bandwidth()
    print(
        f"{device.name}: {len(every)} candidates compiled in {time.monotonic() - started:.0f} s; "
        f"a copy moves {bandwidth / 1e12:.2f} TB/s"
    )
    for gemm in gemms:
        time_gemm(gemm, cases[gemm], failed, device, bandwidth)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
