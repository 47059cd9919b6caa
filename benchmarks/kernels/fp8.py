"""FP8 linear layers on this machine's GPU: is each implementation right, and which is the fastest?

    python -m benchmarks.kernels.fp8                 # 8B shapes; about a minute on an H200
    python -m benchmarks.kernels.fp8 --shapes 2b
    python -m benchmarks.kernels.fp8 --tune          # configurations of `gemv` and skinny GEMMs
    python -m benchmarks.kernels.fp8 --tune --shapes 27b --tokens 1

For each shape and number of tokens: microseconds per call in a replayed CUDA graph, with weights
that are not in the L2, and the relative error against the plain twin. `bf16` is `F.linear` with
the dequantized weight, and `floor` the time that reading the FP8 weight takes at the bandwidth of
`--bandwidth` (TB/s). The fastest implementation of a line is marked.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.device import DeviceFacts
from kernels.gemm import fp8_kernels, fp8_w8a8, fp8_weight
from kernels.gemm.fp8_kernels import GemvConfig, SkinnyConfig
from kernels.gemm.fp8_weight import E4M3, Fp8Weight
from kernels.gemm.skinny_gemm import summed
from services.common.nn import fp8

SHAPES = {
    "2b": [(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "27b": [(16384, 5120), (34816, 5120), (5120, 17408), (5120, 6144)],
    "32b": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
    "head": [(151936, 4096)],
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1008)
TOLERANCE = 4e-3  # as in tests/gpu/twins.py
_COLD_BYTES = 256 << 20  # several times the L2
_REPLAYS = 3

Call = Callable[[Tensor, Fp8Weight], Tensor]
_Config = GemvConfig | SkinnyConfig | fp8_w8a8.SkinnyConfig


def make(rows: int, columns: int, block: bool) -> Fp8Weight:
    """A random weight; scales differ by a factor of 4."""
    values = torch.empty(rows, columns, dtype=E4M3, device="cuda")
    for part in values.split(8192):
        part.copy_((torch.randn(part.shape, device="cuda") * 100).clamp(-448, 448))
    size = (-(-rows // 128), columns // 128) if block else (rows, 1)
    scale = torch.rand(size, device="cuda") * 3e-4 + 1e-4
    return Fp8Weight(values, scale, *((128, 128) if block else (1, columns)))


def copies(weight: Fp8Weight) -> list[Fp8Weight]:
    """Enough of them that none is in the L2 when its turn comes."""
    count = max(2, -(-_COLD_BYTES // weight.values.nbytes))
    return [
        Fp8Weight(weight.values.clone(), weight.scale.clone(), weight.block_rows,
                  weight.block_columns)
        for _ in range(count)
    ]  # fmt: skip


def time_us(call: Callable[[Any], object], weights: Sequence[Fp8Weight | Tensor]) -> float:
    """µs of one call, from replays of a graph with a call per weight."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / _REPLAYS / len(weights)


def error(found: Tensor, twin: Tensor) -> float:
    """Relative, of the norm."""
    return ((found.float() - twin.float()).norm() / twin.float().norm()).item()


def kernels(block: bool, facts: DeviceFacts) -> dict[str, tuple[Call, int]]:
    """Implementation → its call, and for how many tokens it exists."""
    operation = "fp8_block_linear" if block else "fp8_channel_linear"
    found: dict[str, tuple[Call, int]] = {}
    table_facts = SimpleNamespace(device=facts)
    for row in fp8.linear_rows(operation):
        if not row.obstacle(table_facts) and row.name != "plain":
            kernel, most = row.create(table_facts), row.tokens(table_facts).most
            assert kernel is not None
            found[row.name] = kernel, most or max(TOKENS)
    return found


def compare(
    shapes: list[tuple[int, int]], facts: DeviceFacts, bandwidth: float
) -> list[str]:  # fmt: skip
    """Prints a line per shape and number of tokens; returns what is wrong."""
    wrong: list[str] = []
    for block in (True, False):
        calls = kernels(block, facts)
        names = ["bf16", "floor", *calls]
        print(f"\nfp8 per {'block' if block else 'channel'}: us per call (error)")
        print(f"{'N x K':>14} {'T':>5} " + " ".join(f"{name:>20}" for name in names))
        for rows, columns in shapes:
            weight = make(rows, columns, block)
            cold = copies(weight)
            wide = [fp8_weight.dequantize(weight, torch.bfloat16)]
            wide += [wide[0].clone() for _ in range(len(cold) // 2)]
            floor = weight.values.nbytes / bandwidth / 1e6
            for num_tokens in TOKENS:
                x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
                plain = F.linear(x, wide[0])
                bf16 = time_us(partial(F.linear, x), wide)
                times, errors = {"bf16": bf16, "floor": floor}, {"bf16": 0.0, "floor": 0.0}
                for name, (call, most) in calls.items():
                    if num_tokens > most:
                        continue
                    is_w8a8 = name in ("skinny_w8a8", "scaled_mm", "triton_gemm")
                    try:
                        found = call(x, weight)
                        times[name] = time_us(partial(call, x), cold)
                    except Exception as problem:  # the table would go on to the next
                        wrong.append(f"{name} {rows}x{columns} T={num_tokens}: {problem!r:.160}")
                        continue
                    twin = fp8_weight.w8a8_linear(x, weight) if is_w8a8 else plain
                    errors[name] = error(found, twin)
                    if not errors[name] <= TOLERANCE:
                        wrong.append(f"{name} {rows}x{columns} T={num_tokens}: {errors[name]:.1e}")
                best = min((n for n in times if n in calls), key=times.__getitem__, default="")
                cells = [
                    f"{times[n]:9.2f} {'*' if n == best else ' '}({errors[n]:.1e})"
                    if n in times else ""
                    for n in names
                ]  # fmt: skip
                line = " ".join(f"{cell:>20}" for cell in cells)
                print(f"{f'{rows}x{columns}':>14} {num_tokens:>5} {line}", flush=True)
    return wrong


def tune(shapes: list[tuple[int, int]], facts: DeviceFacts, tokens: Sequence[int]) -> None:
    """Prints the three fastest configurations for each shape and number of tokens."""
    for rows, columns in shapes:
        weight = make(rows, columns, block=True)
        cold = copies(weight)
        for num_tokens in tokens:
            x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
            found: list[tuple[float, object]] = []
            for config in _configs(rows, columns, num_tokens):
                match config:
                    case GemvConfig():
                        call = partial(fp8_kernels.gemv, x, device=facts, config=config)
                    case SkinnyConfig():
                        kernel = partial(fp8_kernels.split_k_partials, config=config)
                        call = partial(summed, kernel, x, device=facts)
                    case fp8_w8a8.SkinnyConfig():
                        call = partial(fp8_w8a8.split_k_partials, x, device=facts, config=config)
                try:
                    found.append((time_us(call, cold), config))
                except Exception as problem:  # out of shared memory
                    print(f"  {config}: {problem!r:.80}")
            best = sorted(found, key=lambda one: one[0])[:3]
            text = "; ".join(f"{time:.2f} us {config}" for time, config in best)
            print(f"{rows}x{columns} T={num_tokens}: {text}", flush=True)


def _configs(rows: int, columns: int, num_tokens: int) -> list[_Config]:
    found: list[_Config] = []
    if num_tokens == 1:
        whole = 1 << (columns - 1).bit_length()
        found += [
            GemvConfig(high, warps, tile)
            for high, warps, tile in (
                (8, 4, 1024), (16, 4, 1024), (16, 8, 1024), (4, 4, 2048), (8, 8, 2048),
                (4, 8, 4096), (8, 4, 4096), (4, 8, whole), (8, 8, whole),
            )
            if tile <= min(whole, 16384)
        ]  # fmt: skip
    else:
        found += [
            SkinnyConfig(high, splits, stages)
            for high in (64, 128) for splits in (1, 2, 4, 8) for stages in (4, 6)
            if columns % (splits * 128) == 0 and rows // high * splits <= 1200
        ]  # fmt: skip
        found += [
            fp8_w8a8.SkinnyConfig(splits, stages)
            for splits in (1, 2, 4, 8) for stages in (3, 4, 6, 8)
            if columns % (splits * 128) == 0 and rows // 64 * splits <= 1200
        ]  # fmt: skip
    return found


def main() -> int:
    """Exit status 1: an implementation is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8b", choices=[*SHAPES, "all"])
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s, for the floor")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tokens", default="1,2,4,16,32,64", help="numbers of tokens to tune")
    options = parser.parse_args()
    shapes = [
        shape
        for name, these in SHAPES.items()
        if options.shapes in (name, "all")
        for shape in these
    ]
    facts = DeviceFacts.of(torch.device("cuda", torch.cuda.current_device()))
    print(facts, f"torch {torch.__version__}")
    if options.tune:
        tune(shapes, facts, [int(one) for one in options.tokens.split(",")])
        return 0
    wrong = compare(shapes, facts, options.bandwidth)
    print("\nwrong:" if wrong else "\nall right", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
