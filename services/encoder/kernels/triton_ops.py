"""The fused operations, gathered. Imported only where Triton is."""

import torch
from torch import Tensor

from services.common.nn import cublaslt
from services.common.nn.linear import add_product
from services.encoder.kernels import pack_patches, rotate
from services.encoder.kernels.add_layer_norm import add_layer_norm, layer_norm


class TritonOps:
    """See `ops.Ops`."""

    add_layer_norm = staticmethod(add_layer_norm)
    layer_norm = staticmethod(layer_norm)
    add_product = staticmethod(add_product)
    pack_patches = staticmethod(pack_patches.pack_patches)
    rotate = staticmethod(rotate.rotate)

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See `ops.Ops`. cublasLt adds the bias and applies the GELU before it rounds, once."""
        found = cublaslt.linear(x, weight, bias, gelu=True)
        if found is None:
            found = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return found
