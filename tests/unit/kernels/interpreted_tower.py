"""Run by interpreted.py."""

import torch
from torch import Tensor

from kernels.tower import elementwise, plain
from tests.unit.kernels.interpreter import assert_close


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, atol=2e-6, rtol=2e-6)


def check_rotary(heads: int, dim: int) -> None:
    qkv, angles = torch.randn(5, 3, heads, dim), torch.rand(5, dim // 2) * 6.28
    expected = plain.rotary(qkv[:, :2], angles.cos(), angles.sin())
    value = qkv[:, 2].clone()
    close(elementwise.rotary(qkv[:, :2], angles.cos(), angles.sin()), expected)
    assert torch.equal(qkv[:, 2], value)


def check_add_layer_norm(width: int) -> None:
    x, residual = torch.randn(3, width), torch.randn(3, width) * 5 + 2
    weight, bias, kept = torch.randn(width), torch.randn(width), residual.clone()
    expected = plain.add_layer_norm(x, residual, weight, bias, 1e-6)
    found = elementwise.add_layer_norm(x.clone(), residual, weight, bias, 1e-6)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) and torch.equal(residual, kept)
    assert torch.equal(elementwise.layer_norm(found[1], weight, bias, 1e-6), found[0])


def check_pack_patches(height: int, width: int, patch: int = 16) -> None:
    images = torch.randint(0, 256, (3, height * patch, width * patch, 3), dtype=torch.uint8)
    expected, found = torch.full((2, 3 * height * width, 3 * patch**2), torch.nan)
    plain.pack_patches(images, height, width, 2, expected)
    elementwise.pack_patches(images, height, width, 2, found)
    assert torch.equal(found, expected)


if __name__ == "__main__":
    for shape in ((4, 64), (3, 72), (2, 16)):
        check_rotary(*shape)
    for width in (64, 72, 1152, 4608):
        check_add_layer_norm(width)
    check_pack_patches(4, 6)
    check_pack_patches(2, 2)
    check_pack_patches(2, 4, 14)
    print("agreed")
