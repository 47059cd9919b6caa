"""The kernels of a decoder layer, each with its arguments and its result.

T is the number of tokens of the step. Arguments are passed by position, and a kernel may overwrite
them. A GEMM may leave its output as split-K partials, `[S, T, N]` float32, which the kernel that
consumes the output reduces (`plain.reduce_split_k`).

Two kinds of arguments occur in most kernels. `residual` is the residual stream, `[T, hidden]`.
`addend` is what an earlier GEMM has still to add to the stream, `[T, hidden]` or partials of it;
None if nothing is left to add. The hidden state is their sum.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.attention.heads import ProjectedHeads
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, StoredLayers


class RMSNormKernel(Protocol):
    """Normalizes a hidden state."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Returns the norm of `x` `[T, hidden]`.

        Args:
            x: hidden state.
            weight: `[hidden]`, weight of the norm.
            eps: constant of the norm.
        """
        ...


class AddRMSNormKernel(Protocol):
    """Adds to the residual stream and normalizes the sum."""

    def __call__(
        self, addend: Tensor, residual: Tensor, weight: Tensor, eps: float, /
    ) -> tuple[Tensor, Tensor]:
        """Returns the norm of `addend + residual`, and the sum itself, both `[T, hidden]`.

        Args:
            addend: output of an earlier GEMM.
            residual: residual stream.
            weight: `[hidden]`, weight of the norm.
            eps: constant of the norm.
        """
        ...


class ProjectKernel(Protocol):
    """Multiplies by the weight of a linear layer."""

    def __call__(self, x: Tensor, layer: Linear, /) -> Tensor:
        """Returns the layer's output `[T, N]`, or partials of it, for `x` `[T, K]`."""
        ...


class LinearSwigluKernel(Protocol):
    """Multiplies by the merged gate and up projection, and applies SwiGLU."""

    def __call__(self, x: Tensor, layer: Linear, /) -> Tensor:
        """Returns `silu(gate) * up`, `[T, N]`, for `x` `[T, K]`."""
        ...


class NormLinearKernel(Protocol):
    """Adds to the residual stream, normalizes the sum and projects it."""

    def __call__(
        self, addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, /
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output, or partials of it, and the hidden state.

        Args:
            addend: output of an earlier GEMM.
            residual: residual stream.
            norm: norm of the hidden state `addend + residual`.
            layer: linear layer that is applied to the norm.
        """
        ...


class NormSwigluKernel(Protocol):
    """Adds to the residual stream, normalizes the sum, and applies the first half of an MLP."""

    def __call__(
        self,
        addend: Tensor | None,
        residual: Tensor,
        norm: RMSNorm,
        layer: Linear,
        consumer: Linear,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Returns `silu(gate) * up` and the hidden state.

        Args:
            addend: output of an earlier GEMM.
            residual: residual stream.
            norm: norm of the hidden state `addend + residual`.
            layer: merged gate and up projection.
            consumer: down projection. The output may have the form that this layer multiplies, for
                example quantized rows.
        """
        ...


class LinearResidualKernel(Protocol):
    """Projects back to the residual stream."""

    def __call__(self, x: Tensor, layer: Linear, residual: Tensor, /) -> Tensor | None:
        """Returns the layer's output, or partials of it, which is still to be added to `residual`.

        Returns None if the output was added to `residual` in place.

        Args:
            x: `[T, K]`, input of the layer.
            layer: output or down projection.
            residual: residual stream.
        """
        ...


class MoEKernel(Protocol):
    """Applies a mixture of experts, see `experts.moe`."""

    def __call__(
        self, x: Tensor, router: Linear, experts: StoredLayers, residual: Tensor, /
    ) -> Tensor | None:
        """Returns the experts' output, which is still to be added to `residual`.

        Returns None if the output was added to `residual` in place.

        Args:
            x: `[T, hidden]`, normed hidden state.
            router: layer that scores the experts.
            experts: matrices of the experts.
            residual: residual stream.
        """
        ...


class SharedGateKernel(Protocol):
    """Scales the output of a shared expert by a gate, see `plain.shared_gate`."""

    def __call__(self, out: Tensor, x: Tensor, gate: Linear, residual: Tensor, /) -> Tensor | None:
        """Returns the gated output, which is still to be added to `residual`.

        Returns None if the output was added to `residual` in place.

        Args:
            out: `[T, hidden]`, output of the shared expert, or partials of it.
            x: `[T, hidden]`, normed hidden state.
            gate: layer with one output, the gate's logit.
            residual: residual stream.
        """
        ...


class QkRopeCacheKernel(Protocol):
    """Normalizes and rotates queries and keys, and writes keys and values to the cache."""

    def __call__(
        self, heads: ProjectedHeads, keys_values: Tensor | None, gates: Tensor | None, /
    ) -> Tensor:
        """Returns the queries `[T, num_heads, head_dim]`, see `plain.qk_rope_cache`.

        Args:
            heads: projected queries, keys and values.
            keys_values: `[T, 2 * num_kv_heads, head_dim]`, gets the step's keys, then its values.
                None if attention reads them from the cache alone.
            gates: `[T, num_heads, head_dim]`, gets the output gates. None if there are no gates.
        """
        ...


class OutputGateKernel(Protocol):
    """Scales the output of attention by its gates, see `plain.output_gate`."""

    def __call__(self, attended: Tensor, gates: Tensor, /) -> Tensor:
        """Returns `attended * sigmoid(gates)`; all three are `[T, num_heads, head_dim]`."""
        ...


class FusedDecodeAttentionKernel(Protocol):
    """Does `qk_rope_cache` and the attention of decodes with short contexts in one kernel."""

    def __call__(
        self, heads: ProjectedHeads, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor, /
    ) -> Tensor:
        """Returns the output of attention, `[T, num_heads * head_dim]`.

        Args:
            heads: projected queries, keys and values.
            block_ids: int32 blocks of all rows of the KV cache.
            first_blocks: `[T]` int32, place of each sequence's first block in `block_ids`.
            seq_lens: `[T]` int32, context of each sequence, the new token included.
        """
        ...


class ShrinkAdaptersKernel(Protocol):
    """Multiplies the input of a linear layer by the first factors of adapters."""

    def __call__(
        self, x: Tensor, norm: RMSNorm | None, factors: SlotFactors, rows: AdapterRows, /
    ) -> Tensor:
        """Returns products for `ExpandAdaptersKernel`.

        Args:
            x: `[T, K]`, input of the layer, before the norm if there is one.
            norm: norm of the input. None if `x` is normalized.
            factors: factors of the layer.
            rows: adapters of the tokens.
        """
        ...


class ExpandAdaptersKernel(Protocol):
    """Multiplies products by the second factors of adapters, and adds to a layer's output."""

    def __call__(
        self, out: Tensor, products: Tensor, factors: SlotFactors, rows: AdapterRows, /
    ) -> Tensor:
        """Returns the changed output, perhaps in the memory of `out`.

        The output is `[T, N]` or partials of it, or `silu(gate) * up`, `[T, N / 2]`, of the
        operation with SwiGLU.

        Args:
            out: `[T, N]`, output of the base layer, or partials of it.
            products: result of `ShrinkAdaptersKernel`.
            factors: factors of the layer.
            rows: adapters of the tokens.
        """
        ...


class ExpandSwigluShrinkKernel(Protocol):
    """Ends a layer of gate and up, and begins the changes of the layer that takes the result."""

    def __call__(
        self,
        out: Tensor,
        products: Tensor,
        factors: SlotFactors,
        consumer: SlotFactors,
        rows: AdapterRows,
        /,
    ) -> tuple[Tensor, Tensor] | None:
        """Returns the result of `ExpandAdaptersKernel` for gate and up, and its products.

        The products are those of `ShrinkAdaptersKernel` for the consumer. Returns None if the
        operation is composed of both kernels.

        Args:
            out: `[T, N]`, output of gate and up of the base layer.
            products: result of `ShrinkAdaptersKernel` for gate and up.
            factors: factors of gate and up.
            consumer: factors of the layer that takes the result.
            rows: adapters of the tokens.
        """
        ...


class AdaptedGemvKernel(Protocol):
    """Applies a linear layer that adapters change to a single token.

    The norm before the layer, and SwiGLU or the residual addition after it, are part of the kernel.
    """

    def __call__(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        residual: Tensor | None,
        layer: Linear,
        rows: AdapterRows,
        is_swiglu: bool,
        /,
    ) -> Tensor | None:
        """Returns the changed output, or `residual` if the output was added to it in place.

        Returns None if the operation is composed of `ShrinkAdaptersKernel`, the base layer and
        `ExpandAdaptersKernel`.

        Args:
            x: `[1, K]`, input of the layer, before the norm if there is one.
            norm: norm of the input. None if `x` is normalized.
            residual: residual stream. None if the output is returned.
            layer: linear layer without factors of DoRA.
            rows: adapter of the token.
            is_swiglu: True to apply SwiGLU to the output of gate and up.
        """
        ...


class AdaptedLinearKernel(Protocol):
    """Applies a linear layer that adapters change to the tokens of a step of decodes."""

    def __call__(
        self, x: Tensor, layer: Linear, rows: AdapterRows, is_swiglu: bool, /
    ) -> Tensor | None:
        """Returns the changed output `[T, N]`, or partials of it, or `silu(gate) * up`.

        Returns None if the operation is composed of `ShrinkAdaptersKernel`, the base layer and
        `ExpandAdaptersKernel`.

        Args:
            x: `[T, K]`, input of the layer.
            layer: linear layer.
            rows: adapters of the tokens.
            is_swiglu: True to apply SwiGLU to the output of gate and up.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of a decoder layer that the dispatch table chose for one number of tokens."""

    rms_norm: RMSNormKernel
    add_rms_norm: AddRMSNormKernel
    project: ProjectKernel
    linear_swiglu: LinearSwigluKernel
    norm_linear: NormLinearKernel
    norm_swiglu: NormSwigluKernel
    linear_residual: LinearResidualKernel
    moe: MoEKernel
    shared_gate: SharedGateKernel
    qk_rope_cache: QkRopeCacheKernel
    output_gate: OutputGateKernel
    fused_decode_attention: FusedDecodeAttentionKernel
    shrink_adapters: ShrinkAdaptersKernel
    expand_adapters: ExpandAdaptersKernel
    expand_adapters_swiglu: ExpandAdaptersKernel
    expand_swiglu_shrink: ExpandSwigluShrinkKernel
    adapted_gemv: AdaptedGemvKernel
    adapted_linear: AdaptedLinearKernel

    def add_norm(
        self, addend: Tensor | None, residual: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Returns the norm of the hidden state `addend + residual`, and the hidden state."""
        if addend is None:
            return self.rms_norm(residual, norm.weight, norm.eps), residual
        return self.add_rms_norm(addend, residual, norm.weight, norm.eps)

    def add_adapters(
        self, out: Tensor, x: Tensor, factors: SlotFactors, rows: AdapterRows
    ) -> Tensor:
        """Returns a layer's output with the changes of adapters, see `ExpandAdaptersKernel`.

        Args:
            out: `[T, N]`, output of the base layer.
            x: `[T, K]`, input of the layer.
            factors: factors of the layer.
            rows: adapters of the tokens.
        """
        return self.expand_adapters(
            out, self.shrink_adapters(x, None, factors, rows), factors, rows
        )
