"""Gated delta net: linear attention with a recurrent state (Qwen3.5)."""

import torch
from torch import Tensor, nn

from kernels.linear_attention.states import DeltaInputs
from services.common.model_spec import TextSpec
from services.common.nn.collectives import Ranks, Share
from services.common.nn.dispatch import KernelTable
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.models.base import StepContext
from services.decoder.models.stream import Stream
from services.decoder.operations.kernel_facts import KernelFacts


class _Convolution(nn.Conv1d):
    """A causal convolution of each channel alone, over a rank's share of the channels.

    Args:
        channels: the rank's share.
        width: number of tokens that an output depends on.
    """

    def __init__(self, channels: Share, width: int) -> None:
        super().__init__(channels.count, channels.count, width, groups=channels.count, bias=False)
        self.shares = {"weight": channels}


class GatedDeltaNet(nn.Module):
    """The mixer of a linear attention layer, up to its output projection.

    Args:
        spec: sizes and options of the model.
        layer: index among the linear attention layers.
        ranks: ranks that share the model, by heads.
        merge_gates: True if `in_proj` has the gates' rows, too. Quantized checkpoints leave the
            gates unquantized, so that they need a layer of their own.
    """

    name = "linear_attn"
    float32_parameters = frozenset({"A_log"})  # some checkpoints hold it in bfloat16

    def __init__(self, spec: TextSpec, layer: int, ranks: Ranks, *, merge_gates: bool) -> None:
        super().__init__()
        whole = spec.linear_attention
        assert whole is not None
        self.sizes, self.layer = whole.part(ranks.count), layer
        names = "linear_num_key_heads", "linear_num_value_heads"
        key = ranks.share(whole.num_key_heads, names[0], whole.key_head_dim)
        value = ranks.share(whole.num_value_heads, names[1], whole.value_head_dim)
        heads = ranks.share(whole.num_value_heads, names[1])
        channels = Share.joined([key, key, value])
        wide = {"in_proj_qkv": channels, "in_proj_z": value}
        gates = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = Linear(spec.hidden_size, wide | gates if merge_gates else wide)
        self.gate_proj = None if merge_gates else Linear(spec.hidden_size, gates)
        self.conv1d = _Convolution(channels, whole.conv_width)
        self.A_log = nn.Parameter(torch.empty(heads.count), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads.count), requires_grad=False)
        self.shares = {"A_log": heads, "dt_bias": heads}
        self.norm = RMSNorm(whole.value_head_dim, spec.rms_norm_eps)
        self.out_proj = Linear(value, spec.hidden_size)

    @property
    def output(self) -> Linear:
        return self.out_proj

    def forward(self, stream: Stream, norm: RMSNorm, step: StepContext) -> tuple[Tensor, Tensor]:
        """Mixes tokens and updates the recurrent states; see `Mixer`.

        The module `delta_rule` specifies the operations.

        Returns:
            `[T, value_heads * value_dim]`, and the hidden state.
        """
        layout, table, sizes = step.metadata.states, step.ops.table, self.sizes
        assert layout is not None
        channels, heads = sizes.num_channels, sizes.num_value_heads
        if self.gate_proj is None:
            projected, residual = stream.projected(norm, self.in_proj, step.kernels)
            projected = _whole(projected, residual.dtype, table)
            gates = projected[:, channels + sizes.value_size :]
        else:
            normed, residual = stream.normed(norm, step.kernels)
            gates = self.gate_proj(normed)
            rows, stack = step.adapters, self.gate_proj.adapters
            if rows is not None and stack is not None and stack.applies(rows):
                gates = step.kernels.add_adapters(gates, normed, stack.factors, rows)
            projected = step.kernels.project(normed, self.in_proj)
            projected = _whole(projected, residual.dtype, table)
        inputs = DeltaInputs(
            sizes,
            projected[:, :channels],
            gates[:, :heads],
            gates[:, heads:],
            self.conv1d.weight[:, 0],
            self.A_log,
            self.dt_bias,
        )
        mixed = projected.new_empty(len(projected), heads, sizes.value_head_dim)
        states, count = layout.cache.layer(self.layer), layout.num_decodes
        if count and layout.runs is not None:
            assert layout.kept is not None
            kept = layout.kept.layer(self.layer)
            table.call("delta_verify", inputs, states, layout, kept, mixed, num_tokens=count)
        elif count:
            table.call("delta_decode", inputs, states, layout, mixed, num_tokens=count)
        if count < len(layout.slots):
            saved = layout.saved(self.layer)
            table.call("delta_prefill", inputs, states, layout, mixed, saved, num_tokens=len(mixed))
        gate = projected[:, channels : channels + sizes.value_size]
        return table.call("gated_norm", mixed, gate, self.norm.weight, self.norm.eps), residual


def _whole(x: Tensor, dtype: torch.dtype, table: KernelTable[KernelFacts]) -> Tensor:
    """Returns a GEMM's output `[T, N]`, which is the sum of split-K partials if there are any."""
    if x.dim() == 2:
        return x
    return table.call("reduce_split_k", x, dtype, num_tokens=x.shape[1])
