"""Gated delta net: linear attention with a recurrent state (Qwen3.5)."""

import torch
from torch import Tensor, nn

from services.common.model_spec import TextSpec
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, MergedLinear
from services.decoder.kernels.states import DeltaInputs
from services.decoder.models.base import StepContext


class GatedDeltaNet(nn.Module):
    """The mixer of a linear attention layer, up to its output projection.

    Args:
        spec: of the model.
        layer: index among the linear attention layers.
        merge_gates: `in_proj` has the gates' rows, too. Quantized checkpoints leave them
            unquantized, in a layer of their own.
    """

    name = "linear_attn"
    float32_parameters = frozenset({"A_log"})  # some checkpoints hold it in bfloat16

    def __init__(self, spec: TextSpec, layer: int, *, merge_gates: bool) -> None:
        super().__init__()
        sizes = spec.linear_attention
        assert sizes is not None
        self.sizes, self.layer = sizes, layer
        heads = sizes.num_value_heads
        wide = {"in_proj_qkv": sizes.num_channels, "in_proj_z": sizes.value_size}
        gates = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = MergedLinear(spec.hidden_size, wide | gates if merge_gates else wide)
        self.gate_proj = None if merge_gates else MergedLinear(spec.hidden_size, gates)
        channels = sizes.num_channels
        self.conv1d = nn.Conv1d(channels, channels, sizes.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.norm = RMSNorm(sizes.value_head_dim, spec.rms_norm_eps)
        self.out_proj = Linear(sizes.value_size, spec.hidden_size)

    @property
    def output(self) -> Linear:
        """The projection back to the residual stream."""
        return self.out_proj

    def forward(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """`[T, value_heads * value_dim]`, before the output projection; updates the states.

        Args:
            x: see `DecoderLayer`.
            residual: see `DecoderLayer`.
            norm: before the layer.
            step: shared by all layers; it has a state layout.

        Returns:
            The above, and the hidden state `x + residual`.
        """
        layout, ops, sizes = step.metadata.states, step.ops, self.sizes
        assert layout is not None
        channels, heads = sizes.num_channels, sizes.num_value_heads
        if self.gate_proj is None:
            projected, residual = step.kernels.norm_linear(x, residual, norm, self.in_proj)
            projected = ops.reduce_split_k(projected, residual.dtype)
            gates = projected[:, channels + sizes.value_size :]
        else:
            hidden, residual = step.kernels.add_norm(x, residual, norm)
            gates = self.gate_proj(hidden)
            projected = ops.reduce_split_k(
                step.kernels.project(hidden, self.in_proj), residual.dtype
            )
        inputs = DeltaInputs(
            sizes, projected[:, :channels], gates[:, :heads], gates[:, heads:],
            self.conv1d.weight[:, 0], self.A_log, self.dt_bias,
        )  # fmt: skip
        mixed = projected.new_empty(len(projected), heads, sizes.value_head_dim)
        states = layout.cache.layer(self.layer)
        if layout.num_decodes:
            ops.delta_decode(inputs, states, layout, mixed)
        if layout.num_decodes < len(layout.slots):
            ops.delta_prefill(inputs, states, layout, mixed)
        gate = projected[:, channels : channels + sizes.value_size]
        return ops.gated_norm(mixed, gate, self.norm.weight, self.norm.eps), residual
