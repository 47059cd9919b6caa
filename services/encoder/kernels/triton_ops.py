"""The fused operations, gathered. Imported only where Triton is."""

import torch
from torch import Tensor

from services.common.nn import cublaslt
from services.encoder.kernels import add_layer_norm, rotate


class TritonOps:
    """See `ops.Ops`."""

    add_layer_norm = staticmethod(add_layer_norm.add_layer_norm)
    rotate = staticmethod(rotate.rotate)

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See `ops.Ops`. cublasLt adds the bias and applies the GELU before it rounds, once."""
        found = cublaslt.linear(x, weight, bias, gelu=True)
        if found is None:
            found = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return found
