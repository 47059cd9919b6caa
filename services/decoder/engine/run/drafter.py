"""Drafts by the model's own layer for multi-token prediction, see `DraftHead`.

The layer has keys and values of each position whose next token is known. A step therefore stores
those of the positions before its own tokens: the pair of a token's embedding and of the hidden
state before it. Hidden states of the last tokens of each row are kept for the row's next step, and
those at checkpoints of recurrent states with these. So neither the way in which a prompt is cut
into chunks nor a prefix hit nor an image changes what the layer sees, with one exception: the last
position of a cached prefix has the token after it, which differs among the sequences that share the
prefix. The sequence that was admitted last stores its own. The others may draft worse.

Behind the sampled tokens the layer drafts further tokens, one after another, each for all rows. The
device itself finds the last draft that is accepted, so drafts are launched right behind the
sampling, and the host postprocesses the sampled tokens while the device drafts. Where kernels need
no plan of the host, both parts run in CUDA graphs: `observe` within those of steps, and `draft` in
graphs of its own (`draft_graphs`).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.draft_places import KeptHidden, OfDraftGroup
from kernels.rows import EnteredStep
from services.common.nn.dispatch import CapturedCalls
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run.draft_inputs import (
    DraftEntry,
    lay_out,
    padded,
    places_of_drafts,
)
from services.decoder.engine.run.step_inputs import DraftArrays, StepInputs
from services.decoder.engine.step import ComputeStep, Int32Array
from services.decoder.models.base import StepContext
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.transformer import Transformer
from services.decoder.models.visual import VisualInput
from services.decoder.operations.ops import Ops

# A graph, the calls of kernels within it, and the drafts `[G, num_drafts]` that it writes.
CapturedDrafts = tuple[torch.cuda.CUDAGraph, CapturedCalls, Tensor]


class Drafter:
    """Owner of the hidden states that rows and checkpoints keep for the layer.

    Args:
        info: the engine's limits.
        model: the language model.
        head: its layer for multi-token prediction.
        backend: implementation of paged attention.
        blocks: `[R + 1, max_blocks]` int32 on the device, blocks of each row.
        kv_cache: the KV cache, whose last layer is the layer's.

    Attributes:
        num_drafts: number of drafts behind each sampled token.
        sizes: numbers of rows for which graphs draft, ascending. Empty if there are no graphs.
        graphs: the graphs, by number G of rows.
        drafts: `[G, num_drafts]` int32 on the device, the drafts behind the last step that had any.
            None before the first.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Transformer,
        head: DraftHead,
        backend: AttentionBackend,
        blocks: Tensor,
        kv_cache: Tensor,
    ) -> None:
        self._model, self._head, self._backend = model, head, backend
        self._blocks, self._kv_cache = blocks, kv_cache
        self._block_size, self._max_drafts = info.block_size, info.max_drafts
        self.num_drafts = info.num_head_drafts
        self.sizes: list[int] = []
        self.graphs: dict[int, CapturedDrafts] = {}
        self.drafts: Tensor | None = None
        device, num_rows = blocks.device, info.max_num_sequences
        kind = model.embed_tokens.weight.dtype  # norms may be in float32

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # By row and number of the drafts behind the row's last token that were accepted, flattened.
        kept = (num_rows + 1) * (1 + info.max_drafts)
        self._kept = KeptHidden(zeros(kept, info.hidden, dtype=kind), zeros(kept, 3))
        self._saved = zeros(info.num_checkpoints, info.hidden, dtype=kind)
        self._saved_positions = zeros(info.num_checkpoints, 3)
        # Of the last step with chunks, if it could save checkpoints.
        self._step_hidden = zeros(info.max_batched_tokens, info.hidden, dtype=kind)
        self._capacities = np.zeros(num_rows + 1, np.int64)
        # Inputs of `draft` at addresses that do not change. Behind the samples there is space for
        # the places of drafts that the last sample does not have.
        self._sampled = zeros(num_rows + 1 + info.max_drafts)
        self._groups = zeros((OfDraftGroup.DRAFT + info.max_drafts) * num_rows)
        self._entered: Tensor | None = None

    # The host's part.

    def begin(self, step: ComputeStep) -> None:
        """Notes the blocks that rows get, and gives rows the hidden states at their checkpoints."""
        rows, starts, counts = step.block_updates.T
        self._capacities[rows] = (starts + counts) * self._block_size
        for started in step.row_starts:
            first, checkpoint = started.row * (1 + self._max_drafts), started.checkpoint
            if checkpoint >= 0:
                self._kept.hidden[first] = self._saved[checkpoint]
                self._kept.positions[first] = self._saved_positions[checkpoint]

    def lay_out(self, step: StepInputs) -> DraftArrays:
        """Lays out the arrays that the layer needs of a step, with groups padded for a graph."""
        num_rows, max_blocks = self._blocks.shape
        found = lay_out(step, self._capacities, self._max_drafts, max_blocks, self._block_size)
        size = self._size(found.groups.shape[1])
        groups, amends = padded(found.groups, size, num_rows - 1), None
        if (sources := step.draft_sources) is not None:
            places = places_of_drafts(found.groups, sources[:, 0], size)
            amends = np.empty((2, len(places)), np.int64)
            amends[0], amends[1] = places, sources[:, 1] * self.num_drafts + sources[:, 2]
        return DraftArrays(found.tokens, found.chunks, groups, amends)

    def _size(self, num_groups: int) -> int:
        """Returns the number of rows to which so many groups are padded."""
        return next((size for size in self.sizes if size >= num_groups), max(1, num_groups))

    def enter(self, groups: Tensor) -> None:
        """Notes the uploaded groups of the launched step, see `DraftArrays.groups`."""
        self._entered = groups

    # The device's part.

    def observe(
        self, entry: DraftEntry, entered: EnteredStep, hidden: Tensor, visual: VisualInput | None
    ) -> None:
        """Stores the layer's keys and values of the positions before a step's tokens.

        Args:
            entry: the layer's own arrays of the step.
            entered: the model's inputs of the step.
            hidden: `[T, hidden]`, hidden states of the step's tokens after the final norm.
            visual: embeddings of the image tokens. None if the step has no images.
        """
        ops, kept = self._model.ops, self._kept
        hidden, placed = hidden.contiguous(), entered.positions
        before, positions, slots = ops.draft_sources(
            entry.tokens, entry.rows, hidden, placed, kept, self._blocks, self._block_size
        )
        embedded = F.embedding(entered.input_ids, self._model.embed_tokens.weight)
        if visual is not None:
            visual.replace(embedded)
        context = self._context(positions, slots)
        self._head.store(self._head.inputs(embedded, before, context), context)
        ops.keep_hidden(entry.chunks, hidden, placed, kept)
        if entry.keeps:
            self._step_hidden[: len(hidden)] = hidden

    def save(self, saves: Tensor, entered: EnteredStep) -> None:
        """Keeps hidden states of a step's tokens at checkpoints, after the step was launched.

        Args:
            saves: `[2, C]` int64, places of the tokens, and slots of the checkpoints.
            entered: the model's inputs of the step.
        """
        tokens, checkpoints = saves
        self._saved.index_copy_(0, checkpoints, self._step_hidden[tokens])
        self._saved_positions.index_copy_(0, checkpoints, entered.positions[:, tokens].T)

    def draft(self, token_ids: Tensor | None) -> Tensor:
        """Drafts tokens behind those that the step has sampled, without waiting for the device.

        Args:
            token_ids: `[B]` int32, the sampled tokens. None on other ranks than rank 0.

        Returns:
            Drafts `[G, num_drafts]` int32 of the rows that sample, in the order of their samples,
            and then padding. -1 where the row has no block for the keys and values that the draft
            depends on.
        """
        groups = self._entered
        assert groups is not None
        size = groups.shape[1]
        if token_ids is not None:
            self._sampled[: len(token_ids)] = token_ids
        self._model.ranks.broadcast(self._sampled)
        self.groups(size).copy_(groups)
        if (captured := self.graphs.get(size)) is None:
            self.drafts = self.draft_groups(size)
            return self.drafts
        graph, calls, self.drafts = captured
        graph.replay()
        calls.num_replays += 1
        return self.drafts

    def amend(self, buffer: Tensor, amends: Tensor) -> None:
        """Copies drafts of the step before to an uploaded step that verifies them.

        Args:
            buffer: int32 elements of the step's arrays.
            amends: `[2, n]` int64, elements that take ids, and indices of the ids in `drafts`.
        """
        assert self.drafts is not None
        targets, sources = amends.clone()  # they are part of the buffer
        # `index_select` is launched in half the time of an indexed read.
        ids = self.drafts.view(-1).index_select(0, sources)
        buffer.index_copy_(0, targets, ids.clamp_(min=0))

    def groups(self, size: int) -> Tensor:
        """Returns the memory of the groups `[4 + max_drafts, size]` that `draft_groups` reads."""
        fields = OfDraftGroup.DRAFT + self._max_drafts
        return self._groups[: fields * size].view(fields, size)

    def draft_groups(self, size: int) -> Tensor:
        """Drafts tokens `[size, num_drafts]` int32 behind the accepted ones of so many groups."""
        count = self.num_drafts
        found = self._model.ops.draft_places(
            self.groups(size), self._sampled, self._kept, self._blocks, count, self._block_size
        )
        hidden, ids, slots = found.hidden, found.ids, found.slots
        contexts = [
            self._context(
                found.positions[place],
                slots[place],
                self._metadata(slots[place], found.lengths[place], found.firsts),
            )
            for place in range(count)
        ]
        drafts: list[Tensor] = []
        for context in contexts:
            embedded = F.embedding(ids, self._model.embed_tokens.weight)
            hidden = self._head(self._head.inputs(embedded, hidden, context), context)
            ids = self._head.most_likely(hidden, self._model).clamp(min=0)
            self._model.ranks.broadcast(ids)  # rank 0 alone has whole logits
            drafts.append(ids)
        return torch.stack(drafts).where(slots >= 0, -1).int().T.contiguous()

    @property
    def plans_on_device(self) -> bool:
        """True if attention needs no plan of the host, so that graphs can draft."""
        return self._backend.plans_on_device

    def _context(
        self, positions: Tensor, slots: Tensor, metadata: AttentionMetadata | None = None
    ) -> StepContext:
        """Returns the context of tokens. Nothing attends if `metadata` is None."""
        ops: Ops = self._model.ops
        rope, kv_rows = ops.rope_and_rows(
            positions, slots, self._model.rope, self._kept.hidden.dtype, self._block_size
        )
        if metadata is None:
            none = np.zeros(0, np.int32)
            empty = slots.new_zeros(0, dtype=torch.int32)
            metadata = self._layout(none, slots, empty, empty)
        return StepContext(
            ops=ops,
            kernels=ops.for_tokens(len(slots)),
            rope=rope,
            kv_cache=self._kv_cache,
            kv_rows=kv_rows,
            metadata=metadata,
        )

    def _metadata(self, slots: Tensor, lengths: Tensor, firsts: Tensor) -> AttentionMetadata:
        """Returns the planned layout of one token of each row.

        Args:
            slots: `[G]` int64, places of the tokens in the KV cache.
            lengths, firsts: `[G]` int32 on the device, see `AttentionMetadata`.
        """
        if self.plans_on_device:
            # The host does not know the lengths, and no kernel asks it for them.
            metadata = self._layout(np.ones(len(slots), np.int32), slots, lengths, firsts)
            metadata.plan = self._backend.plan_on_device(metadata)
            return metadata
        metadata = self._layout(lengths.cpu().numpy(), slots, lengths, firsts)
        metadata.first_blocks = firsts.cpu().numpy()
        metadata.plan = self._backend.plan(metadata)
        return metadata

    def _layout(
        self, seq_lens: Int32Array, slots: Tensor, lengths: Tensor, firsts: Tensor
    ) -> AttentionMetadata:
        count = len(seq_lens)
        return AttentionMetadata(
            num_decodes=count,
            cu_query_lens=np.arange(count + 1, dtype=np.int32),
            seq_lens=seq_lens,
            first_blocks=np.zeros(count, np.int32),
            slot_mapping=slots,
            block_ids=self._blocks.view(-1),
            first_blocks_device=firsts,
            seq_lens_device=lengths,
        )
