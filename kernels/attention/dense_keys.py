"""Triton kernel that copies the cached keys and values of some sequences one after the other.

FlashAttention-3 reads dense keys with the bulk tensor copy engine and keys in blocks with a copy of
each thread's own, which takes it 10 to 29 % longer on an H200. The copy of a sequence reads and
writes its keys and values once in each layer. It pays if enough queries share it: 1,024 queries
behind 32,000 tokens take 842 µs with the copy and 900 without, 1,024 behind 100,000 take 2.64 ms
instead of 3.14, and 512 gain nothing.

FA3 reads whole tiles of keys. Each sequence therefore begins with a tile, and the rest of its last
tile is zeros: the values of another sequence, or those of an earlier step, may not be finite, and
FA3 multiplies them with the masked probabilities, which are zero.

`DenseKeys.gather_plainly` is the reference implementation.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.attention_tuning import DENSE_CTAS_PER_SM, AttentionFacts, dense_tokens

MAX_SEQUENCES = 32  # of a step, so that one variant of the kernel serves all steps
TILE = 128  # keys of a tile of FA3 for heads of up to 128 elements, if attention is causal


class DenseKeys:
    """Memory for the keys and values of a step's chunks, for one layer at a time.

    Args:
        facts: facts of the model and the device. The keys of `dense_tokens(facts)` tokens fit.
        device: the device that computes.

    Attributes:
        keys, values: `[num_tokens, num_kv_heads, head_dim]`, sequences in whole tiles.
    """

    def __init__(self, facts: AttentionFacts, device: torch.device) -> None:
        shape = (2, dense_tokens(facts), facts.num_kv_heads, facts.head_dim)
        self.keys, self.values = torch.empty(shape, dtype=facts.dtype, device=device)
        self._num_ctas = facts.device.num_sms * DENSE_CTAS_PER_SM

    def gather(
        self, kv_cache: Tensor, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
    ) -> None:
        """Copies the keys and values of sequences into `keys` and `values`, in their order.

        The kernel reads lengths from the device alone, so a CUDA graph can contain it.

        Args:
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: int32 block ids of all sequences.
            first_blocks: `[S]` int32, index in `block_ids` of each sequence's first block. There
                are at most `MAX_SEQUENCES` sequences.
            seq_lens: `[S]` int32, numbers of tokens, which fit together. 0 copies nothing.
        """
        block_size, width = kv_cache.shape[2], kv_cache[0, 0, 0].numel()
        assert kv_cache.is_contiguous() and len(seq_lens) <= MAX_SEQUENCES and not TILE % block_size
        _gather_kernel[(self._num_ctas, 2)](
            kv_cache,
            block_ids,
            first_blocks,
            seq_lens,
            self.keys,
            self.values,
            len(seq_lens),
            SEQUENCES=MAX_SEQUENCES,
            TILE=TILE,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            BLOCK_SIZE=block_size,
            num_warps=8,
        )

    def gather_plainly(
        self, kv_cache: Tensor, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
    ) -> None:
        """Does what `gather` does, by torch, and waits for the device."""
        block_size, start = kv_cache.shape[2], 0
        for first, length in zip(first_blocks.tolist(), seq_lens.tolist(), strict=True):
            blocks = block_ids[first : first + -(-length // block_size)].long()
            end = start + -(-length // TILE) * TILE
            for index, out in enumerate((self.keys, self.values)):
                out[start : start + length] = kv_cache[blocks, index].flatten(0, 1)[:length]
                out[start + length : end] = 0
            start = end


def padded_to_tiles(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the tokens of the tiles that have room for sequences of these lengths."""
    return -(-lengths // TILE) * TILE


def dense_chunks(
    query_starts: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Returns the places of S chunks' queries, and of the keys that `DenseKeys.gather` copies.

    FA3 takes the keys of a chunk to end where those of the next chunk begin. The rest of a chunk's
    last tile is therefore a chunk without queries, which FA3 computes nothing for.

    Args:
        query_starts: `[S + 1]`, prefix sums of the chunks' numbers of queries.
        contexts: `[S]`, tokens of each chunk's sequence.

    Returns:
        `[2, 2 * S + 1]`: prefix sums of the numbers of queries and of keys of 2 * S chunks.
    """
    places = np.zeros((2, 2 * len(contexts) + 1), np.int32)
    padded = padded_to_tiles(contexts.astype(np.int64))
    ends = padded.cumsum()
    places[0, ::2], places[0, 1::2] = query_starts, query_starts[1:]
    places[1, 2::2], places[1, 1::2] = ends, ends - padded + contexts
    return places


@triton.jit(do_not_specialize=["num_sequences"])
def _gather_kernel(
    cache_ptr,
    block_ids_ptr,
    first_blocks_ptr,
    seq_lens_ptr,
    keys_ptr,
    values_ptr,
    num_sequences,
    SEQUENCES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copies every n-th block of the sequences, where n is the number of CTAs.

    The CTAs with 0 in the second axis copy keys, the others values.
    """
    sequences = tl.arange(0, SEQUENCES)
    lengths = tl.load(seq_lens_ptr + sequences, mask=sequences < num_sequences, other=0)
    padded = (lengths + TILE - 1) // TILE * TILE
    blocks = padded // BLOCK_SIZE
    ends, starts = tl.cumsum(blocks), tl.cumsum(padded) - padded
    is_value = tl.program_id(1)
    out_ptr = values_ptr if is_value else keys_ptr
    token, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, COLUMNS)[None, :]
    source = (is_value * BLOCK_SIZE + token) * WIDTH + column
    for item in range(tl.program_id(0), tl.sum(blocks), tl.num_programs(0)):
        sequence = tl.sum((ends <= item).to(tl.int32))
        chosen = sequences == sequence
        index = item - tl.sum(tl.where(chosen, ends - blocks, 0))
        left = tl.sum(tl.where(chosen, lengths, 0)) - index * BLOCK_SIZE
        start = tl.sum(tl.where(chosen, starts, 0)) + index * BLOCK_SIZE
        # Behind the last token, a block of the tile has no entry in the table.
        table_ptr = block_ids_ptr + tl.load(first_blocks_ptr + sequence)
        block = tl.load(table_ptr + index, mask=left > 0, other=0).to(tl.int64)
        place, inside_row = block * (2 * BLOCK_SIZE * WIDTH) + source, column < WIDTH
        tile = tl.load(cache_ptr + place, mask=(token < left) & inside_row, other=0.0)
        out_place = (start + token).to(tl.int64) * WIDTH + column
        tl.store(out_ptr + out_place, tile, mask=inside_row)
