"""Paged attention in plain torch: the path of CPUs, the specification, and the oracle of kernels.

`create_backend` makes it where the dispatch table has nothing else, and `PagedBackend` uses it for
what no kernel can run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from services.common.nn.dispatch import KernelTable
from services.decoder.attention.base import AttentionMetadata, AttentionSizes, StepLengths
from services.decoder.attention.table import DECODE, PREFILL


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk."""

    start: int  # query tokens [start, stop)
    stop: int
    rows: Tensor  # [context] int64: rows of its keys in the pool
    mask: Tensor | None  # [query, context] bool; None: plain causal from the start


@dataclass(frozen=True, slots=True)
class _Plan:
    num_decodes: int
    decode_rows: Tensor  # [num_decodes, max_context] int64
    decode_mask: Tensor  # [num_decodes, 1, 1, max_context] bool
    prefills: list[_Prefill]


class SdpaBackend:
    """A `base.AttentionBackend` without graphs. Rows of the pool are those of `heads.write_kv`.

    Args:
        sizes: of the model.
        table: has this implementation alone, and counts its calls; None: they are not counted.
    """

    captures = captures_prompts = captures_mixed = False

    def __init__(self, sizes: AttentionSizes, table: KernelTable[Any] | None = None) -> None:
        self.table = table
        self._sizes = sizes

    def captures_chunks(self, step: StepLengths) -> bool:
        return False

    def list_work(self, step: StepLengths, *, captured: bool) -> None:
        """None: `plan` makes all that `forward` reads."""

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> _Plan:
        """Finds the rows of the pool that each sequence reads."""
        assert not captured
        device, size = metadata.block_ids.device, self._sizes.block_size
        seq_lens: list[int] = metadata.seq_lens.tolist()
        starts: list[int] = metadata.cu_query_lens.tolist()
        decodes = metadata.num_decodes
        longest = max(seq_lens[:decodes], default=0)
        tokens = torch.arange(longest, device=device)
        counts: list[int] = (-(-metadata.seq_lens // size)).tolist()
        blocks = metadata.block_ids[: sum(counts)].split(counts)
        tables = metadata.block_ids.new_empty(0, 0)
        if decodes:
            tables = pad_sequence(list(blocks[:decodes]), batch_first=True)
        decode_rows = self._rows(tables, longest)
        reachable = tokens < metadata.seq_lens_device[:decodes, None]
        prefills = []
        for index in range(decodes, len(seq_lens)):
            context, query = seq_lens[index], starts[index + 1] - starts[index]
            mask = None
            if query < context:
                order = torch.arange(context, device=device)
                mask = order <= order[context - query :, None]
            rows = self._rows(blocks[index], context)
            prefills.append(_Prefill(starts[index], starts[index + 1], rows, mask))
        return _Plan(decodes, decode_rows, reachable[:, None, None], prefills)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
    ) -> Tensor:
        plan: _Plan = metadata.plan
        flat = kv_cache.view(-1, *kv_cache.shape[-2:])  # [rows, KVH, D]
        output = torch.empty_like(query)
        if plan.num_decodes:
            output[: plan.num_decodes] = self._decode(query[: plan.num_decodes], flat, plan)
            self._count(DECODE)
        if plan.prefills:
            self._count(PREFILL)
        for chunk in plan.prefills:
            output[chunk.start : chunk.stop] = self._prefill(
                query[chunk.start : chunk.stop], flat, chunk
            )
        return output

    def _count(self, operation: str) -> None:
        if self.table is not None:
            self.table.usable(operation)[-1].num_calls += 1

    def _rows(self, block_tables: Tensor, num_tokens: int) -> Tensor:
        """`[..., max_blocks]` → rows of the keys of tokens 0 .. num_tokens - 1."""
        size = self._sizes.block_size
        first = block_tables[..., : -(-num_tokens // size)].long() * (2 * size)
        rows = first[..., None] + torch.arange(size, device=first.device)
        return rows.flatten(-2)[..., :num_tokens]

    def _decode(self, query: Tensor, flat: Tensor, plan: _Plan) -> Tensor:
        """All sequences with one query token, padded to the longest context.

        Query heads that share a key head become its queries: `[S, KVH, group, D]`.
        """
        rows, size = plan.decode_rows, self._sizes.block_size
        grouped = query.unflatten(1, (self._sizes.num_kv_heads, -1))
        # Masked values are zeroed, too: a free block may hold NaN, and 0 * NaN is NaN.
        inside = plan.decode_mask[:, 0, 0, :, None, None]
        keys = flat[rows].where(inside, 0.0).transpose(1, 2)
        values = flat[rows + size].where(inside, 0.0).transpose(1, 2)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.decode_mask)
        return attended.flatten(1, 2)

    def _prefill(self, query: Tensor, flat: Tensor, chunk: _Prefill) -> Tensor:
        """One sequence's chunk against all of its context."""
        group = self._sizes.num_heads // self._sizes.num_kv_heads
        keys = flat[chunk.rows].repeat_interleave(group, dim=1).transpose(0, 1)
        values = flat[chunk.rows + self._sizes.block_size].repeat_interleave(group, dim=1)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended[0].transpose(0, 1)
