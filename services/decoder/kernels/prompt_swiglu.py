"""SwiGLU's product with its activation, for the many tokens of prompts, as one Triton kernel.

cuBLAS writes gate and up to memory, which for 8,192 tokens takes a tenth of the product's time to
read again. Here a tile has rows of the gate and the same rows of up, side by side in one
accumulator, and only the result is written. One program per processor goes through the tiles, and
asks for the next one's first columns while it finishes the last (`flatten`).

The plain twin is `services.decoder.kernels.ops.linear_swiglu`; the rounding points are the same.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.common.nn import launches
from services.decoder.kernels.silu_mul import swiglu

_TOKENS, _ROWS, _COLUMNS = 128, 128, 64  # of a tile: of x, of gate and of up; of both
_STAGES, _WARPS = 3, 8
_GROUP = 16  # tiles of tokens that share rows of the weight in the second cache
_LEAST_IN_USE = 1 / 1.05  # of the processors


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether it is the faster one: where tiles fill the processors, on Hopper."""
    num_tokens, num_columns = x.shape
    if x.itemsize != 2 or not x.is_contiguous() or not launches.are_free(num_tokens):
        return False
    if num_columns % _COLUMNS or len(weight) % (2 * _ROWS):
        return False
    tiles = _count(num_tokens) * (len(weight) // (2 * _ROWS))
    return launches.share_in_use(tiles) >= _LEAST_IN_USE


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_and_mul(x @ weight.T)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    num_tokens, num_columns = x.shape
    num_rows = len(weight) // 2
    out = x.new_empty(num_tokens, num_rows)
    halves = weight.view(2, num_rows, num_columns)
    tiles = _count(num_tokens) * (num_rows // _ROWS)
    _prompt_swiglu_kernel[(min(tiles, launches.PROCESSORS),)](
        TensorDescriptor.from_tensor(x, [_TOKENS, _COLUMNS]),
        TensorDescriptor.from_tensor(halves, [2, _ROWS, _COLUMNS]),
        TensorDescriptor.from_tensor(out, [_TOKENS, _ROWS]),
        num_tokens, WIDTH=num_columns, HEIGHT=num_rows,
        TOKENS=_TOKENS, ROWS=_ROWS, COLUMNS=_COLUMNS, GROUP=_GROUP, STAGES=_STAGES,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


def _count(num_tokens: int) -> int:
    return -(-num_tokens // _TOKENS)


@triton.jit(do_not_specialize=["num_tokens"])
def _prompt_swiglu_kernel(
    x_tiles, weight_tiles, out_tiles, num_tokens, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = HEIGHT // ROWS
    high = tl.cdiv(num_tokens, TOKENS)
    first, step = tl.program_id(0), tl.num_programs(0)
    for index in tl.range(first, high * wide, step, flatten=True, num_stages=STAGES):
        # A group of tiles of tokens goes through all rows of the weight together.
        group = index // (GROUP * wide)
        within = index % (GROUP * wide)
        size = tl.minimum(high - group * GROUP, GROUP)
        token = (group * GROUP + within % size) * TOKENS
        row = within // size * ROWS
        sums = tl.zeros((TOKENS, 2 * ROWS), tl.float32)
        for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            x = x_tiles.load([token, column])
            weight = weight_tiles.load([0, row, column]).reshape(2 * ROWS, COLUMNS)
            sums = tl.dot(x, weight.T, sums)
        dtype: tl.constexpr = x_tiles.dtype
        halves = tl.permute(tl.reshape(sums.to(dtype), (TOKENS, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(halves)
        out_tiles.store([token, row], swiglu(gate, up))
