"""Device code that converts 4-bit codes in tiles (`packed_weight`) to floats in registers."""

# ruff: noqa: ANN201 - Triton blocks and constants have no type
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from functools import cache

import torch
import triton
import triton.language as tl

# By data type: PTX vector type, bits of the float for code 0, of 1.0, and of the negative offset
# for the middle of the range.
_FLOATS = {
    torch.bfloat16: ("bf16x2", 0x4300, 0x3F80, 0xC308),
    torch.float16: ("f16x2", 0x6400, 0x3C00, 0xE408),
}
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 5)


@cache
def assembly(kind: torch.dtype, zeros: bool) -> str:
    """PTX that converts two words of four codes to four registers of two 16-bit floats.

    A code becomes the lowest bits of a float whose last bit has the value 1. Subtracting the offset
    is then exact. The result is "" for other data types, which only Triton's interpreter uses, as
    the interpreter cannot run assembly.

    Args:
        kind: data type of the floats.
        zeros: True if each code has its own zero point, False if it is the middle of the range.
    """
    if kind not in _FLOATS:
        return ""
    dtype, magic, one, middle = _FLOATS[kind]
    lines = [
        "{ .reg .b32 shifted, one, middle;",
        f"mov.b32 one, {one:#06x}{one:04x}; mov.b32 middle, {middle:#06x}{middle:04x};",
    ]
    for index in range(4):
        lines += [
            f"shr.u32 shifted, $4, {4 * index};",
            f"lop3.b32 ${index}, shifted, 0x000f000f, {magic:#06x}{magic:04x}, 0xEA;",
        ]
    for index in range(4):
        offset = f"${5 + index}" if zeros else "middle"
        lines.append(f"fma.rn.{dtype} ${index}, ${index}, one, {offset};")
    return "\n".join(lines) + "}"


@triton.jit
def widen(words, zeros, dtype: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Converts words of a tile to their four codes minus the zero points.

    The four results have the shape of the words. They are the codes of columns 0-31, 32-63, 64-95
    and 96-127 of the tile.

    Args:
        words: int16 words.
        zeros: four int32 blocks of zero points that broadcast to the words. Only read if ZEROS.
        dtype: data type of the results.
        ZEROS: True if there are zero points, False if the zero point is 8.
        ASSEMBLY: result of `assembly`.
    """
    z0, z1, z2, z3 = zeros
    if ASSEMBLY != "":
        o0, o1, o2, o3 = words, words, words, words  # the assembly does not read these operands
        if ZEROS:
            o0, o1, o2, o3 = (
                _offset(z0, dtype),
                _offset(z1, dtype),
                _offset(z2, dtype),
                _offset(z3, dtype),
            )
        if dtype == tl.float16:
            a, b, c, d = tl.inline_asm_elementwise(
                ASSEMBLY,
                _OPERANDS,
                [words, o0, o1, o2, o3],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                ASSEMBLY,
                _OPERANDS,
                [words, o0, o1, o2, o3],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    else:
        a = code(words, 0, z0, ZEROS).to(dtype)
        b = code(words, 4, z1, ZEROS).to(dtype)
        c = code(words, 8, z2, ZEROS).to(dtype)
        d = code(words, 12, z3, ZEROS).to(dtype)
    return a, b, c, d


@triton.jit
def _offset(zero, dtype: tl.constexpr):
    """Converts a zero point to the bits of the float that `assembly` adds to a code's float."""
    least: tl.constexpr = -0x1C00 if dtype == tl.float16 else -0x3D00  # bits for zero point 0
    return zero.to(tl.int16) | tl.full(zero.shape, least, tl.int16)


@triton.jit
def code(words, shift: tl.constexpr, zero, ZEROS: tl.constexpr):
    """Extracts one code of each word and subtracts its zero point, in float32. See `widen`."""
    found = ((words >> shift) & 15).to(tl.float32)
    if ZEROS:
        found -= zero.to(tl.float32)
    else:
        found -= 8.0
    return found


@triton.jit
def beside(a, b):
    """Concatenates two blocks `[R, C]` to `[R, 2 * C]`."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def load_words(ptr):
    """Loads the words of a tile, `[64, 32]`."""
    words = tl.load(ptr + tl.arange(0, 2048))
    words = tl.permute(tl.reshape(words, (2, 4, 8, 4, 2, 2, 2)), (1, 5, 2, 0, 4, 3, 6))
    return tl.reshape(words, (64, 32))


@triton.jit
def load_halves(ptr, stride):
    """Loads 32 rows of each of two tiles that are `stride` words apart, `[64, 32]`."""
    index = tl.arange(0, 2048)
    place = index % 512 + index // 512 % 2 * tl.cast(stride, tl.int64) + index // 1024 * 1024
    words = tl.reshape(tl.load(ptr + place), (2, 4, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(words, (1, 5, 2, 0, 4, 3, 6)), (64, 32))


@triton.jit
def load_groups(ptr, column, num_rows, GROUP: tl.constexpr):
    """Loads scales or zero points for the four quarters of a tile's columns.

    Args:
        ptr: pointers to the first group of the rows.
        column: first column of the tile.
        num_rows: number of rows of the weight.
        GROUP: columns of a group.
    """
    group = tl.cast(column // GROUP, tl.int64) * num_rows
    a = tl.load(ptr + group)
    b, c, d = a, a, a
    if GROUP < 128:
        c = tl.load(ptr + group + (64 // GROUP) * num_rows)
        d = c
    if GROUP < 64:
        b = tl.load(ptr + group + num_rows)
        d = tl.load(ptr + group + 3 * num_rows)
    return a, b, c, d


@triton.jit
def load_inputs(ptr, inside, GROUP: tl.constexpr):
    """Loads the inputs of a tile's 128 columns. For smaller groups, a block for each group."""
    PART: tl.constexpr = GROUP if GROUP < 128 else 128
    place = ptr + tl.arange(0, PART)[None, :]
    x0 = tl.load(place, mask=inside, other=0.0)
    x1, x2, x3 = x0, x0, x0
    if GROUP < 128:
        x1 = tl.load(place + PART, mask=inside, other=0.0)
    if GROUP < 64:
        x2 = tl.load(place + 64, mask=inside, other=0.0)
        x3 = tl.load(place + 96, mask=inside, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def term(
    words,
    zeros,
    scales,
    x0,
    x1,
    x2,
    x3,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Multiplies a tile with its inputs and scales the product: `[64, TOKENS]` float32."""
    s0, s1, s2, s3 = scales
    a, b, c, d = widen(words, zeros, x0.dtype, ZEROS, ASSEMBLY)
    if GROUP >= 128:
        found = tl.dot(beside(beside(a, b), beside(c, d)), x0.T) * s0
    elif GROUP == 64:
        found = tl.dot(beside(a, b), x0.T) * s0
        found += tl.dot(beside(c, d), x1.T) * s2
    else:
        found = tl.dot(a, x0.T) * s0
        found += tl.dot(b, x1.T) * s1
        found += tl.dot(c, x2.T) * s2
        found += tl.dot(d, x3.T) * s3
    return found
