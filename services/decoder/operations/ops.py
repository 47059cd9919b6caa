"""The operations of a step: each call goes to the implementation that the dispatch table chooses.

Models and the sampler call them, and know no kernel. An implementation that fails while kernels
warm up is replaced by the next one; a later failure is the caller's.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kernels.attention.attention_tuning import size_class
from kernels.attention.heads import ProjectedHeads, Rotary
from kernels.device import DeviceFacts
from kernels.rows import DeviceRows, EnteredStep, StepEntry
from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.common.model_spec import TextSpec
from services.common.nn.dispatch import PLAIN, KernelTable, Resolved, parse_overrides
from services.common.nn.formats import Rows
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, StoredLayers
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts, attention_facts

_MAX_KEPT = 4096  # choices of eager steps of different lengths


@dataclass(frozen=True, slots=True)
class StepKernels:
    """What a decoder layer calls in a step of one number of tokens T. Arguments may be overwritten.

    A GEMM's output may be left as split-K partials, `[S, T, N]` float32, which its consumer reduces
    (`plain.reduce_split_k`).

    Attributes:
        rms_norm: (x, weight, eps) → `[T, hidden]`.
        add_rms_norm: (x or partials, residual, weight, eps) → the norm of the sum, and the sum.
        project: (x `[T, K]`, layer) → `[T, N]` or partials of it.
        linear_swiglu: (x `[T, K]`, layer of gate and up) → `silu(gate) * up`, `[T, N]`.
        norm_linear: (x or partials or None, residual, norm, layer) → the layer's output for the
            norm of the hidden state `x + residual`, and the hidden state.
        norm_swiglu: the same with `linear_swiglu`, and a last argument: the layer that gets the
            output, which may be in the form that this layer multiplies.
        linear_residual: (x, layer, residual) → the layer's output or partials, to be added to the
            residual stream; None: it has been added to `residual` in place.
        moe: (x `[T, hidden]`, router, experts, residual) → the layer's output, to be added to the
            residual stream, or None, as by `linear_residual`; see `experts.moe`.
        shared_gate: (output of a shared expert or partials, x, gate, residual) → as `moe`; see
            `plain.shared_gate`.
        qk_rope_cache: see `plain.qk_rope_cache`.
        output_gate: see `plain.output_gate`.
        fused_decode_attention: see `plain.fused_decode_attention`.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    project: Callable[[Tensor, Linear], Tensor]
    linear_swiglu: Callable[[Tensor, Linear], Tensor]
    norm_linear: Callable[[Tensor | None, Tensor, RMSNorm, Linear], tuple[Tensor, Tensor]]
    norm_swiglu: Callable[[Tensor | None, Tensor, RMSNorm, Linear, Linear], tuple[Tensor, Tensor]]
    linear_residual: Callable[[Tensor, Linear, Tensor], Tensor | None]
    moe: Callable[[Tensor, Linear, StoredLayers, Tensor], Tensor | None]
    shared_gate: Callable[[Tensor, Tensor, Linear, Tensor], Tensor | None]
    qk_rope_cache: Callable[[ProjectedHeads, Tensor | None, Tensor | None], Tensor]
    output_gate: Callable[[Tensor, Tensor], Tensor]
    fused_decode_attention: Callable[[ProjectedHeads, Tensor, Tensor, Tensor], Tensor]

    def add_norm(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The norm of the hidden state `x + residual`, or `residual` alone, and the state."""
        if x is None:
            return self.rms_norm(residual, norm.weight, norm.eps), residual
        return self.add_rms_norm(x, residual, norm.weight, norm.eps)


_LAYER_OPERATIONS = tuple(field.name for field in fields(StepKernels))


def _of_layer(by_format: Mapping[str, Callable[..., Any]], position: int) -> Callable[..., Any]:
    """Calls the kernel of the format of the layer, which is the argument in that position."""

    def call(*arguments: Any) -> Any:  # noqa: ANN401 - the kernel's
        return by_format[arguments[position].weight_format](*arguments)

    return call


class Ops:
    """A model's operations.

    Args:
        formats: weight formats of the model's layers; empty: one, that of the table.
    """

    def __init__(
        self, kernel_table: KernelTable[KernelFacts], formats: Collection[str] = ()
    ) -> None:
        self.table = kernel_table
        self._formats = formats or ("",)
        self._kept: dict[tuple[int, bool], StepKernels] = {}

    def for_tokens(self, num_tokens: int) -> StepKernels:
        """The kernels of a layer in a step of this many tokens."""
        key = num_tokens, self.table.is_captured
        if (found := self._kept.get(key)) is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._made(num_tokens)
        return found

    def _made(self, num_tokens: int) -> StepKernels:
        made: StepKernels

        def norm_linear(
            x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
        ) -> tuple[Tensor, Tensor]:
            normed, residual = made.add_norm(x, residual, norm)
            return made.project(normed, layer), residual

        def norm_swiglu(
            x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, down: Linear
        ) -> tuple[Tensor, Tensor]:
            normed, residual = made.add_norm(x, residual, norm)
            return made.linear_swiglu(normed, layer), residual

        def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
            return made.project(x, layer)

        composed = {each.__name__: each for each in (norm_linear, norm_swiglu, linear_residual)}
        kernels: dict[str, Callable[..., Any]] = {}
        for operation in _LAYER_OPERATIONS:
            by_format: dict[str, Callable[..., Any]] = {}
            formats = self._formats if operation in table.LAYER_ARGUMENT else ("",)
            for weight_format in formats:
                entry = self.table.choose(operation, num_tokens, weight_format)
                kernel = entry.kernel or composed[operation]
                if entry.kernel is not None and self.table.is_warming_up:
                    kernel = self._guarded(entry, entry.kernel, num_tokens)
                by_format[weight_format] = kernel
            kernels[operation] = (
                _of_layer(by_format, table.LAYER_ARGUMENT[operation])
                if len(by_format) > 1
                else next(iter(by_format.values()))
            )
        made = StepKernels(**kernels)
        return made

    def _guarded(
        self, entry: Resolved, kernel: Callable[..., Any], num_tokens: int
    ) -> Callable[..., Any]:
        """For warm-up: a kernel that drops its implementation if it fails, and calls the next."""

        def guarded(*arguments: Any) -> Any:  # noqa: ANN401 - the kernel's
            try:
                return kernel(*arguments)
            except Exception as error:
                if not self.table.drop(entry, error):
                    raise
                self._kept.clear()
                return getattr(self.for_tokens(num_tokens), entry.operation)(*arguments)

        return guarded

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Implementations that fail inside are dropped, with a warning; calls are not counted."""
        self._kept.clear()
        try:
            with self.table.warming_up():
                yield
        finally:
            self._kept.clear()

    def keep(self, names: Mapping[str, Collection[str]]) -> None:
        """Stops using all other implementations, see `KernelTable`."""
        self.table.keep(names)
        self._kept.clear()

    # Before the first layer.

    def enter_step(
        self, step: StepEntry, rows: DeviceRows, out: EnteredStep, block_size: int
    ) -> None:
        """Writes what the model reads of a step to `out`, and its rows' lengths after it."""
        self.table.call("enter_step", step, rows, out, block_size, num_tokens=len(out.slots))

    def rope_and_rows(
        self, positions: Tensor, slots: Tensor, rope: Rotary, dtype: torch.dtype, block_size: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Cos and sin for `positions` `[3, T]`, and `kv_rows` of `slots` `[T]`."""
        return self.table.call(
            "rope_and_rows", positions, slots, rope, dtype, block_size, num_tokens=len(slots)
        )

    # Attention.

    def max_fused_context(self, num_tokens: int) -> int:
        """The longest context for which `fused_decode_attention` is the fastest for this many
        decodes; 0: it never is.
        """
        limits = size_class(attention_facts(self.table.facts)).fused_max_context
        is_plain = self.table.choose("fused_decode_attention", num_tokens).name == PLAIN
        return 0 if is_plain or num_tokens > len(limits) else limits[num_tokens - 1]

    # The head.

    def logits(self, hidden: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[R, K]`, `[N, K]` → `[R, N]`; to `out`, if there is one."""
        return self.table.call("logits", hidden, weight, out=out)

    # Sampling.

    def penalize(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Repetition penalty over prompt and completion, frequency and presence penalty over the
        completion, in float32.

        Args:
            logits: `[B, vocab_size]`, contiguous; left unchanged.
            inputs: of the same rows, with `seen`.
        """
        return self.table.call("penalize", logits, inputs)

    def count_tokens(self, token_ids: Tensor, inputs: SamplingInputs) -> None:
        """Counts token ids, `[B]` int32, as seen by rows with penalties; ids below zero are not."""
        self.table.call("count_tokens", token_ids, inputs)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """One token per row of logits `[B, vocab_size]`, contiguous, as `kernels.sampling` says,
        under the rows' token masks. Logits of minus infinity are allowed if `inputs` has a bias.

        Returns:
            `[B]` int32; `NOT_FINITE` or `ALL_MASKED` where a row fails.
        """
        return self.table.call("sample", logits, inputs)

    def greedy(self, logits: Tensor) -> Tensor:
        """`[B, vocab_size]` → `[B]` int32: the most likely ids, the lowest of equal ones;
        `NOT_FINITE` where a row is not finite.
        """
        return self.table.call("greedy", logits)

    def greedy_masked(
        self, logits: Tensor, masked: MaskedRows, token_ids: Tensor, last_tokens: Tensor
    ) -> None:
        """Replaces greedy tokens of rows with token masks, whose other options are off.

        Args:
            logits: `[B, vocab_size]`, contiguous.
            masked: the rows and their masks.
            token_ids: `[B]` int32; gets the most likely ids that the masks allow, `NOT_FINITE` or
                `ALL_MASKED` where a row fails.
            last_tokens: int32, by row of the runner's tables; gets them, too, and 0 for a failure.
        """
        self.table.call("greedy_masked", logits, masked, token_ids, last_tokens)


def create_ops(
    device: torch.device,
    text: TextSpec,
    dtype: torch.dtype,
    *,
    formats: Rows | None = None,
    overrides: str = "",
    attention: KernelTable[Any] | None = None,
    num_ranks: int = 1,
) -> Ops:
    """The operations of a model on a device of this machine; logs the table.

    Args:
        text: its sizes and options; of several ranks, this one's part.
        dtype: of weights, activations and the KV cache.
        formats: of the model's layers, see `formats.rows_of_layers`; None: unquantized.
        overrides: see `dispatch.parse_overrides`.
        attention: the attention backend's table, to be shown and counted with this one.

    Raises:
        UnknownOverride: an override names what does not exist or cannot run here.
    """
    facts = KernelFacts(DeviceFacts.of(device), text, dtype, num_ranks=num_ranks)
    others = () if attention is None else attention.operations
    chosen = {of: name for of, name in parse_overrides(overrides).items() if of not in others}
    resolved = table.resolve(facts, chosen, formats=formats)
    if attention is not None:
        resolved.include(attention)
    resolved.log_rows()
    return Ops(resolved, formats or ())


class PlainOps(Ops):
    """Every operation by its specification in torch."""

    def __init__(self) -> None:
        super().__init__(table.resolve(table.plain_facts(), {"*": "plain"}))
