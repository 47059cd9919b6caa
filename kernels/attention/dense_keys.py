"""Triton kernel that copies the cached keys and values of some sequences one after the other.

FlashAttention-3 reads dense keys with the bulk tensor copy engine and keys in blocks with a copy of
each thread's own, which takes it 16 to 20 % longer on an H200. The copy of a sequence reads and
writes its keys and values once in each layer. It pays if enough queries share it: 1,024 queries
behind 32,000 tokens take 842 µs with the copy and 900 without, 1,024 behind 100,000 take 2.64 ms
instead of 3.14, and 512 gain nothing.

`DenseKeys.gather_plainly` is the reference implementation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.attention_tuning import DENSE_CTAS_PER_SM, AttentionFacts, dense_tokens

_SEQUENCES = 32  # so that one variant of the kernel serves nearly all steps


class DenseKeys:
    """Memory for the keys and values of a step's chunks, for one layer at a time.

    Args:
        facts: facts of the model and the device. The keys of `dense_tokens(facts)` tokens fit.
        device: the device that computes.

    Attributes:
        keys, values: `[num_tokens, num_kv_heads, head_dim]`. They are finite at any time, because
            FA3 multiplies masked probabilities, which are zero, with the values of whole tiles.
    """

    def __init__(self, facts: AttentionFacts, device: torch.device) -> None:
        shape = (2, dense_tokens(facts), facts.num_kv_heads, facts.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=facts.dtype, device=device)
        self._num_ctas = facts.device.num_sms * DENSE_CTAS_PER_SM

    def gather(
        self, kv_cache: Tensor, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
    ) -> None:
        """Copies the keys and values of S sequences into `keys` and `values`, in their order.

        The kernel reads lengths from the device alone, so a CUDA graph can contain it.

        Args:
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: int32 block ids of all sequences.
            first_blocks: `[S]` int32, index in `block_ids` of each sequence's first block.
            seq_lens: `[S]` int32, numbers of tokens, which fit together. 0 copies nothing.
        """
        assert kv_cache.is_contiguous()
        block_size, width = kv_cache.shape[2], kv_cache[0, 0, 0].numel()
        _gather_kernel[(self._num_ctas, 2)](
            kv_cache,
            block_ids,
            first_blocks,
            seq_lens,
            self.keys,
            self.values,
            len(seq_lens),
            SEQUENCES=max(_SEQUENCES, triton.next_power_of_2(len(seq_lens))),
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
            tokens = slice(start, start + length)
            self.keys[tokens] = kv_cache[blocks, 0].flatten(0, 1)[:length]
            self.values[tokens] = kv_cache[blocks, 1].flatten(0, 1)[:length]
            start += length


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
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copies every n-th block of the sequences, where n is the number of CTAs.

    The CTAs with 0 in the second axis copy keys, the others values.
    """
    sequences = tl.arange(0, SEQUENCES)
    inside = sequences < num_sequences
    lengths = tl.load(seq_lens_ptr + sequences, mask=inside, other=0)
    blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    ends, starts = tl.cumsum(blocks), tl.cumsum(lengths) - lengths
    is_value = tl.program_id(1)
    out_ptr = values_ptr if is_value else keys_ptr
    token, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, COLUMNS)[None, :]
    source = (is_value * BLOCK_SIZE + token) * WIDTH + column
    for item in range(tl.program_id(0), tl.sum(blocks), tl.num_programs(0)):
        sequence = tl.sum((ends <= item).to(tl.int32))
        chosen = sequences == sequence
        index = item - tl.sum(tl.where(chosen, ends - blocks, 0))
        length = tl.sum(tl.where(chosen, lengths, 0)) - index * BLOCK_SIZE
        start = tl.sum(tl.where(chosen, starts, 0)) + index * BLOCK_SIZE
        block = tl.load(block_ids_ptr + tl.load(first_blocks_ptr + sequence) + index).to(tl.int64)
        held = (token < length) & (column < WIDTH)
        tile = tl.load(cache_ptr + block * (2 * BLOCK_SIZE * WIDTH) + source, mask=held)
        tl.store(out_ptr + (start + token).to(tl.int64) * WIDTH + column, tile, mask=held)
