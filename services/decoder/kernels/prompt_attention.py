"""Attention of the chunks of prompts in a captured step, as one Triton kernel.

A block is up to 64 query tokens of one chunk, and each of its heads is a program's. Blocks lie on
the device in a list, the longest contexts first, so that a CUDA graph serves any chunks. A program
goes through what the cache has from before the step, block by block of the pool, and then through
the step's own keys and values, which `qk_rope_cache` has left in order beside the cache: whole
tiles come from there by one instruction each. Where a few blocks have long contexts in the cache,
as the short question after a long conversation, each is divided among several programs; whoever
comes last adds up their parts, in their order.

Nothing is read, not even to be multiplied by zero, that is not the sequence's own: another's may
not be finite.

The plain twin is `services.decoder.attention.sdpa`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from services.common.nn import launches
from services.decoder.kernels.many_attention import joined
from services.decoder.kernels.overlap import overlaps

_BLOCK = 64  # tokens, of queries and of keys
_WARPS, _STAGES = 4, 3
_PROGRAMS_PER_PROCESSOR = 2
_LEAST_TILES = 4  # of keys, of a part
# Pairs of a new and a cached token, of which FA3 does twice as many in a time. It is launched
# kernel by kernel, so it gains once a step keeps the device longer than its launches the host: some
# 10 ms, where 1,000 new tokens take 5 and a million pairs 0.8 (28 layers of the 2B on an H200).
_FEW_PAIRS, _MOST_PAIRS, _PAIRS_PER_TOKEN = 1_000_000, 12_000_000, 6_000
_FIELDS = 8  # of an item in the list
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Chunks:
    """C chunks of a step, on the host.

    Attributes:
        cu_query_lens: `[C + 1]` int32, the step's tokens before each chunk.
        seq_lens: `[C]` int32, contexts with the chunk.
        first_blocks: `[C]` int64, where each sequence's blocks begin among the step's block ids.
    """

    cu_query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    first_blocks: npt.NDArray[np.int64]


class PromptAttention:
    """The kernel, and the memory where the parts of a block meet: for one device, one step at a
    time.
    """

    def __init__(self, device: torch.device, num_heads: int, head_dim: int) -> None:
        # With so many items there are enough programs, and no block is divided.
        self._most_parts = launches.PROCESSORS * _PROGRAMS_PER_PROCESSOR // num_heads
        rows = self._most_parts * num_heads * _BLOCK
        self._sums = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        self._scales = torch.empty((2, rows), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(rows // _BLOCK + 1, dtype=torch.int32, device=device)

    @staticmethod
    def gains(query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> bool:
        """Whether it is for chunks of these lengths and contexts; else they are not for a graph."""
        cached = (seq_lens - query_lens).astype(np.int64)
        most = _MOST_PAIRS - _PAIRS_PER_TOKEN * int(query_lens.sum())
        return int(cached @ query_lens) <= max(_FEW_PAIRS, most)

    def count_items(self, num_tokens: int, num_chunks: int) -> int:
        """The most items of so many chunks of so many tokens together."""
        return max(-(-num_tokens // _BLOCK) + num_chunks - 1, self._most_parts)

    def list_items(self, chunks: Chunks, room: int) -> npt.NDArray[np.int32]:
        """The work, for `room` items, at least `count_items`.

        Returns:
            `[room, 8]`: first token of the block; its tokens, 0 where there is no item; first token
            of the chunk; where the sequence's block ids begin; tokens of the cache, from and to;
            parts of the block, one after the other in the list; which of them it is.
        """
        lengths = np.diff(chunks.cu_query_lens)
        counts = -(-lengths // _BLOCK)
        chunk = np.repeat(np.arange(len(lengths)), counts)
        before = (np.arange(len(chunk)) - np.repeat(counts.cumsum() - counts, counts)) * _BLOCK
        cached = (chunks.seq_lens - lengths)[chunk]
        tiles = -(-cached // _BLOCK)
        parts = np.ones_like(tiles)
        if (spare := self._most_parts - len(chunk)) > 0:
            share = max(_LEAST_TILES, -(-int(tiles.sum()) // spare))
            parts = np.maximum(1, -(-tiles // share))
        order = np.argsort(-(cached // parts + before), kind="stable")
        block = np.repeat(order, parts[order])
        starts = parts[order].cumsum() - parts[order]
        part = np.arange(len(block)) - np.repeat(starts, parts[order])
        span = -(-tiles // parts)[block] * _BLOCK
        chunk = chunk[block]
        items = np.zeros((room, _FIELDS), np.int32)
        fields = (
            chunks.cu_query_lens[chunk] + before[block],
            np.minimum(lengths[chunk] - before[block], _BLOCK),
            chunks.cu_query_lens[chunk],
            chunks.first_blocks[chunk],
            part * span,
            np.minimum(cached[block], (part + 1) * span),
            parts[block],
            part,
        )
        for column, values in enumerate(fields):
            items[: len(block), column] = values
        return items

    def __call__(
        self,
        query: Tensor,
        keys_values: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        items: Tensor,
        *,
        out: Tensor,
        accompanies: bool = False,
    ) -> None:
        """Attention of the chunks that `items` lists; rows of other tokens stay as they are.

        Args:
            query: `[T, num_heads, head_dim]`, contiguous.
            keys_values: `[T, 2 * num_kv_heads, head_dim]`, contiguous: the step's own, see
                `qk_rope_cache`.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: of the step's sequences, int32.
            items: `[room, 8]` int32, from `list_items`, on the device.
            out: where the result goes, as `query`.
            accompanies: it runs beside the kernel before it, `ManyAttention` for the same step.
        """
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.shape[3]
        own = keys_values.view(num_tokens, 2 * num_kv_heads * head_dim)
        _kernel[(len(items) * num_heads,)](
            query, TensorDescriptor.from_tensor(own, [_BLOCK, head_dim]), own, kv_cache, block_ids,
            items, self._sums, self._scales, self._arrived, out, head_dim**-0.5 * _LOG2_E,
            PLACES=len(self._sums), HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim,
            POOL_BLOCK=kv_cache.shape[2], BLOCK=_BLOCK, FIELDS=_FIELDS, STAGES=_STAGES,
            OVERLAP=overlaps(), ACCOMPANIES=accompanies, num_warps=_WARPS, launch_pdl=overlaps(),
        )  # fmt: skip


@triton.jit
def _kernel(
    query_ptr, own_tiles, own_ptr, cache_ptr, block_ids_ptr, items_ptr, sums_ptr, scales_ptr,
    arrived_ptr, out_ptr, scale,
    PLACES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    POOL_BLOCK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, ACCOMPANIES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    fields_ptr = items_ptr + program // HEADS * FIELDS
    head = program % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    first, size = tl.load(fields_ptr), tl.load(fields_ptr + 1)
    if OVERLAP and not ACCOMPANIES:
        gdc_wait()
    if size > 0:
        chunk, table_ptr = tl.load(fields_ptr + 2), block_ids_ptr + tl.load(fields_ptr + 3)
        begin, end = tl.load(fields_ptr + 4), tl.load(fields_ptr + 5)
        parts, part = tl.load(fields_ptr + 6), tl.load(fields_ptr + 7)
        row, column = tl.arange(0, BLOCK), tl.arange(0, DIM)
        inside = (row < size)[:, None]
        place = ((first + row) * HEADS + head)[:, None] * DIM + column[None, :]
        query = tl.load(query_ptr + place, mask=inside, other=0.0)

        top, weights, sums = _attend_cached(
            query, cache_ptr + kv_head * DIM, table_ptr, begin, end, scale,
            KV_HEADS * DIM, DIM, POOL_BLOCK, BLOCK, STAGES,
        )  # fmt: skip
        if part == parts - 1:
            top, weights, sums = _attend_own(
                query, own_tiles, own_ptr, chunk, first, size, kv_head * DIM, scale, top, weights,
                sums, KV_HEADS * DIM, DIM, BLOCK, STAGES,
            )  # fmt: skip
        if parts == 1:
            result = sums / weights[:, None]
            tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            # Past the first cache, which other processors do not see.
            scales = scales_ptr + program * BLOCK + row
            parts_place = sums_ptr + (program * BLOCK + row)[:, None] * DIM + column[None, :]
            tl.store(parts_place, sums, cache_modifier=".cg")
            tl.store(scales, top, cache_modifier=".cg")
            tl.store(scales + PLACES, weights, cache_modifier=".cg")
            tl.debug_barrier()
            opener = program - part * HEADS
            if tl.atomic_add(arrived_ptr + opener, 1, sem="acq_rel") == parts - 1:
                tl.debug_barrier()
                result = _merged(sums_ptr, scales_ptr, opener, parts, PLACES, HEADS, DIM, BLOCK)
                tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)
                tl.store(arrived_ptr + opener, 0)
    if OVERLAP and ACCOMPANIES:  # who waits for this kernel has waited for both
        gdc_wait()


@triton.jit
def _attend_cached(
    query, keys_ptr, table_ptr, begin, end, scale,
    WIDTH: tl.constexpr, DIM: tl.constexpr, POOL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax over a sequence's tokens [begin, end) in the pool: largest scores, sums
    of weights, weighted sums of values.
    """
    row, column = tl.arange(0, BLOCK), tl.arange(0, DIM)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, DIM), tl.float32)
    for at in tl.range(begin, end, BLOCK, num_stages=STAGES):
        there = at + row < end
        block = tl.load(table_ptr + (at + row) // POOL_BLOCK, mask=there, other=0)
        line = block.to(tl.int64) * (2 * POOL_BLOCK) + (at + row) % POOL_BLOCK
        place = keys_ptr + (line * WIDTH)[:, None] + column[None, :]
        key = tl.load(place, mask=there[:, None], other=0.0)
        value = tl.load(place + POOL_BLOCK * WIDTH, mask=there[:, None], other=0.0)
        score = tl.where(there[None, :], tl.dot(query, key.T) * scale, float("-inf"))
        top, weights, sums = _update(score, value, top, weights, sums)
    return top, weights, sums


@triton.jit
def _attend_own(
    query, own_tiles, own_ptr, chunk, first, size, key_column, scale, top, weights, sums,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes on with the step's own tokens: the chunk's before the block, all of which see, and the
    block's, each of which sees itself and those before it.
    """
    for at in tl.range(chunk, first, BLOCK, num_stages=STAGES):
        key = own_tiles.load([at, key_column])
        value = own_tiles.load([at, WIDTH + key_column])
        score = tl.dot(query, key.T) * scale
        top, weights, sums = _update(score, value, top, weights, sums)
    row, column = tl.arange(0, BLOCK), tl.arange(0, DIM)
    inside = (row < size)[:, None]
    keys_ptr = own_ptr + ((first + row) * (2 * WIDTH))[:, None] + key_column + column[None, :]
    key = tl.load(keys_ptr, mask=inside, other=0.0)
    value = tl.load(keys_ptr + WIDTH, mask=inside, other=0.0)
    seen = (row[None, :] <= row[:, None]) & (row < size)[None, :]
    score = tl.where(seen, tl.dot(query, key.T) * scale, float("-inf"))
    return _update(score, value, top, weights, sums)


@triton.jit
def _merged(
    sums_ptr, scales_ptr, opener, parts,
    PLACES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of one block's head, in their order."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, DIM)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, DIM), tl.float32)
    for part in tl.range(0, parts):
        line = (opener + part * HEADS) * BLOCK + row
        part_top = tl.load(scales_ptr + line, cache_modifier=".cg")
        part_weights = tl.load(scales_ptr + PLACES + line, cache_modifier=".cg")
        part_sums = tl.load(sums_ptr + line[:, None] * DIM + column[None, :], cache_modifier=".cg")
        top, weights, sums = joined(top, weights, sums, part_top, part_weights, part_sums)
    return sums / weights[:, None]


@triton.jit
def _update(score, value, top, weights, sums):
    """One tile more of the running softmax, in base 2."""
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    old = tl.exp2(top - new_top)
    weights = weights * old + tl.sum(weight, axis=1)
    return new_top, weights, tl.dot(weight.to(value.dtype), value, sums * old[:, None])
