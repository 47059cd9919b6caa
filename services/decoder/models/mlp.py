"""What a decoder layer does to each token alone: a gated MLP, or a mixture of experts.

Both take and return a layer's `(x, residual)`, see `transformer.DecoderLayer`, and both are divided
among ranks by the intermediate size: of the MLP, of each expert, of the shared expert.
"""

from torch import Tensor, nn

from kernels import plain
from services.common.model_spec import MoESpec, TextSpec
from services.common.nn.collectives import Ranks
from services.common.nn.experts import Experts, Router
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, MergedLinear
from services.decoder.operations.ops import StepKernels


def row_parallel(
    x: Tensor, layer: Linear, residual: Tensor, kernels: StepKernels, ranks: Ranks
) -> Tensor | None:
    """Projects back to the residual stream. Returns what is still to be added to the stream; None:
    the kernel has added it.

    Ranks hold the weight by columns, so each one's output is a term of a sum, which is complete
    before anything is added to the residual stream. Kernels that add it themselves are those of one
    rank alone, see the dispatch table.
    """
    output = kernels.linear_residual(x, layer, residual)
    if ranks.count == 1 or output is None:
        return output
    return ranks.all_reduce(plain.reduce_split_k(output, residual.dtype))


class MLP(nn.Module):
    """SwiGLU between two projections."""

    def __init__(self, spec: TextSpec, size: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        share = ranks.share(size, "intermediate_size")
        self.gate_up_proj = MergedLinear(
            spec.hidden_size, {"gate_proj": share, "up_proj": share}, bias=spec.mlp_bias
        )
        self.down_proj = Linear(share, spec.hidden_size, bias=spec.mlp_bias)

    def forward(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, kernels: StepKernels
    ) -> tuple[Tensor | None, Tensor]:
        """The MLP of the normed hidden state `x + residual`."""
        hidden, residual = kernels.norm_swiglu(x, residual, norm, self.gate_up_proj)
        return row_parallel(hidden, self.down_proj, residual, kernels, self.ranks), residual


class MoE(nn.Module):
    """A router that sends each token to some of the experts, and perhaps a shared expert."""

    def __init__(self, spec: TextSpec, moe: MoESpec, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = Router(
            spec.hidden_size, moe.num_experts, moe.top_k, normalize=moe.norm_topk_prob
        )
        self.experts = Experts(
            moe.num_experts,
            spec.hidden_size,
            ranks.share(moe.intermediate_size, "moe_intermediate_size"),
        )
        self.shared_expert: MLP | None = None
        if moe.shared_intermediate_size:
            self.shared_expert = MLP(spec, moe.shared_intermediate_size, ranks)
            self.shared_expert_gate = Linear(spec.hidden_size, 1)

    def forward(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, kernels: StepKernels
    ) -> tuple[Tensor | None, Tensor]:
        """The experts of the normed hidden state `x + residual`."""
        normed, residual = kernels.add_norm(x, residual, norm)
        out = kernels.moe(normed, self.gate, self.experts, residual)
        if self.shared_expert is not None:
            hidden = kernels.linear_swiglu(normed, self.shared_expert.gate_up_proj)
            shared = kernels.project(hidden, self.shared_expert.down_proj)
            gated = kernels.shared_gate(shared, normed, self.shared_expert_gate, residual)
            out = gated if out is None else out if gated is None else out + gated
        if self.ranks.count > 1 and out is not None:
            out = self.ranks.all_reduce(out)
        return out, residual


def create_mlp(spec: TextSpec, layer: int, ranks: Ranks) -> MLP | MoE:
    """What a layer has of the two."""
    if spec.moe is not None and spec.has_experts(layer):
        return MoE(spec, spec.moe, ranks)
    return MLP(spec, spec.intermediate_size, ranks)
