"""W4A16 and INT8 linear layers on this machine's GPU: is each kernel right, which is the fastest?

    python -m benchmarks.kernels.packed               # 8B shapes, configurations of each kernel

Microseconds per call in a replayed CUDA graph, with weights that are not in the L2, and the
relative error against the plain twin. `bf16` is `F.linear` with the dequantized weight, and `floor`
the time that reading the weight takes at `--bandwidth` (TB/s), or multiplying at `--tflops`.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.fp8 import SHAPES, error, time_us
from kernels import plain
from kernels.device import DeviceFacts
from kernels.gemm import int8_kernels, int8_weight, packed_tiles, packed_weight
from kernels.gemm.int8_weight import Int8Weight
from kernels.gemm.packed_tiles import SkinnyConfig
from kernels.gemm.packed_weight import PackedWeight

SKINNY, MANY = (1, 16, 32, 64), (64, 128, 256, 512, 1008, 4096)
_COLD_BYTES = 160 << 20
_PROCESSES = 14

Call = tuple[str, Callable[[Any, Any], Tensor]]  # (x, weight) → output or partials


def packed(rows: int, columns: int, group: int = 128) -> PackedWeight:
    """A random weight in tiles; scales differ by a factor of 4."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(rows, columns // group, device="cuda") * 3e-3 + 1e-3).bfloat16()
    return packed_weight.tiled(PackedWeight(codes, scale, None, 4, group, columns))


def int8(rows: int, columns: int) -> Int8Weight:
    """A random weight; scales differ by a factor of 4."""
    values = torch.randint(-128, 128, (rows, columns), device="cuda").to(torch.int8)
    return Int8Weight(values, torch.rand(rows, 1, device="cuda") * 3e-4 + 1e-4)


def _copy(weight: Any) -> Any:  # noqa: ANN401 - of either kind
    if isinstance(weight, PackedWeight):
        fields = {**{name: getattr(weight, name) for name in weight.__slots__}}
        return PackedWeight(**{**fields, "codes": weight.codes.clone()})
    return Int8Weight(weight.values.clone(), weight.scale)


def copies(weight: Any) -> list[Any]:  # noqa: ANN401 - of either kind
    """Enough of them that none is in the L2 when its turn comes."""
    values = weight.codes if isinstance(weight, PackedWeight) else weight.values
    return [weight] + [_copy(weight) for _ in range(max(1, _COLD_BYTES // values.nbytes))]


def packed_calls(num_tokens: int, columns: int, swiglu: bool, facts: DeviceFacts) -> Iterator[Call]:
    """The kernels of a packed weight, with candidates for their configurations."""
    if num_tokens in (*SKINNY, 128, 256):
        early = (0, 4096) if num_tokens <= 16 else (0,)
        if swiglu:
            for pair, stages, fetched in itertools.product((False, True), (4, 6), early):
                config = SkinnyConfig(1, pair, stages, fetched)
                yield (
                    f"skinny pair {pair:d} stages {stages} early {fetched}",
                    partial(packed_tiles.linear_swiglu, device=facts, config=config),
                )
        else:
            pairs = (False, True) if num_tokens >= 16 else (False,)
            for splits, pair, stages, fetched in itertools.product(
                (2, 3, 4, 6, 8), pairs, (4, 6), early
            ):
                if columns % (splits * 128):
                    continue
                config = SkinnyConfig(splits, pair, stages, fetched)
                yield (
                    f"skinny splits {splits} pair {pair:d} stages {stages} early {fetched}",
                    partial(packed_tiles.split_k_partials, device=facts, config=config),
                )
    if num_tokens in MANY:
        yield "dequantized", partial(dequantized, device=facts, swiglu=swiglu)


# Memory of `dequantized`, by size.
_scratch: dict[tuple[int, int], Tensor] = {}


def dequantized(x: Tensor, weight: PackedWeight, *, device: DeviceFacts, swiglu: bool) -> Tensor:
    """The whole weight, then the library's GEMM."""
    size = (weight.rows, weight.columns)
    if size not in _scratch:
        _scratch[size] = torch.empty(size, dtype=x.dtype, device=x.device)
    packed_tiles.dequantize(weight, _scratch[size], device=device)
    out = F.linear(x, _scratch[size])
    return plain.silu_and_mul(out) if swiglu else out


def int8_calls(num_tokens: int, columns: int, swiglu: bool, facts: DeviceFacts) -> Iterator[Call]:
    """The kernels of an INT8 weight, with candidates for their configurations."""
    if num_tokens in SKINNY and not swiglu:
        for splits, stages in itertools.product((1, 2, 4), (3, 4)):
            yield (
                f"int8 skinny splits {splits} stages {stages}",
                partial(int8_kernels.split_k_partials, device=facts, splits=splits, stages=stages),
            )
    if num_tokens in MANY:
        for config in (
            int8_kernels.GemmConfig(), int8_kernels.GemmConfig(128, 128, 128, 4, 8),
            int8_kernels.GemmConfig(64, 128, 128, 5, 4),
            int8_kernels.GemmConfig(64, 256, 128, 3, 8),
        ):  # fmt: skip
            name = f"int8 gemm {config.tokens}x{config.rows} stages {config.stages}"
            yield name, partial(int8_kernels.gemm, device=facts, config=config, is_swiglu=swiglu)
        if not swiglu:
            yield "int_mm", int8_weight.int_mm_linear


def twin(x: Tensor, weight: Any, swiglu: bool) -> Tensor:  # noqa: ANN401 - of either kind
    """By plain torch."""
    if isinstance(weight, PackedWeight):
        found = packed_weight.weight_only_linear(x, weight)
    else:
        found = int8_weight.w8a8_linear(x, weight)
    return plain.silu_and_mul(found) if swiglu else found


def measure(rows: int, columns: int, bandwidth: float, tflops: float) -> None:
    """Prints the configurations of one shape, the fastest first."""
    facts, swiglu = DeviceFacts.of(torch.device("cuda", 0)), rows == 24576
    for make, calls, kind in ((packed, packed_calls, "w4a16"), (int8, int8_calls, "int8")):
        weight = make(rows, columns)
        cold = copies(weight)
        dequantize = (packed_weight if kind == "w4a16" else int8_weight).dequantize
        wide = dequantize(weight, torch.bfloat16)  # type: ignore[arg-type]
        wides = [wide] + [wide.clone() for _ in range(max(1, _COLD_BYTES // wide.nbytes))]
        for num_tokens in sorted({*SKINNY, *MANY}):
            x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
            expected = twin(x, weight, swiglu)
            bf16 = time_us(partial(F.linear, x), wides)
            read = rows * columns * (0.515 if kind == "w4a16" else 1) / bandwidth / 1e6
            floor = max(read, 2 * num_tokens * rows * columns / tflops / 1e6)
            found = []
            for name, call in calls(num_tokens, columns, swiglu, facts):
                try:
                    out = call(x, weight)
                    total = out if out.dim() == 2 else out.sum(0)
                    wrong = error(total, expected)
                    found.append((time_us(lambda w, call=call, x=x: call(x, w), cold), name, wrong))
                except Exception as failure:
                    print(f"    {name}: {type(failure).__name__}: {failure}".splitlines()[0][:160])
            found.sort()
            print(f"{kind} {rows} x {columns}, {num_tokens}: bf16 {bf16:.1f} floor {floor:.1f}")
            for time, name, wrong in found:
                print(f"    {time:8.1f}  {name}  ({wrong:.1e})", flush=True)


def _warm(task: tuple[int, int, int]) -> None:
    """Compiles what one shape and number of tokens needs, into Triton's cache."""
    rows, columns, num_tokens = task
    facts, swiglu = DeviceFacts.of(torch.device("cuda", 0)), rows == 24576
    x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
    for make, calls in ((packed, packed_calls), (int8, int8_calls)):
        weight = make(rows, columns)
        for _, call in calls(num_tokens, columns, swiglu, facts):
            try:
                call(x, weight)
            except Exception:
                continue


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="8b")
    parser.add_argument("--bandwidth", type=float, default=3.0)
    parser.add_argument("--tflops", type=float, default=700)
    arguments = parser.parse_args()
    shapes = SHAPES[arguments.shapes]
    tasks = [(*shape, tokens) for tokens in {*SKINNY, *MANY} for shape in shapes[1:3]]
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        pool.map(_warm, tasks, chunksize=1)
    for shape in shapes:
        measure(*shape, arguments.bandwidth, arguments.tflops)


if __name__ == "__main__":
    main()
