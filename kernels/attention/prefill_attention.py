"""Attention of prefill chunks for Hopper, by one Gluon kernel.

A work item is up to 64 query tokens of a chunk, of which a CTA computes one head. Work items are in
a list on the device, with the longest contexts first, so that a CUDA graph works for any chunks. If
there are few items with long cached contexts, such as a short question after a long conversation,
each item is split among several CTAs. The last CTA to finish merges the splits in their order.

A CTA first loads the keys and values of the step itself by TMA, since `qk_rope_cache` has also
written these to a contiguous tensor, and then gathers cached keys and values from the KV cache. As
in FlashAttention-3 (https://arxiv.org/abs/2407.08608, section 3.2), the GEMM of one tile's
probabilities with its values overlaps the softmax of the next tile, which Triton's compiler does
not do. Rows of other sequences are masked out of every GEMM, because they may not be finite.

The reference implementation is `services.decoder.attention.sdpa`.
"""

# Gluon's constants and launches have no types that pyright understands.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.attention_tuning import (
    LONG_PAIRS,
    MAX_CACHED_SHARE,
    MAX_CAPTURED_PAIRS,
    MEASURED_WIDTH,
    MIN_CAPTURED_PAIRS,
    MIN_SPLIT_TILES,
    PREFILL_CTAS_PER_SM,
    AttentionFacts,
)
from kernels.attention.fp8_pages import as_bytes
from kernels.attention.prefill_kernel import prefill_kernel
from kernels.attention.warpgroups import LOG2_E, NUM_WARPS, TILE_LAYOUT

TILE = 64  # query tokens of a work item, and tokens of a K/V tile
_FIELDS = 8  # fields of a work item in the list


class PrefillChunk(NamedTuple):
    """Tokens of a prompt that a step computes.

    Attributes:
        first_token: index in the step of the chunk's first token.
        length: number of tokens of the chunk.
        cached: number of tokens of the sequence that are in the KV cache.
        first_block: index among the block ids of the sequence's first block.
    """

    first_token: int
    length: int
    cached: int
    first_block: int


class PrefillAttention:
    """The kernel and its scratch memory for split items, for one step of a device at a time."""

    def __init__(self, facts: AttentionFacts, device: torch.device) -> None:
        num_heads, head_dim = facts.num_heads, facts.head_dim
        # With wider queries, a pair takes longer, and fewer pairs hide the launches.
        scale = MEASURED_WIDTH / (num_heads * head_dim)
        self._min_pairs, self._max_pairs = MIN_CAPTURED_PAIRS * scale, MAX_CAPTURED_PAIRS * scale
        self._hiding_tokens = facts.launch_hiding_tokens
        # With this many work items there are enough CTAs without splitting.
        ctas_per_sm = PREFILL_CTAS_PER_SM if head_dim <= 128 else 1
        self._max_splits = facts.device.num_sms * ctas_per_sm // num_heads
        rows = self._max_splits * num_heads * TILE
        self._acc = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        self._m_l = torch.empty((2, rows), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(rows // TILE + 1, dtype=torch.int32, device=device)

    @staticmethod
    def is_faster_than_fa3(chunks: Sequence[PrefillChunk]) -> bool:
        """Returns whether the kernel takes less device time than FA3, without launches."""
        # A chunk of n tokens has n² / 2 pairs of its own tokens.
        own = sum(chunk.length**2 for chunk in chunks) / 2
        return _cached_pairs(chunks) <= MAX_CACHED_SHARE * own

    def is_faster_captured(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Returns whether a captured step with this kernel is faster than one with eager FA3.

        A step of many tokens or pairs hides the launches of an eager step, and FA3 takes half of
        the time for a pair.
        """
        tokens = sum(chunk.length for chunk in chunks)
        most = self._max_pairs * (1 - tokens / self._hiding_tokens)
        return _cached_pairs(chunks) <= max(self._min_pairs, most)

    def count_work(self, num_tokens: int, num_chunks: int) -> int:
        """Largest number of work items of a step with these numbers of tokens and chunks."""
        return max(-(-num_tokens // TILE) + num_chunks - 1, self._max_splits)

    def list_work(self, chunks: Sequence[PrefillChunk], room: int) -> npt.NDArray[np.int32]:
        """Lists the work items of a step.

        This is plain Python because the list of a single prompt is short, and a numpy call takes
        10 µs on a CPU core that has been idle.

        Args:
            chunks: chunks of the step.
            room: length of the list, at least `count_work`. Items that are not needed are empty.

        Returns:
            `[room, 8]` with the fields: first query token; number of query tokens, 0 for an empty
            item; first token of the chunk; index of the sequence's first block; first cached token
            and end of the cached tokens; number of splits, which are consecutive items; index of
            the split.
        """
        tiles = [(chunk, at) for chunk in chunks for at in range(0, chunk.length, TILE)]
        share = 0  # K/V tiles of a split; 0 if no item is split
        if (spare := self._max_splits - len(tiles)) > 0:
            total = sum(-(-chunk.cached // TILE) for chunk, _ in tiles)
            share = max(MIN_SPLIT_TILES, -(-total // spare))
        work: list[tuple[int, int, int, PrefillChunk]] = []
        for chunk, at in tiles:
            splits = max(1, -(-chunk.cached // (share * TILE))) if share else 1
            work.append((-(chunk.cached // splits + at), at, splits, chunk))
        work.sort(key=itemgetter(0))
        items: list[int] = []
        for _, at, splits, chunk in work:
            first, length, cached, first_block = chunk
            span = -(-cached // (splits * TILE)) * TILE
            for split in range(splits):
                items += (first + at, min(length - at, TILE), first, first_block)
                items += (split * span, min(cached, (split + 1) * span), splits, split)
        flat = np.zeros(room * _FIELDS, np.int32)
        flat[: len(items)] = items
        return flat.reshape(room, _FIELDS)

    def __call__(
        self,
        query: Tensor,
        keys_values: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        work: Tensor,
        *,
        out: Tensor,
        kv_scales: Tensor | None = None,
        beside_decode: bool = False,
    ) -> None:
        """Computes attention of the chunks in `work`. Rows of other tokens are not written.

        Args:
            query: `[T, num_heads, head_dim]`, contiguous.
            keys_values: keys and values of the step, `[T, 2 * num_kv_heads, head_dim]`, contiguous,
                as `qk_rope_cache` writes them.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: int32 block ids of all sequences.
            work: `[room, 8]` int32 on the device, from `list_work`.
            out: tensor for the result, with the shape of `query`.
            kv_scales: scales of an e4m3 cache, see `heads.as_stored`, which also apply to
                `keys_values`. None if the cache has the model's dtype.
            beside_decode: True if the kernel runs concurrently with the previous kernel on the
                stream, `PagedDecodeAttention` of the same step (PDL).
        """
        num_heads, head_dim = query.shape[1:]
        tiles = (
            TensorDescriptor.from_tensor(rows.flatten(1), [TILE, head_dim], TILE_LAYOUT)
            for rows in (query, keys_values)
        )
        prefill_kernel[(len(work) * num_heads,)](
            *tiles,
            as_bytes(kv_cache),
            query if kv_scales is None else kv_scales,
            block_ids,
            work,
            self._acc,
            self._m_l,
            self._arrived,
            out,
            head_dim**-0.5 * LOG2_E,
            SCRATCH=len(self._acc),
            HEADS=num_heads,
            KV_HEADS=kv_cache.shape[3],
            DIM=head_dim,
            BLOCK_SIZE=kv_cache.shape[2],
            TILE=TILE,
            FIELDS=_FIELDS,
            FP8=kv_scales is not None,
            BESIDE_DECODE=beside_decode,
            num_warps=NUM_WARPS,
            launch_pdl=True,
        )


def is_long(chunks: Sequence[PrefillChunk]) -> bool:
    """Returns whether the chunks have so long contexts that FA3, captured, takes less time."""
    return _cached_pairs(chunks) >= LONG_PAIRS


def _cached_pairs(chunks: Sequence[PrefillChunk]) -> int:
    """Number of pairs of a new and a cached token."""
    return sum(chunk.cached * chunk.length for chunk in chunks)
