"""The operations of a vision tower: each method specifies an operation, and the dispatch table
chooses the kernel that computes it.

Models and the runner call `Ops`. An implementation that fails during the warm-up is replaced by the
next implementation in the table. Any later failure is raised.
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
    """The operations of a tower on one device.

    Args:
        table: dispatch table of the tower.

    Attributes:
        table: dispatch table of the tower.
    """

    def __init__(self, table: KernelTable[TowerFacts]) -> None:
        self.table = table

    def pack_patches(
        self,
        pixels: Tensor,
        grids: Sequence[Grid],
        patch_size: int,
        merge_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Divides still images into patches and scales their values to [-1, 1]. The patches have no
        time axis.

        Args:
            pixels: uint8 pixels of all images, flat, one image after another. An image has the
                shape `[h * patch, w * patch, channels]`.
            grids: sizes of the images in patches, with t = 1.
            patch_size: pixels per side of a patch.
            merge_size: patches per side of an image token.
            dtype: data type of the result. The values are computed in float32, as by the reference
                image processor, and rounded once.

        Returns:
            `[N, channels * patch²]`, with rows in merge-block order, and columns by channel.
        """
        num_patches = sum(height * width for _, height, width in grids)
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
        """Divides pairs of frames into patches with a time axis, and scales their values to
        [-1, 1].

        Args:
            pixels: uint8 pixels of all pairs, flat, one pair after another. A pair has the shape
                `[2, h * patch, w * patch, channels]`.
            grids: sizes of the pairs in patches, with t = 1.
            patch_size: pixels per side of a patch.
            merge_size: patches per side of an image token.
            dtype: data type of the result.

        Returns:
            `[N, channels * 2 * patch²]`, with rows in merge-block order, and columns by channel,
            then by time.
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
        """Adds `x` to the residual stream and normalizes the sum.

        The sum is rounded to the data type. The norm of the rounded sum, with weight and bias, is
        computed in float32 and rounded once.

        Args:
            x: `[N, hidden]`. It may be overwritten.
            residual: `[N, hidden]`.
            weight: weight of the norm, `[hidden]`.
            bias: bias of the norm, `[hidden]`.
            eps: epsilon of the norm.

        Returns:
            `layer_norm(x + residual)` and `x + residual`.
        """
        return self.table.call("add_layer_norm", x, residual, weight, bias, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Computes the layer norm of `x`, `[N, hidden]`, with the rounding of `add_layer_norm`."""
        return self.table.call("layer_norm", x, weight, bias, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Adds `x` to the residual stream and normalizes the sum by its root mean square.

        The normalized sum is rounded before it is multiplied by the weight.

        Args:
            x: `[N, hidden]`.
            residual: `[N, hidden]`. It may be overwritten.
            weight: weight of the norm, `[hidden]`.
            eps: epsilon of the norm.

        Returns:
            `rms_norm(x + residual)` and `x + residual`.
        """
        return self.table.call("add_rms_norm", x, residual, weight, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computes the RMS norm of `x`, `[N, hidden]`, with the rounding of `add_rms_norm`."""
        return self.table.call("rms_norm", x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Computes `silu(gate) * up`, `[N, n]`, of the concatenated `[N, 2 * n]`."""
        return self.table.call("silu_and_mul", gate_up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Computes `x @ weight.T + bias` with a weight `[out_features, in_features]`."""
        return self.table.call("linear", x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor
    ) -> Tensor | None:
        """Computes `linear`, whose result is to be added to the residual stream.

        Args:
            x: `[N, in_features]`.
            weight: `[out_features, in_features]`.
            bias: `[out_features]`.
            residual: the residual stream, `[N, out_features]`, contiguous. It may be overwritten.

        Returns:
            The result, which the next `add_layer_norm` has to add. None if the GEMM's epilogue has
            added it to `residual`.
        """
        return self.table.call("linear_add", x, weight, bias, residual)

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Computes `gelu(x @ weight.T + bias)` with the tanh form of GELU."""
        return self.table.call("linear_gelu", x, weight, bias)

    def quick_gelu(self, x: Tensor) -> Tensor:
        """Computes `x * sigmoid(1.702 * x)`, the sigmoid form of GELU, of `[N, n]`."""
        return self.table.call("quick_gelu", x)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies rotary embeddings to queries and keys. Element j is rotated with element
        j + head_dim / 2, in float32, and the result is rounded once.

        Args:
            x: queries and keys, `[N, 2, num_heads, head_dim]`. They may be overwritten.
            cos: cosines of the angles, `[N, head_dim / 2]` float32.
            sin: sines of the angles, `[N, head_dim / 2]` float32.
        """
        return self.table.call("rotary", x, cos, sin)

    def ragged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        """Computes full (non-causal) multi-head attention within each segment. Scores are scaled by
        head_dim ** -0.5.

        Args:
            query: `[N, num_heads, head_dim]`, possibly strided over N.
            key: `[N, num_heads, head_dim]`, possibly strided over N.
            value: `[N, num_heads, head_dim]`, possibly strided over N.
            segments: rows of each image or frame.

        Returns:
            `[N, num_heads, head_dim]`, contiguous. Rows after the last segment are undefined.
        """
        return self.table.call("ragged_attention", query, key, value, segments)
