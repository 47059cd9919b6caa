"""Paged attention in plain torch: for CPUs, and as the specification and test oracle of kernels.

`create_backend` uses `SdpaBackend` if the dispatch table has no other implementation.
`PagedBackend` uses `SdpaBackend` for parts of steps for which there is no kernel.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.fp8_pages import as_bytes
from kernels.attention.heads import read_kv
from services.common.nn.dispatch import KernelTable
from services.decoder.attention.base import AttentionMetadata, StepKind, StepLengths
from services.decoder.attention.table import DECODE, PREFILL


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token each, or with a token and its drafts, padded to the longest
    context and the most tokens among them. The context of a sequence is copied once for all its
    tokens.

    Attributes:
        index: int64 indices of the `[S * L]` tokens among the step's decodes. Sequences with fewer
            than L tokens repeat their last token.
        used: `[n]` int64, places of the tokens among S * L without repetitions. None if there are
            no repetitions.
        length: number L of tokens of a sequence.
        keys: `[S * max_blocks]` int64, rows in the pool of the blocks' keys.
        unused: int64 indices of tokens behind a context, among S * max_blocks * block_size.
        mask: bool, true for keys that a token attends to, `[S, 1, 1, max_blocks * block_size]` if L
            is 1, and `[S, 1, group * L, max_blocks * block_size]` otherwise.
    """

    index: Tensor | slice
    used: Tensor | None
    length: int
    keys: Tensor
    unused: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The chunk of a sequence.

    Attributes:
        start, stop: the chunk's query tokens [start, stop) in the step.
        context: number of tokens that the last query attends to.
        keys: `[blocks]` int64, rows in the pool of the blocks' keys.
        mask: `[group * query, context]` bool. None if the chunk is the whole context, so that
            plain causal attention is right.
    """

    start: int
    stop: int
    context: int
    keys: Tensor
    mask: Tensor | None


_Plan = tuple[list[_Decodes], list[_Prefill]]


class SdpaBackend:
    """A `base.AttentionBackend` without CUDA graphs.

    The pool is seen as rows of `[block_size, num_kv_heads, head_dim]`: block b has its keys in row
    2 * b and its values in row 2 * b + 1.

    Args:
        facts: facts of the model and the device.
        table: dispatch table with this implementation alone, which counts the calls. None if calls
            are not counted.
    """

    def __init__(self, facts: AttentionFacts, table: KernelTable[Any] | None = None) -> None:
        self.table = table
        self._facts = facts

    def captures(self, kind: StepKind) -> bool:
        return False

    def captures_chunks(self, step: StepLengths) -> bool:
        return False

    def captures_long(self, step: StepLengths) -> bool:
        return False

    def plans_from_blocks(self, num_decodes: int) -> bool:
        return False

    @property
    def plans_on_device(self) -> bool:
        return False

    def plan_on_device(self, metadata: AttentionMetadata) -> _Plan:
        raise NotImplementedError("blocks and masks are planned on the host")

    def list_work(self, step: StepLengths, *, captured: bool) -> None:
        """Returns None, because `plan` makes all that `forward` reads."""

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> _Plan:
        """Returns the blocks that each sequence reads, and the masks."""
        assert not captured
        device = metadata.block_ids.device
        seq_lens: list[int] = metadata.seq_lens.tolist()
        starts: list[int] = metadata.cu_query_lens.tolist()
        counts: list[int] = (-(-metadata.seq_lens // self._facts.block_size)).tolist()
        firsts: list[int] = metadata.first_blocks.tolist()
        keys = metadata.block_ids
        tables = [2 * keys[f : f + n].long() for f, n in zip(firsts, counts, strict=True)]
        group = self._facts.num_heads // self._facts.num_kv_heads
        prefills: list[_Prefill] = []
        for index in range(metadata.num_decodes, len(seq_lens)):
            context, query = seq_lens[index], starts[index + 1] - starts[index]
            mask = None
            if query < context:
                order = torch.arange(context, device=device)
                mask = (order <= order[context - query :, None]).repeat(group, 1)
            prefills.append(
                _Prefill(starts[index], starts[index + 1], context, tables[index], mask)
            )
        # Decodes whose contexts differ by less than a factor of two are padded together, and those
        # with drafts apart from those without.
        alike: dict[tuple[int, bool], list[list[int]]] = {}
        for run in _runs(metadata.num_decodes, seq_lens, firsts):
            key = (counts[run[-1]] - 1).bit_length(), len(run) > 1
            alike.setdefault(key, []).append(run)
        decodes = [
            self._decodes(
                runs,
                pad_sequence([tables[run[-1]] for run in runs], batch_first=True),
                metadata.seq_lens,
                is_all=len(alike) == 1,
            )
            for runs in alike.values()
        ]
        return decodes, prefills

    def _decodes(
        self,
        runs: list[list[int]],
        keys: Tensor,
        seq_lens: npt.NDArray[np.int32],
        *,
        is_all: bool,
    ) -> _Decodes:
        """Plans decodes that are padded together.

        Args:
            runs: indices of the decodes of each sequence, which follow each other.
            keys: `[S, max_blocks]`, rows in the pool of the blocks' keys of each sequence.
            seq_lens: context of each decode of the step.
            is_all: True if the step has no other decodes.
        """
        device, length = keys.device, max(map(len, runs))
        index = np.array([run + run[-1:] * (length - len(run)) for run in runs])  # [S, L]
        order = np.arange(keys.shape[1] * self._facts.block_size)
        seen = order < seq_lens[index][..., None]  # [S, L, max_blocks * block_size]
        unused = torch.from_numpy(np.flatnonzero(~seen[:, -1])).to(device)
        mask = torch.from_numpy(seen).to(device)
        if length == 1:
            chosen = slice(len(runs)) if is_all else torch.from_numpy(index[:, 0]).to(device)
            return _Decodes(chosen, None, 1, keys.flatten(), unused, mask[:, None])
        group = self._facts.num_heads // self._facts.num_kv_heads
        places = [s * length + place for s, run in enumerate(runs) for place in range(len(run))]
        return _Decodes(
            torch.from_numpy(index.ravel()).to(device),
            torch.tensor(places, device=device),
            length,
            keys.flatten(),
            unused,
            mask.repeat(1, group, 1)[:, None],
        )

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        plan: _Plan = metadata.plan
        all_decodes, prefills = plan
        blocks = kv_cache.flatten(0, 1)  # [rows, block_size, KVH, D]
        output = torch.empty_like(query)
        if all_decodes:
            self._count(DECODE)
        for decodes in all_decodes:
            part, used = decodes.index, decodes.used
            found = self._decode(query[part], blocks, decodes, kv_scales)
            if used is None:
                output[part] = found
            else:
                assert isinstance(part, Tensor)
                output[part[used]] = found[used]
        if prefills:
            self._count(PREFILL)
        for chunk in prefills:
            output[chunk.start : chunk.stop] = self._prefill(
                query[chunk.start : chunk.stop], blocks, chunk, kv_scales
            )
        return output

    def _count(self, operation: str) -> None:
        if self.table is not None:
            self.table.usable(operation)[-1].num_calls += 1

    def _decode(
        self, query: Tensor, blocks: Tensor, decodes: _Decodes, kv_scales: Tensor | None
    ) -> Tensor:
        """Attends with the queries `[S * L, H, D]` of padded sequences.

        Query heads that share a key head become queries of that head: `[S, KVH, group * L, D]`.
        """
        length = decodes.length
        grouped = query.unflatten(1, (self._facts.num_kv_heads, -1))
        if length > 1:
            grouped = grouped.unflatten(0, (-1, length)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        count = len(grouped)
        gathered: list[Tensor] = []
        for part in (0, 1):
            tokens = _tokens(blocks, decodes.keys, part, query.dtype, kv_scales)
            # The values need it although the mask excludes them: a free block may hold NaN, and
            # 0 * NaN is NaN.
            tokens.index_fill_(0, decodes.unused, 0.0)
            gathered.append(tokens.unflatten(0, (count, -1)).transpose(1, 2))
        attended = F.scaled_dot_product_attention(grouped, *gathered, attn_mask=decodes.mask)
        if length > 1:
            attended = attended.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return attended.flatten(1, 2)

    def _prefill(
        self, query: Tensor, blocks: Tensor, chunk: _Prefill, kv_scales: Tensor | None
    ) -> Tensor:
        """Attends with one sequence's chunk to all of its context."""
        num_kv_heads, size = self._facts.num_kv_heads, len(query)
        keys, values = (
            _tokens(blocks, chunk.keys, part, query.dtype, kv_scales)[: chunk.context].transpose(
                0, 1
            )
            for part in (0, 1)
        )
        grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [KVH, group, T, D]
        group = grouped.shape[1]
        if chunk.mask is None:
            keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
            grouped = grouped.flatten(0, 1)
        else:  # a long context is not copied: query heads that share a key head are its queries
            grouped = grouped.flatten(1, 2)
        attended = F.scaled_dot_product_attention(
            grouped[None],
            keys[None],
            values[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended.reshape(-1, size, query.shape[-1]).transpose(0, 1)


def _runs(num_decodes: int, seq_lens: list[int], first_blocks: list[int]) -> list[list[int]]:
    """Groups decodes of the same sequence that follow each other: a token and its drafts.

    Args:
        num_decodes: number of decodes, which come first.
        seq_lens, first_blocks: see `AttentionMetadata`.
    """
    runs: list[list[int]] = []
    for index in range(num_decodes):
        before = index - 1
        follows = index > 0 and seq_lens[index] == seq_lens[before] + 1
        if follows and first_blocks[index] == first_blocks[before]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _tokens(
    blocks: Tensor, keys: Tensor, part: int, dtype: torch.dtype, kv_scales: Tensor | None
) -> Tensor:
    """Copies the keys (part 0) or values (part 1) of some blocks, `[tokens, KVH, D]`."""
    stored = as_bytes(blocks).index_select(0, keys + part).flatten(0, 1).view(blocks.dtype)
    return read_kv(stored, part, dtype, kv_scales)
