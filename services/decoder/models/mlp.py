"""What a decoder layer does to each token alone: a gated MLP. A mixture of experts is `moe`.

Both take and return a layer's `(x, residual)`, see `transformer.DecoderLayer`, and both are divided
among ranks by the intermediate size: of the MLP, of each expert, of the shared expert.
"""

from torch import Tensor, nn

from services.common.model_spec import TextSpec
from services.common.nn.collectives import Ranks
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations.step_kernels import StepKernels


def row_parallel(
    x: Tensor, layer: Linear, residual: Tensor, kernels: StepKernels, ranks: Ranks
) -> Tensor | None:
    """Projects back to the residual stream. Returns what is still to be added to the stream; None:
    it has been added.

    Ranks hold the weight by columns, so each one's output is a term of a sum, which is complete
    before anything is added to the residual stream. Kernels that add it themselves are those of one
    rank alone, see the dispatch table.
    """
    if ranks.count == 1:
        return kernels.linear_residual(x, layer, residual)
    ranks.add(kernels.project(x, layer), residual)
    return None


class MLP(nn.Module):
    """SwiGLU between two projections."""

    def __init__(self, spec: TextSpec, size: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        share = ranks.share(size, "intermediate_size")
        self.gate_up_proj = Linear(
            spec.hidden_size, {"gate_proj": share, "up_proj": share}, bias=spec.mlp_bias
        )
        self.down_proj = Linear(share, spec.hidden_size, bias=spec.mlp_bias)

    def forward(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, kernels: StepKernels
    ) -> tuple[Tensor | None, Tensor]:
        """The MLP of the normed hidden state `x + residual`."""
        hidden, residual = kernels.norm_swiglu(x, residual, norm, self.gate_up_proj, self.down_proj)
        return row_parallel(hidden, self.down_proj, residual, kernels, self.ranks), residual
