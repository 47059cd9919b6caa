"""Drafts by the model's own layer for multi-token prediction, see `DraftHead`.

The layer has keys and values of each position whose next token is known. A step therefore stores
those of the positions before its own tokens: the pair of a token's embedding and of the hidden
state before it. Hidden states of the last tokens of each row are kept for the row's next step, and
those at checkpoints of recurrent states with these. So neither the way in which a prompt is cut
into chunks nor a prefix hit nor an image changes what the layer sees.

Behind the sampled tokens the layer drafts further tokens, one after another, each for all rows.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.rows import EnteredStep, OfChunk
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.models.base import StepContext
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.transformer import Transformer
from services.decoder.models.visual import VisualInput
from services.decoder.operations.ops import Ops


@dataclass(frozen=True, slots=True)
class _Observed:
    """The step that was computed last.

    Attributes:
        step: its arrays on the host.
        hidden: `[T, hidden]`, hidden states after the final norm.
        positions: `[3, T]`.
    """

    step: StepInputs
    hidden: Tensor
    positions: Tensor


class Drafter:
    """Owner of the hidden states that rows and checkpoints keep for the layer.

    Args:
        info: the engine's limits.
        model: the language model.
        head: its layer for multi-token prediction.
        backend: implementation of paged attention.
        blocks: `[R + 1, max_blocks]` int32 on the device, blocks of each row.
        kv_cache: the KV cache, whose last layer is the layer's.
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
        self._block_size = info.block_size
        # By row, and by the number of drafts behind the row's last token that were accepted.
        sizes = info.max_num_sequences + 1, 1 + info.max_drafts
        kind = head.norm.weight.dtype
        self._hidden = torch.zeros(*sizes, info.hidden, dtype=kind, device=blocks.device)
        self._positions = torch.zeros(*sizes, 3, dtype=torch.int32, device=blocks.device)
        self._saved = self._hidden.new_zeros(info.num_checkpoints, info.hidden)
        self._saved_positions = self._positions.new_zeros(info.num_checkpoints, 3)
        self._capacities = np.zeros(info.max_num_sequences + 1, np.int64)
        self._last: _Observed | None = None

    def start_row(self, row: int, checkpoint: int) -> None:
        """Gives a row the hidden state at a checkpoint."""
        self._hidden[row, 0] = self._saved[checkpoint]
        self._positions[row, 0] = self._saved_positions[checkpoint]

    def note_blocks(self, row: int, num_blocks: int) -> None:
        """Notes how many blocks a row has."""
        self._capacities[row] = num_blocks * self._block_size

    def observe(
        self, step: StepInputs, entered: EnteredStep, hidden: Tensor, visual: VisualInput | None
    ) -> None:
        """Stores the layer's keys and values of the positions before a step's tokens.

        Args:
            step: the step, without padding.
            entered: the model's inputs of the step.
            hidden: `[T, hidden]`, hidden states of the step's tokens after the final norm.
            visual: embeddings of the image tokens. None if the step has no images.
        """
        count, device = len(hidden), hidden.device
        rows, starts = step.chunks[OfChunk.ROW].astype(np.int64), step.cu_query_lens[:-1]
        lengths = np.diff(step.cu_query_lens)
        index = np.arange(count) + (step.seq_lens - lengths - starts).repeat(lengths)
        begins = np.flatnonzero(np.diff(rows, prepend=-1))  # chunks that begin a row's part
        firsts, first_rows = starts[begins], rows[begins]
        folds = np.array([step.folds.get(int(chunk), 0) for chunk in begins])

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

        at, kept = put(firsts), (put(first_rows), put(folds))
        before, positions = hidden.roll(1, 0), entered.positions.roll(1, 1)
        before[at], positions[:, at] = self._hidden[kept], self._positions[kept].T
        slots = self._slots(put(rows.repeat(lengths)), put(index - 1))
        embedded = F.embedding(entered.input_ids, self._model.embed_tokens.weight)
        if visual is not None:
            visual.replace(embedded)
        context = self._context(positions, slots, None)
        self._head.store(self._head.inputs(embedded, before, context), context)
        # Each chunk's last token, and its place among those of its row.
        places = np.arange(len(rows)) - begins.repeat(np.diff(begins, append=len(rows)))
        last, target = put(step.cu_query_lens[1:] - 1), (put(rows), put(places))
        self._hidden[target], self._positions[target] = hidden[last], entered.positions[:, last].T
        if step.state_saves is not None:
            tokens, saves = map(put, step.state_saves.T)
            self._saved[saves] = hidden[tokens]
            self._saved_positions[saves] = entered.positions[:, tokens].T
        self._last = _Observed(step, hidden, entered.positions.clone())

    def draft(self, token_ids: Tensor, num_drafts: int) -> Tensor:
        """Drafts tokens behind those that the observed step has sampled.

        Args:
            token_ids: `[B]` int32, the sampled tokens.
            num_drafts: number n of drafts.

        Returns:
            Drafts `[C, n]` int32 of the C rows that sample, in the order of their samples. -1 where
            the row has no block for the keys and values that the draft depends on.
        """
        assert self._last is not None
        step, hidden, positions = self._last.step, self._last.hidden, self._last.positions
        chunks = self._last_accepted(step, token_ids)
        samples = {int(chunk): place for place, chunk in enumerate(step.samples)}
        rows = step.chunks[OfChunk.ROW, chunks].astype(np.int64)
        indices, capacities = step.seq_lens[chunks].astype(np.int64) - 1, self._capacities[rows]
        device = hidden.device
        tokens = torch.from_numpy(step.cu_query_lens[1:][chunks].astype(np.int64) - 1).to(device)
        ids = token_ids[torch.tensor([samples[c] for c in chunks], device=device)].clamp(min=0)
        hidden, positions = hidden[tokens], positions[:, tokens]
        on_device = torch.from_numpy(rows).to(device)
        drafts = torch.full((len(rows), num_drafts), -1, dtype=torch.int32, device=device)
        for place in range(num_drafts):
            index = indices + place
            is_stored = torch.from_numpy(index < capacities).to(device)
            slots = self._slots(on_device, torch.from_numpy(index).to(device))
            slots = slots.where(is_stored, -1)
            metadata = self._metadata(rows, np.minimum(index + 1, capacities), slots)
            context = self._context(positions, slots, metadata)
            embedded = F.embedding(ids, self._model.embed_tokens.weight)
            hidden = self._head(self._head.inputs(embedded, hidden, context), context)
            ids = self._model.ops.greedy(self._model.logits(hidden)).clamp(min=0)
            drafts[:, place] = ids.where(is_stored, -1)
            positions = positions + 1
        return drafts

    def _last_accepted(self, step: StepInputs, token_ids: Tensor) -> list[int]:
        """Returns the chunk with each row's last accepted draft, or with its token if none is.

        The result depends on the sampled tokens, so a GPU is waited for if the step has drafts.
        """
        rows, samples = step.chunks[OfChunk.ROW].tolist(), step.samples.tolist()
        places = [[*group] for _, group in groupby(range(len(samples)), lambda i: rows[samples[i]])]
        if not step.has_drafts:
            return samples
        sampled, given = token_ids.tolist(), step.tokens[2].tolist()
        chosen: list[int] = []
        for group in places:
            count = 0
            while count + 1 < len(group):
                token = step.cu_query_lens[samples[group[count + 1]]]
                if sampled[group[count]] != given[token]:
                    break
                count += 1
            chosen.append(samples[group[count]])
        return chosen

    def _slots(self, rows: Tensor, index: Tensor) -> Tensor:
        """Returns the places `[T]` in the KV cache of tokens of rows; -1 for an index below 0."""
        size, most = self._block_size, self._blocks.shape[1] - 1
        blocks = self._blocks[rows, (index // size).clamp(0, most)].long()
        return (blocks * size + index % size).where(index >= 0, -1)

    def _context(
        self, positions: Tensor, slots: Tensor, metadata: AttentionMetadata | None
    ) -> StepContext:
        ops: Ops = self._model.ops
        rope, kv_rows = ops.rope_and_rows(
            positions, slots, self._model.rope, self._hidden.dtype, self._block_size
        )
        if metadata is None:  # nothing attends
            none = np.zeros(0, np.int32)
            metadata = self._metadata(none, none, slots)
        return StepContext(
            ops=ops,
            kernels=ops.for_tokens(len(slots)),
            rope=rope,
            kv_cache=self._kv_cache,
            kv_rows=kv_rows,
            metadata=metadata,
        )

    def _metadata(self, rows: np.ndarray, seq_lens: np.ndarray, slots: Tensor) -> AttentionMetadata:
        """Returns the planned layout of one token of each row."""
        device = slots.device
        lens, firsts = seq_lens.astype(np.int32), (rows * self._blocks.shape[1]).astype(np.int32)
        metadata = AttentionMetadata(
            num_decodes=len(rows),
            cu_query_lens=np.arange(len(rows) + 1, dtype=np.int32),
            seq_lens=lens,
            first_blocks=firsts,
            slot_mapping=slots,
            block_ids=self._blocks.view(-1),
            first_blocks_device=torch.from_numpy(firsts).to(device),
            seq_lens_device=torch.from_numpy(lens).to(device),
        )
        if len(rows):
            metadata.plan = self._backend.plan(metadata)
        return metadata
