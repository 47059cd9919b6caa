"""The operations of a step, each of which calls the implementation that the dispatch table chooses.

Models and the sampler call the operations and know no kernel. If an implementation fails while
kernels warm up, the next implementation of the operation replaces it. A later failure is raised to
the caller.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kernels.adapters.adapter_tuning import FEW_TOKENS
from kernels.adapters.factors import AdapterRows
from kernels.attention.attention_tuning import size_class
from kernels.attention.heads import Rotary
from kernels.device import DeviceFacts
from kernels.draft_places import DraftPlaces, KeptHidden
from kernels.rows import DeviceRows, EnteredStep, StepEntry
from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.common.model_spec import TextSpec
from services.common.nn.dispatch import PLAIN, Kernel, KernelTable, Resolved, parse_overrides
from services.common.nn.formats import Rows
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts, attention_facts
from services.decoder.operations.step_kernels import StepKernels

# Number of cached choices. Eager steps have many different numbers of tokens.
_MAX_CHOICES = 4096


_LAYER_OPERATIONS = tuple(field.name for field in fields(StepKernels))


def _by_layer_format(by_format: Mapping[str, Kernel], position: int) -> Kernel:
    """Returns a kernel that calls the kernel for the weight format of its layer argument.

    Args:
        by_format: kernels by weight format.
        position: position of the layer among the arguments.
    """

    def call(*arguments: Any) -> Any:  # noqa: ANN401 - the kernel's
        return by_format[arguments[position].weight_format](*arguments)

    return call


class Ops:
    """A model's operations on one device.

    Args:
        kernel_table: the dispatch table, resolved for the model and the device.
        formats: weight formats of the model's layers. If empty, all layers have the table's format.
    """

    def __init__(
        self, kernel_table: KernelTable[KernelFacts], formats: Collection[str] = ()
    ) -> None:
        self.table = kernel_table
        self._formats = formats or ("",)
        self._choices: dict[tuple[int, bool], StepKernels] = {}

    def for_tokens(self, num_tokens: int) -> StepKernels:
        """Returns the kernels of a layer in a step of `num_tokens` tokens."""
        key = num_tokens, self.table.is_captured
        if (found := self._choices.get(key)) is None:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            found = self._choices[key] = self._choose(num_tokens)
        return found

    def _choose(self, num_tokens: int) -> StepKernels:
        """Asks the dispatch table for the kernels, and composes operations that have none."""
        chosen: StepKernels

        def norm_linear(
            addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
        ) -> tuple[Tensor, Tensor]:
            normed, residual = chosen.add_norm(addend, residual, norm)
            return chosen.project(normed, layer), residual

        def norm_swiglu(
            addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, consumer: Linear
        ) -> tuple[Tensor, Tensor]:
            normed, residual = chosen.add_norm(addend, residual, norm)
            return chosen.linear_swiglu(normed, layer), residual

        def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
            return chosen.project(x, layer)

        def adapted_gemv(*_: object) -> None:
            """`adapted` composes the operation."""

        def adapted_linear(*_: object) -> None:
            """`adapted` composes the operation."""

        composed = {
            each.__name__: each
            for each in (norm_linear, norm_swiglu, linear_residual, adapted_gemv, adapted_linear)
        }
        kernels: dict[str, Kernel] = {}
        for operation in _LAYER_OPERATIONS:
            by_format: dict[str, Kernel] = {}
            formats = self._formats if operation in table.LAYER_ARGUMENT else ("",)
            for weight_format in formats:
                entry = self.table.choose(operation, num_tokens, weight_format)
                kernel = entry.kernel or composed[operation]
                if entry.kernel is not None and self.table.is_warming_up:
                    kernel = self._guarded(entry, entry.kernel, num_tokens)
                by_format[weight_format] = kernel
            kernels[operation] = (
                _by_layer_format(by_format, table.LAYER_ARGUMENT[operation])
                if len(by_format) > 1
                else next(iter(by_format.values()))
            )
        chosen = StepKernels(**kernels)
        return chosen

    def _guarded(self, entry: Resolved, kernel: Kernel, num_tokens: int) -> Kernel:
        """Returns a kernel for warm-up, which calls the next implementation if `kernel` fails."""

        def guarded(*arguments: Any) -> Any:  # noqa: ANN401 - the kernel's
            try:
                return kernel(*arguments)
            except Exception as error:
                if not self.table.drop(entry, error):
                    raise
                self._choices.clear()
                return getattr(self.for_tokens(num_tokens), entry.operation)(*arguments)

        return guarded

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Drops implementations that fail inside, with a warning; calls are not counted."""
        self._choices.clear()
        try:
            with self.table.warming_up():
                yield
        finally:
            self._choices.clear()

    def keep(self, names: Mapping[str, Collection[str]]) -> None:
        """Stops using all other implementations, see `KernelTable`."""
        self.table.keep(names)
        self._choices.clear()

    # Before the first layer.

    def enter_step(
        self, step: StepEntry, rows: DeviceRows, out: EnteredStep, block_size: int
    ) -> None:
        """Writes the model's inputs to `out`, and the new lengths to the rows.

        Args:
            step: the uploaded arrays of the step.
            rows: tables of all rows on the device.
            out: gets ids, positions, rows, lengths and cache slots of the step.
            block_size: tokens per KV block.
        """
        self.table.call("enter_step", step, rows, out, block_size, num_tokens=len(out.slots))

    def group_adapters(self, rows: AdapterRows) -> AdapterRows:
        """Returns the adapters of some tokens with the tokens in groups, see `TokenGroups`.

        Kernels for few tokens need no groups, so that the adapters of few tokens are returned as
        they are.
        """
        num_tokens = len(rows.slots)
        if num_tokens <= FEW_TOKENS:
            return rows
        groups = self.table.call("group_tokens", rows.slots, rows.count, num_tokens=num_tokens)
        return replace(rows, groups=groups)

    def rope_and_rows(
        self, positions: Tensor, slots: Tensor, rope: Rotary, dtype: torch.dtype, block_size: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Returns cos and sin of positions, and where keys and values go in the cache.

        Args:
            positions: `[3, T]`, positions on the three axes.
            slots: `[T]` int64, see `AttentionMetadata.slot_mapping`.
            rope: the model's rotary embedding.
            dtype: data type of cos and sin.
            block_size: tokens per KV block.

        Returns:
            Cos and sin, each `[T, rotary_dim / 2]`, and `[2, T]` rows of the cache (`kv_rows`).
        """
        return self.table.call(
            "rope_and_rows", positions, slots, rope, dtype, block_size, num_tokens=len(slots)
        )

    def draft_places(
        self,
        groups: Tensor,
        sampled: Tensor,
        kept: KeptHidden,
        blocks: Tensor,
        count: int,
        block_size: int,
    ) -> DraftPlaces:
        """Finds the drafts that are accepted, and returns the inputs of the drafts behind them.

        Args:
            groups: `[4 + max_drafts, G]` int32, see `OfDraftGroup`.
            sampled: int32, the sampled tokens. At least `max_drafts` more elements follow them.
            kept: states that rows keep of the step.
            blocks: `[R + 1, max_blocks]` int32, blocks of each row.
            count: number of drafts.
            block_size: tokens per KV block.
        """
        return self.table.call(
            "draft_places",
            *(groups, sampled, kept, blocks, count, block_size),
            num_tokens=groups.shape[1],
        )

    def draft_sources(
        self,
        tokens: Tensor,
        rows: Tensor,
        hidden: Tensor,
        positions: Tensor,
        kept: KeptHidden,
        blocks: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the layer for multi-token prediction reads of the tokens before a step's.

        Args:
            tokens: `[2, T]` int32, see `OfDraftToken`.
            rows: `[T]` int32, row of each token, below 0 for padding.
            hidden: `[T, hidden]`, hidden states of the step's tokens.
            positions: `[3, T]` int32, positions of the step's tokens.
            kept: states that rows keep of the step before.
            blocks: `[R + 1, max_blocks]` int32, blocks of each row.
            block_size: tokens per KV block.

        Returns:
            Hidden states `[T, hidden]` and positions `[3, T]` of the tokens before, and the places
            `[T]` int64 of their keys and values in the KV cache, -1 if there is none to store.
        """
        return self.table.call(
            "draft_sources",
            *(tokens, rows, hidden, positions, kept, blocks, block_size),
            num_tokens=tokens.shape[1],
        )

    def keep_hidden(
        self, chunks: Tensor, hidden: Tensor, positions: Tensor, kept: KeptHidden
    ) -> None:
        """Keeps hidden states and positions of the last tokens of chunks for the next step.

        Args:
            chunks: `[2, S]` int32, see `OfDraftChunk`.
            hidden: `[T, hidden]`, hidden states of the step's tokens.
            positions: `[3, T]` int32, positions of the step's tokens.
            kept: states that rows keep of the step.
        """
        self.table.call("keep_hidden", chunks, hidden, positions, kept, num_tokens=chunks.shape[1])

    # Attention.

    def max_fused_context(self, num_tokens: int) -> int:
        """Returns the longest context for which `fused_decode_attention` is the fastest.

        Returns 0 if it never is for this number of decodes.
        """
        limits = size_class(attention_facts(self.table.facts)).fused_max_context
        is_plain = self.table.choose("fused_decode_attention", num_tokens).name == PLAIN
        return 0 if is_plain or num_tokens > len(limits) else limits[num_tokens - 1]

    # The head.

    def logits(self, hidden: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Returns the logits of the head.

        Args:
            hidden: `[R, K]`, hidden states of the rows that are sampled.
            weight: `[N, K]`, weight of the head.
            out: `[R, N]`, gets the logits. None if they get new memory.
        """
        return self.table.call("logits", hidden, weight, out=out)

    # Sampling.

    def penalize(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Returns float32 logits with penalties.

        The repetition penalty counts tokens of prompt and completion. Frequency and presence
        penalty count tokens of the completion.

        Args:
            logits: `[B, vocab_size]`, contiguous; left unchanged.
            inputs: sampling inputs of the same rows, with `seen`.
        """
        return self.table.call("penalize", logits, inputs)

    def count_tokens(self, token_ids: Tensor, inputs: SamplingInputs) -> None:
        """Counts token ids `[B]` int32 as seen by rows with penalties; ids below 0 do not count."""
        self.table.call("count_tokens", token_ids, inputs)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Samples one token per row under the rows' token masks, see `kernels.sampling`.

        Args:
            logits: `[B, vocab_size]`, contiguous. Minus infinity is allowed if `inputs` has a bias.
            inputs: sampling inputs of the same rows.

        Returns:
            `[B]` int32 token ids; `NOT_FINITE` or `ALL_MASKED` where a row fails.
        """
        return self.table.call("sample", logits, inputs)

    def greedy(self, logits: Tensor) -> Tensor:
        """Returns the most likely token ids `[B]` int32 of logits `[B, vocab_size]`.

        Of equally likely ids it takes the lowest. A row that is not finite gets `NOT_FINITE`.
        """
        return self.table.call("greedy", logits)

    def greedy_rescored(self, logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns the most likely token ids `[B]` int32, found by approximate logits.

        The vocabulary is divided into 128 parts. The exact logits of the best token of each part
        decide, so the approximation only has to find the best token among those of its part. A row
        that is not finite gets `NOT_FINITE`.

        Args:
            logits: `[B, vocab_size]`, contiguous, approximate logits.
            hidden: `[B, K]`, contiguous, hidden states that the logits belong to.
            weight: `[vocab_size, K]`, contiguous, exact weight of the output layer.
        """
        return self.table.call("greedy_rescored", logits, hidden, weight)

    def greedy_masked(
        self, logits: Tensor, masked: MaskedRows, token_ids: Tensor, last_tokens: Tensor
    ) -> None:
        """Replaces greedy tokens of rows with token masks, whose other options are off.

        Args:
            logits: `[B, vocab_size]`, contiguous.
            masked: the rows with masks, and their masks.
            token_ids: `[B]` int32; gets the most likely ids that the masks allow, and `NOT_FINITE`
                or `ALL_MASKED` where a row fails.
            last_tokens: int32, by row of the runner's tables; gets the same ids, and 0 where a row
                fails.
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
    """Creates the operations of a model on a device of this machine, and logs the table.

    Args:
        device: the device that computes.
        text: sizes and options of the model. If several ranks share the model, this rank's part.
        dtype: data type of weights, activations and the KV cache.
        formats: weight formats of the model's layers with their rows, see
            `formats.rows_of_layers`. None if all layers are unquantized.
        overrides: the user's choices, see `dispatch.parse_overrides`.
        attention: the attention backend's table, which is shown and counted with this table.
        num_ranks: number of ranks that share the model.

    Raises:
        UnknownOverride: an override names an operation or implementation that does not exist or
            cannot run here.
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
    """Operations that all run by their specification in torch."""

    def __init__(self) -> None:
        super().__init__(table.resolve(table.plain_facts(), {"*": "plain"}))
