"""The operations of a vision tower: what each computes, and the call through the kernel table.

Models and the runner call `Ops`; which kernel runs is the table's decision. An implementation that
fails during the warm-up is replaced by the next one, any later failure is raised.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kernels.attention.segments import Segments
from services.common.geometry import Grid
from services.common.nn.dispatch import KernelTable
from services.encoder.operations.table import TowerFacts


class Ops:
    """What a tower computes with."""

    def __init__(self, table: KernelTable[TowerFacts]) -> None:
        self.table = table

    def pack_patches(
        self,
        pixels: Tensor,
        grids: Sequence[Grid],
        patch_size: int,
        merge_size: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Patches of still images, normalized to [-1, 1], without the time axis.

        Args:
            pixels: the images' `[h * patch, w * patch, channels]` uint8, flat, one after the other.
            grids: of the images, t = 1.
            patch_size: pixels per patch side.
            merge_size: patches per image-token side.
            dtype: of the result; computed in float32, as by the reference image processor.
            out: where the result goes; None: new memory.

        Returns:
            `[N, channels * patch²]`, rows in merge-block order, channel-major.
        """
        num_patches = sum(height * width for _, height, width in grids)
        if out is None:
            size = num_patches, pixels.numel() // num_patches
            out = torch.empty(size, dtype=dtype, device=pixels.device)
        first_pixel, first_row = 0, 0
        for (_, height, width), equal in groupby(grids):
            count = len(list(equal))
            rows = out[first_row : first_row + count * height * width]
            images = pixels[first_pixel : first_pixel + rows.numel()].view(
                count, height * patch_size, width * patch_size, -1
            )
            self.table.call("pack_patches", images, height, width, merge_size, rows)
            first_pixel += rows.numel()
            first_row += len(rows)
        return out

    def pack_pairs(
        self,
        pixels: Tensor,
        grids: Sequence[Grid],
        patch_size: int,
        merge_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """As `pack_patches`, of pairs of frames, with the time axis.

        Args:
            pixels: the pairs' `[2, h * patch, w * patch, channels]` uint8, flat.
            grids: of the pairs, t = 1.

        Returns:
            `[N, channels * 2 * patch²]`, rows in merge-block order, channel-major, then by time.
        """
        frames = [grid for grid in grids for _ in range(2)]
        packed = self.pack_patches(pixels, frames, patch_size, merge_size, dtype)
        out = packed.new_empty(len(packed) // 2, 2 * packed.shape[1])
        first = 0
        for _, height, width in grids:
            rows = height * width
            by_time = packed[2 * first : 2 * (first + rows)].view(2, rows, -1, patch_size**2)
            out[first : first + rows].view(rows, -1, 2, patch_size**2).copy_(
                by_time.permute(1, 2, 0, 3)
            )
            first += rows
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`(layer_norm(x + residual), x + residual)` of two `[N, hidden]`, the first of which may
        be overwritten.

        Rounding points: the sum is rounded once; the norm is float32's from there, weight and bias
        included, and rounded once.
        """
        return self.table.call("add_layer_norm", x, residual, weight, bias, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As `add_layer_norm`, of x alone."""
        return self.table.call("layer_norm", x, weight, bias, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """`x @ weight.T + bias`; the weight is `[out_features, in_features]`."""
        return self.table.call("linear", x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor
    ) -> Tensor | None:
        """`linear`, to be added to the residual stream, which is contiguous and may be overwritten.

        Returns:
            What the next `add_layer_norm` has to add; None: the GEMM's epilogue has added it.
        """
        return self.table.call("linear_add", x, weight, bias, residual)

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """`gelu(x @ weight.T + bias)` by GELU's tanh form, as `linear`."""
        return self.table.call("linear_gelu", x, weight, bias)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of queries and keys, `[N, 2, num_heads, head_dim]`, which may be
        overwritten: element j is rotated with element j + head_dim / 2 by `[N, head_dim / 2]`
        float32, and cast once.
        """
        return self.table.call("rotary", x, cos, sin)

    def ragged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        """Full (non-causal) multi-head attention within each segment, scaled by head_dim ** -0.5.
        Query, key and value, `[N, num_heads, head_dim]`, may be strided over N.

        Returns:
            `[N, num_heads, head_dim]`, contiguous; rows behind the last segment are undefined.
        """
        return self.table.call("ragged_attention", query, key, value, segments)
