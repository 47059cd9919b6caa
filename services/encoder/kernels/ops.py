"""The operations of a tower that a GPU runs as one kernel each, and their plain twins."""

import importlib.util
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from services.encoder.kernels import packing, rope


class Ops(Protocol):
    """What a block asks for besides its plain matrix products and its attention, and what comes
    before the first one.
    """

    def pack_patches(
        self, images: Tensor, height: int, width: int, merge_size: int, out: Tensor
    ) -> None:
        """See `packing.pack_patches`."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The residual addition and the LayerNorm after it.

        Rounding points: the sum is rounded once; the norm is float32's from there, weight and bias
        included, and rounded once.

        Args:
            x: `[N, hidden]`; may be overwritten.
            residual: as `x`; only read.
            weight: `[hidden]`.
            bias: as `weight`.
            eps: added to the variance.

        Returns:
            `(layer_norm(x + residual), x + residual)`.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As `add_layer_norm`, of x alone."""
        ...

    def add_product(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> bool:
        """`residual += x @ weight.T + bias`; False: not done, a product and `add_layer_norm` take
        less time.
        """
        ...

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """`gelu(x @ weight.T + bias)` by GELU's tanh form.

        Args:
            x: `[N, in_features]`.
            weight: `[out_features, in_features]`.
            bias: `[out_features]`.
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `rope.rotate`. `x` may be overwritten."""
        ...


class PlainOps:
    """Plain torch: the specification, and the path of CPUs."""

    pack_patches = staticmethod(packing.pack_patches)
    rotate = staticmethod(rope.rotate)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        residual = x + residual
        return self.layer_norm(residual, weight, bias, eps), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_product(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> bool:
        """See `Ops`: in plain torch there is nothing to gain."""
        return False

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See `Ops`. The product is rounded before the GELU."""
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def create_ops(device: torch.device) -> Ops:
    """The fused operations on CUDA where Triton is installed, else the plain ones."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PlainOps()
    from services.encoder.kernels.triton_ops import TritonOps

    return TritonOps()
