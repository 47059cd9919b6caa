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
    """Sequences with one query token, padded to the longest context among them.

    Attributes:
        index: `[S]` int64, indices of the sequences among the step's decodes.
        keys: `[S * max_blocks]` int64, rows in the pool of the blocks' keys.
        unused: int64 indices of tokens behind a context, among S * max_blocks * block_size.
        mask: `[S, 1, 1, max_blocks * block_size]` bool, true for tokens within a context.
    """

    index: Tensor | slice
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

    def plans_from_blocks(self, num_decodes: int) -> bool:
        return False

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
        # Decodes whose contexts differ by less than a factor of two are padded together.
        alike: dict[int, list[int]] = {}
        for index in range(metadata.num_decodes):
            alike.setdefault((counts[index] - 1).bit_length(), []).append(index)
        decodes = [
            self._decodes(
                slice(len(group)) if len(alike) == 1 else torch.tensor(group, device=device),
                pad_sequence([tables[i] for i in group], batch_first=True),
                metadata.seq_lens[group],
            )
            for group in alike.values()
        ]
        return decodes, prefills

    def _decodes(
        self, index: Tensor | slice, keys: Tensor, seq_lens: npt.NDArray[np.int32]
    ) -> _Decodes:
        num_tokens = keys.shape[1] * self._facts.block_size
        used = np.arange(num_tokens) < seq_lens[:, None]
        unused = torch.from_numpy(np.flatnonzero(~used)).to(keys.device)
        mask = torch.from_numpy(used).to(keys.device)
        return _Decodes(index, keys.flatten(), unused, mask[:, None, None])

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
            part = decodes.index
            output[part] = self._decode(query[part], blocks, decodes, kv_scales)
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
        """Attends with the queries `[S, H, D]` of padded sequences.

        Query heads that share a key head become queries of that head: `[S, KVH, group, D]`.
        """
        grouped = query.unflatten(1, (self._facts.num_kv_heads, -1))
        gathered: list[Tensor] = []
        for part in (0, 1):
            tokens = _tokens(blocks, decodes.keys, part, query.dtype, kv_scales)
            # The values need it although the mask excludes them: a free block may hold NaN, and
            # 0 * NaN is NaN.
            tokens.index_fill_(0, decodes.unused, 0.0)
            gathered.append(tokens.unflatten(0, (len(query), -1)).transpose(1, 2))
        attended = F.scaled_dot_product_attention(grouped, *gathered, attn_mask=decodes.mask)
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


def _tokens(
    blocks: Tensor, keys: Tensor, part: int, dtype: torch.dtype, kv_scales: Tensor | None
) -> Tensor:
    """Copies the keys (part 0) or values (part 1) of some blocks, `[tokens, KVH, D]`."""
    stored = as_bytes(blocks).index_select(0, keys + part).flatten(0, 1).view(blocks.dtype)
    return read_kv(stored, part, dtype, kv_scales)
