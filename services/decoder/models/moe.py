"""A mixture of experts in place of a layer's MLP."""

import torch
from torch import Tensor, nn

from services.common.model_spec import TextSpec
from services.common.nn.collectives import Ranks
from services.common.nn.experts import Experts, Router
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.models.mlp import MLP
from services.decoder.models.stream import Stream
from services.decoder.operations.step_kernels import StepKernels


class MoE(nn.Module):
    """A router that sends each token to some of the experts, and perhaps a shared expert.

    Args:
        spec: sizes and options of the model.
        ranks: ranks that share the model.
    """

    def __init__(self, spec: TextSpec, ranks: Ranks) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
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

    def forward(self, stream: Stream, norm: RMSNorm, kernels: StepKernels) -> Stream:
        """Adds the experts of the normed hidden state to the stream."""
        normed, residual = stream.normed(norm, kernels)
        if self.ranks.count == 1:
            return Stream(residual, self._experts(normed, residual, kernels))
        # Kernels add to this rank's term of the sum instead of the residual stream.
        term = torch.zeros_like(residual)
        out = self._experts(normed, term, kernels)
        self.ranks.add(term if out is None else out.add_(term), residual)
        return Stream(residual)

    def _experts(self, normed: Tensor, residual: Tensor, kernels: StepKernels) -> Tensor | None:
        """Returns what is still to be added to `residual`; None if all was added in place."""
        out = kernels.moe(normed, self.gate, self.experts, residual)
        if self.shared_expert is not None:
            hidden = kernels.linear_swiglu(normed, self.shared_expert.gate_up_proj)
            shared = kernels.project(hidden, self.shared_expert.down_proj)
            gated = kernels.shared_gate(shared, normed, self.shared_expert_gate, residual)
            out = gated if out is None else out if gated is None else out + gated
        return out
