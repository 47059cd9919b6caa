"""Attention of the chunks of prompts, by one kernel for Hopper: the work as a list, and its launch.

A block is up to 64 query tokens of one chunk, and each of its heads is a program's. Blocks lie on
the device in a list, the longest contexts first, so that a CUDA graph serves any chunks. Where a
few blocks have long contexts in the cache, as the short question after a long conversation, each is
divided among several programs; whoever comes last adds up their parts, in their order. What a
program does is in `prompt_kernel`.

The plain twin is `services.decoder.attention.sdpa`.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.common.nn import launches
from services.decoder.kernels.prompt_kernel import prompt_kernel

_BLOCK = 64  # tokens, of queries and of keys
_WARPS = 4  # that multiply together
_PROGRAMS_PER_PROCESSOR = 2
_LEAST_TILES = 4  # of keys, of a part
# Pairs of a new and a cached token, of which FA3 does twice as many in a time. It is launched
# kernel by kernel, so it gains once a step keeps the device longer than its launches the host: some
# 10 ms, where 1,000 new tokens take 5 and a million pairs 0.8 (28 layers of the 2B on an H200).
_FEW_PAIRS, _MOST_PAIRS, _PAIRS_PER_TOKEN = 1_000_000, 12_000_000, 6_000
_FIELDS = 8  # of an item in the list
_TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LOG2_E = 1.4426950408889634


class PromptChunk(NamedTuple):
    """Some tokens of a prompt in a step.

    Attributes:
        first_token: tokens of the step before it.
        length: its tokens.
        cached: tokens of its sequence that are in the cache.
        first_block: where the sequence's blocks begin among the step's block ids.
    """

    first_token: int
    length: int
    cached: int
    first_block: int


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
    def fits(head_dim: int) -> bool:
        """Whether it serves heads of this size, on Hopper."""
        return head_dim in (64, 128)

    @staticmethod
    def outruns_fa3(chunks: Sequence[PromptChunk]) -> bool:
        """Whether it takes less time than FA3, launches and graphs aside: where at most a fifth
        of what is attended to is cached. A chunk of n tokens attends to n * n / 2 of its own.
        """
        return _cached_pairs(chunks) * 8 <= sum(chunk.length**2 for chunk in chunks)

    @staticmethod
    def gains(chunks: Sequence[PromptChunk]) -> bool:
        """Whether it is for these chunks; else they are not for a graph."""
        most = _MOST_PAIRS - _PAIRS_PER_TOKEN * sum(chunk.length for chunk in chunks)
        return _cached_pairs(chunks) <= max(_FEW_PAIRS, most)

    def count_items(self, num_tokens: int, num_chunks: int) -> int:
        """The most items of so many chunks of so many tokens together."""
        return max(-(-num_tokens // _BLOCK) + num_chunks - 1, self._most_parts)

    def list_items(self, chunks: Sequence[PromptChunk], room: int) -> npt.NDArray[np.int32]:
        """The work, for `room` items, at least `count_items`.

        In plain Python: a lone prompt's list is short, and each kind of numpy's calls takes 10 µs
        where the processor has rested.

        Returns:
            `[room, 8]`: first token of the block; its tokens, 0 where there is no item; first token
            of the chunk; where the sequence's block ids begin; tokens of the cache, from and to;
            parts of the block, one after the other in the list; which of them it is.
        """
        blocks = [(chunk, at) for chunk in chunks for at in range(0, chunk.length, _BLOCK)]
        share = 0  # tiles of a part; 0: there is one part
        if (spare := self._most_parts - len(blocks)) > 0:
            total = sum(-(-chunk.cached // _BLOCK) for chunk, _ in blocks)
            share = max(_LEAST_TILES, -(-total // spare))
        work: list[tuple[int, int, int, PromptChunk]] = []
        for chunk, at in blocks:
            parts = max(1, -(-chunk.cached // (share * _BLOCK))) if share else 1
            work.append((-(chunk.cached // parts + at), at, parts, chunk))
        work.sort(key=itemgetter(0))
        items: list[int] = []
        for _, at, parts, chunk in work:
            first, length, cached, first_block = chunk
            span = -(-cached // (parts * _BLOCK)) * _BLOCK
            for part in range(parts):
                items += (first + at, min(length - at, _BLOCK), first, first_block)
                items += (part * span, min(cached, (part + 1) * span), parts, part)
        flat = np.zeros(room * _FIELDS, np.int32)
        flat[: len(items)] = items
        return flat.reshape(room, _FIELDS)

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
        num_heads, head_dim = query.shape[1:]
        tiles = (
            TensorDescriptor.from_tensor(rows.flatten(1), [_BLOCK, head_dim], _TILE)
            for rows in (query, keys_values)
        )
        prompt_kernel[(len(items) * num_heads,)](
            *tiles, kv_cache, block_ids, items, self._sums, self._scales, self._arrived, out,
            head_dim**-0.5 * _LOG2_E,
            PLACES=len(self._sums), HEADS=num_heads, KV_HEADS=kv_cache.shape[3], DIM=head_dim,
            POOL_BLOCK=kv_cache.shape[2], BLOCK=_BLOCK, FIELDS=_FIELDS, ACCOMPANIES=accompanies,
            num_warps=_WARPS, launch_pdl=True,
        )  # fmt: skip


def _cached_pairs(chunks: Sequence[PromptChunk]) -> int:
    """Pairs of a new and a cached token."""
    return sum(chunk.cached * chunk.length for chunk in chunks)
