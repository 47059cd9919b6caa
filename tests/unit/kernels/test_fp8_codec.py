"""The PTX that decodes e4m3 to 16 bits, emulated on the CPU for all bytes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention import fp8_codec
from kernels.attention.fp8_pages import E4M3

SCALES = {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}
ONE = {torch.bfloat16: fp8_codec._ONE_TO_BF16, torch.float16: fp8_codec._ONE_TO_F16}
TWO = {torch.bfloat16: fp8_codec._TWO_TO_BF16, torch.float16: fp8_codec._TWO_TO_F16}


def permuted(first: int, second: int, selector: int) -> int:
    """`prmt.b32`: a nibble chooses one of eight bytes, or repeats the byte's sign."""
    given, found = first | second << 32, 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = given >> 8 * (nibble & 7) & 255
        found |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * place
    return found


def run(text: str, inputs: list[int]) -> list[int]:
    """Runs the instructions on registers of 32 bits, and returns the outputs."""
    moves = re.findall(r"prmt.b32 pair, (\S+), (\S+), (\w+);", text)
    shifts = re.findall(r"shl.b32 pair, pair, (\d+);", text)
    masks = re.findall(r"and.b32 \$(\d+), pair, (\w+);", text)
    registers = {f"${len(moves) + index}": value for index, value in enumerate(inputs)} | {"0": 0}
    found = [0] * len(moves)
    for (first, second, selector), shift, (out, mask) in zip(moves, shifts, masks, strict=True):
        pair = permuted(registers[first], registers[second], int(selector, 16))
        found[int(out)] = pair << int(shift) & 0xFFFFFFFF & int(mask, 16)
    return found


def values(registers: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The two elements of each register, multiplied by the divisor of the codec, `[n, 2]`."""
    bits = torch.from_numpy(np.array(registers, np.uint32).view(np.int16))
    return bits.view(dtype).double().view(-1, 2) * SCALES[dtype]


def expected(codes: list[int]) -> torch.Tensor:
    """The values of bytes, with 480 for NaN as the codec has it."""
    found = torch.tensor(codes, dtype=torch.uint8).view(E4M3).double()
    signs = torch.tensor([-480.0 if code & 128 else 480.0 for code in codes]).double()
    return torch.where(found.isnan(), signs, found)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns whether values and signs are the same, also those of zeros."""
    return torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit())


@pytest.mark.parametrize("dtype", SCALES)
def test_all_bytes_are_decoded_in_their_order(dtype: torch.dtype) -> None:
    codes = torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist()
    for at in range(0, 256, 8):
        words = [int.from_bytes(bytes(codes[at + i : at + i + 4]), "little") for i in (0, 4)]
        alone = values(run(ONE[dtype].value, words[:1]), dtype)
        assert same(alone.flatten(), expected(codes[at : at + 4]))
        pairs = values(run(TWO[dtype].value, words), dtype)
        for byte, pair in enumerate(pairs):  # a block for each byte of the words
            assert same(pair, expected([codes[at + byte], codes[at + 4 + byte]]))


@pytest.mark.parametrize("dtype", SCALES)
def test_a_wrong_selector_is_found_out(dtype: torch.dtype) -> None:
    text = TWO[dtype].value.replace("0xc480", "0xd480")  # the sign of another byte
    assert text != TWO[dtype].value
    (pair, *_) = values(run(text, [0x11, 0x8822]), dtype)
    assert not same(pair, expected([0x11, 0x22]))
    (pair, *_) = values(run(TWO[dtype].value, [0x11, 0x8822]), dtype)
    assert same(pair, expected([0x11, 0x22]))
