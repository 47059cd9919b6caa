"""The gated MLP of a layer, which works on each token alone. A mixture of experts is in `moe`.

Both take and return the residual stream. Ranks divide both by the intermediate size: of the MLP, of
each expert, and of the shared expert.
"""

from torch import Tensor, nn

from services.common.model_spec import TextSpec
from services.common.nn.collectives import Ranks
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.models.stream import Stream
from services.decoder.operations.step_kernels import StepKernels


def row_parallel(
    x: Tensor, layer: Linear, residual: Tensor, kernels: StepKernels, ranks: Ranks
) -> Stream:
    """Projects back to the residual stream, and returns the stream.

    Ranks hold the weight by columns, so the output of each rank is a term of a sum. The sum is
    complete before anything is added to the residual stream. The dispatch table has kernels that
    add to the stream themselves only for one rank alone.

    Args:
        x: `[T, K]`, this rank's input of the layer.
        layer: output or down projection.
        residual: `[T, hidden]`, hidden state to which the output is added.
        kernels: kernels of the step.
        ranks: ranks that share the model.
    """
    if ranks.count == 1:
        return Stream(residual, kernels.linear_residual(x, layer, residual))
    ranks.add(kernels.project(x, layer), residual)
    return Stream(residual)


class MLP(nn.Module):
    """SwiGLU between two projections.

    Args:
        spec: sizes and options of the model.
        size: intermediate size.
        ranks: ranks that share the model.
    """

    def __init__(self, spec: TextSpec, size: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        share = ranks.share(size, "intermediate_size")
        self.gate_up_proj = Linear(
            spec.hidden_size, {"gate_proj": share, "up_proj": share}, bias=spec.mlp_bias
        )
        self.down_proj = Linear(share, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, stream: Stream, norm: RMSNorm, kernels: StepKernels) -> Stream:
        """Adds the MLP of the normed hidden state to the stream."""
        x, residual = stream.swiglu(norm, self.gate_up_proj, self.down_proj, kernels)
        return row_parallel(x, self.down_proj, residual, kernels, self.ranks)
