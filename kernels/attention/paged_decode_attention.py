"""Paged decode attention of many sequences by one persistent Triton kernel.

A work item is a sequence with some of its key heads. It is divided into units, which are the tokens
of a K/V tile. Units are ordered by sequence, heads and tokens, and each CTA takes a range of equal
size, which it computes from the context lengths (as in stream-K). The host plans nothing, so a CUDA
graph works for any lengths. A range covers the end of one item, some whole items and the beginning
of another. The results of whole items are written to the output. The partial results of a split
item are stored in float32 until the last of its CTAs merges them, in the order of the CTAs.

The rows of a tile are tokens times key heads, so that a token is contiguous in memory. All query
heads of the item are multiplied with all rows, and scores of other key heads are masked. This costs
nothing, because an MMA has 16 query rows and fewer query heads share a key head.

The reference implementation is `services.decoder.attention.sdpa`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.attention_tuning import (
    AttentionFacts,
    PagedDecodeConfig,
    paged_decode_config,
)
from kernels.attention.fp8_codec import (
    decode_e4m3,
    decode_scaled,
    decode_words,
    factor_after,
    factor_before,
)
from kernels.attention.fp8_pages import as_bytes

_PREFETCHED_TILES = 1  # tiles that are prefetched to L2 while the previous kernel ends
_LOG2_E = 1.4426950408889634


class PagedDecodeAttention:
    """The kernel and its scratch memory for split items, for one step of a device at a time.

    Args:
        facts: facts about the model and the device.
        device: device of the scratch memory.
        config: configuration of the kernel. Defaults to the tuned constants.
    """

    def __init__(
        self, facts: AttentionFacts, device: torch.device, config: PagedDecodeConfig | None = None
    ) -> None:
        self.config = config = config or paged_decode_config(facts)
        assert facts.num_kv_heads % config.kv_heads == 0
        self._facts = facts
        self._rows = config.kv_heads * facts.group_size
        most = max(ctas for ctas, _ in (config.alone, config.beside_few, config.beside_many))
        num_ctas = facts.device.num_sms * most
        # A CTA has at most two partial results of split items, at the ends of its range.
        rows = 2 * num_ctas * self._rows
        self._acc = torch.empty((rows, facts.head_dim), dtype=torch.float32, device=device)
        self._m_l = torch.empty((2, rows), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(num_ctas, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        first_blocks: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        kv_scales: Tensor | None = None,
        beside_prefill: bool = False,
    ) -> None:
        """Computes attention of S sequences with one token each, whose key and value are cached.

        Args:
            query: `[S, num_heads, head_dim]`, contiguous.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: int32 blocks of all sequences.
            first_blocks: int32 indices in `block_ids` of each sequence's first block. The tensor
                may be longer than S.
            seq_lens: int32 context lengths. The tensor may be longer than S. Sequences of length 0
                come last, and their rows of `out` are not written.
            out: tensor for the result, with the shape of `query`.
            kv_scales: scales of an e4m3 cache, see `heads.as_stored`. None if the cache has the
                model's dtype.
            beside_prefill: True if the next kernel on the stream runs concurrently, reads the same
                inputs, and waits for this kernel at its end (PDL).
        """
        assert query.is_contiguous() and kv_cache.is_contiguous() and out.is_contiguous()
        config, facts, num_sequences = self.config, self._facts, len(query)
        beside = config.beside_few if num_sequences <= config.few else config.beside_many
        ctas_per_sm, stages = beside if beside_prefill else config.alone
        num_ctas, pdl = facts.device.num_sms * ctas_per_sm, facts.device.supports_pdl
        _paged_decode_kernel[(num_ctas,)](
            query,
            as_bytes(kv_cache),
            query if kv_scales is None else kv_scales,
            block_ids,
            first_blocks,
            seq_lens,
            self._acc,
            self._m_l,
            self._arrived,
            out,
            num_sequences,
            facts.head_dim**-0.5 * _LOG2_E,
            ITEMS=facts.num_kv_heads // config.kv_heads,
            KV_HEADS=config.kv_heads,
            GROUP=facts.group_size,
            DIM=facts.head_dim,
            COLUMNS=triton.next_power_of_2(facts.head_dim),
            ROWS=max(16, triton.next_power_of_2(self._rows)),
            BLOCK_SIZE=kv_cache.shape[2],
            TILE=config.tile_rows,
            STAGES=stages,
            PREFETCHED=_PREFETCHED_TILES,
            SEQUENCES=max(triton.next_power_of_2(num_sequences), 32 * config.num_warps),
            CTAS=num_ctas,
            SCRATCH=self._m_l.shape[1],
            FP8=kv_scales is not None,
            WORDS=config.words and kv_scales is not None,
            PDL=pdl,
            BESIDE_PREFILL=beside_prefill,
            num_warps=config.num_warps,
            launch_pdl=pdl,
        )


@triton.jit(do_not_specialize=["num_sequences"])
def _paged_decode_kernel(
    query_ptr,
    cache_ptr,
    scales_ptr,
    block_ids_ptr,
    first_blocks_ptr,
    seq_lens_ptr,
    acc_ptr,
    m_l_ptr,
    arrived_ptr,
    out_ptr,
    num_sequences,
    scale,
    ITEMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CTAS: tl.constexpr,
    SCRATCH: tl.constexpr,
    FP8: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
    BESIDE_PREFILL: tl.constexpr,
):
    """Computes a CTA's range of units.

    A sequence has ITEMS work items of KV_HEADS key heads each. The query heads of an item are
    padded to ROWS, and the DIM elements of a head to COLUMNS.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP  # query heads of an item
    UNIT: tl.constexpr = TILE // KV_HEADS  # tokens of a unit
    cta = tl.program_id(0)
    if PDL and not BESIDE_PREFILL:
        gdc_launch_dependents()

    unit, stop, least, rest, sequence, origin = _find_range(
        cta, seq_lens_ptr, num_sequences, ITEMS, UNIT, SEQUENCES, CTAS
    )
    found = tl.minimum(sequence, num_sequences - 1)
    table_ptr = block_ids_ptr + tl.load(first_blocks_ptr + found)
    length = tl.load(seq_lens_ptr + found)
    if PDL:
        if unit < stop:
            _prefetch(
                cache_ptr,
                table_ptr,
                unit - origin,
                length,
                ITEMS,
                UNIT,
                KV_HEADS * DIM,
                BLOCK_SIZE,
                PREFETCHED,
            )
        gdc_wait()
        if BESIDE_PREFILL:  # the next kernel's inputs are there after the wait
            gdc_launch_dependents()

    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offset = row[:, None] * DIM + column[None, :]
    inside = (row < HEADS)[:, None] & (column < DIM)[None, :]
    scale_place = scales_ptr + tl.where(row < HEADS, row // GROUP, 0)
    while unit < stop:
        count = (length + UNIT - 1) // UNIT
        item = (unit - origin) // count
        first = unit - origin - item * count
        taken = tl.minimum(count - first, stop - unit)
        number = sequence * ITEMS + item
        # The next length and table are loaded early.
        ends = (item == ITEMS - 1) & (first + taken == count)
        sequence += ends.to(tl.int32)
        found = tl.minimum(sequence, num_sequences - 1)
        next_length = tl.load(seq_lens_ptr + found)
        next_table = tl.load(first_blocks_ptr + found)
        query = tl.load(query_ptr + number * (HEADS * DIM) + offset, mask=inside, other=0.0)
        if FP8:
            query = _times(query, scale_place + item * KV_HEADS)
        if WORDS:
            query = (query.to(tl.float32) * factor_before(query.dtype)).to(query.dtype)
        m_i, l_i, acc = _attend(
            query,
            cache_ptr + item * (KV_HEADS * DIM),
            table_ptr,
            first * UNIT,
            tl.minimum((first + taken) * UNIT, length),
            scale,
            ITEMS * KV_HEADS * DIM,
            KV_HEADS,
            GROUP,
            DIM,
            COLUMNS,
            BLOCK_SIZE,
            TILE,
            STAGES,
            WORDS,
        )
        if WORDS:
            acc *= factor_after(query.dtype)
        if FP8:
            acc = _times(acc, scale_place + (ITEMS + item) * KV_HEADS)
        begin = unit - first
        _finish_item(
            acc_ptr,
            m_l_ptr,
            arrived_ptr,
            out_ptr + number * (HEADS * DIM),
            taken == count,
            2 * cta + (first == 0).to(tl.int32),
            _cta_of(begin, least, rest),
            _cta_of(begin + count - 1, least, rest),
            m_i,
            l_i,
            acc,
            HEADS,
            DIM,
            SCRATCH,
        )
        if ends:
            origin += count * ITEMS
            table_ptr = block_ids_ptr + next_table
        length = next_length
        unit += taken


@triton.jit
def _times(x, scales_ptr):
    """Multiplies rows by their scales, which is exact for powers of two."""
    return (x.to(tl.float32) * tl.load(scales_ptr)[:, None]).to(x.dtype)


@triton.jit
def _find_range(
    cta,
    seq_lens_ptr,
    num_sequences,
    ITEMS: tl.constexpr,
    UNIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CTAS: tl.constexpr,
):
    """Computes a CTA's range of units.

    Returns:
        First unit; end of the range; number of units of each CTA; number of CTAs with one unit
        more; sequence of the first unit; number of units before this sequence.
    """
    sequences = tl.arange(0, SEQUENCES)
    lengths = tl.load(seq_lens_ptr + sequences, mask=sequences < num_sequences, other=0)
    units = (lengths + UNIT - 1) // UNIT * ITEMS
    total = tl.sum(units)
    least, rest = total // CTAS, total % CTAS
    unit = cta * least + tl.minimum(cta, rest)
    stop = unit + least + (cta < rest).to(tl.int32)
    over = ((tl.cumsum(units) <= unit) & (sequences < num_sequences)).to(tl.int32)
    return unit, stop, least, rest, tl.sum(over), tl.sum(over * units)


@triton.jit
def _prefetch(
    cache_ptr,
    table_ptr,
    within,
    length,
    ITEMS: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """Prefetches the first tiles of a range to L2.

    The tiles may contain the new token's key and value. This is safe because writes go to L2 too.
    """
    count = (length + UNIT - 1) // UNIT
    item = within // count
    token = (within - item * count) * UNIT + tl.arange(0, PREFETCHED * UNIT)
    token = tl.minimum(token, length - 1)
    block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
    row = block * (2 * BLOCK_SIZE) + token % BLOCK_SIZE
    key_ptr = cache_ptr + (row * ITEMS + item) * WIDTH
    width: tl.constexpr = WIDTH * cache_ptr.dtype.element_ty.primitive_bitwidth // 8
    num_bytes = tl.full((PREFETCHED * UNIT,), width, tl.int32)
    for is_value in tl.static_range(2):
        tl.inline_asm_elementwise(
            "{ mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2; }",
            "=r,l,r",
            [key_ptr + is_value * (BLOCK_SIZE * ITEMS * WIDTH), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _attend(
    query,
    keys_ptr,
    table_ptr,
    begin,
    end,
    scale,
    STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Computes row max, row sum and accumulator of a softmax in base 2 over tokens [begin, end).

    `begin` is the first token of a unit. STRIDE is the number of elements from a token of a block
    to the next.

    With WORDS, which needs e4m3, a value is loaded as words of four bytes. Tensor cores take the
    first bytes of all words as a matrix, then the second bytes, and so on: a thread has words of
    two tokens, as it has two elements of 16 bits, and reads 32 bits at a time from shared memory
    where it otherwise reads single bytes. The matrices and the keys are scaled by powers of two,
    see `fp8_codec.decode_words`: the query has to be multiplied by `factor_before`, and the
    accumulator by `factor_after`.
    """
    ROWS: tl.constexpr = query.shape[0]
    UNIT: tl.constexpr = TILE // KV_HEADS
    row, column, query_row = tl.arange(0, TILE), tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    token = row // KV_HEADS
    # Padding rows are treated as rows of the first head.
    own = tl.where(query_row < KV_HEADS * GROUP, query_row // GROUP, 0)
    matches = own[:, None] == (row % KV_HEADS)[None, :]
    m_i = tl.full((ROWS,), -1e30, tl.float32)
    p_sum = tl.zeros((ROWS, TILE), tl.float32)
    if WORDS:
        acc0 = tl.zeros((ROWS, COLUMNS // 4), tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        scale *= factor_after(query.dtype)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Block ids are loaded a tile ahead, so that loads of keys and values do not wait. A tile is
    # part of one block, or consists of whole blocks.
    if UNIT <= BLOCK_SIZE:
        start = token * STRIDE + row % KV_HEADS * DIM
        block = tl.load(table_ptr + begin // BLOCK_SIZE)
    else:
        start = token % BLOCK_SIZE * STRIDE + row % KV_HEADS * DIM
        block = tl.load(
            table_ptr + (begin + token) // BLOCK_SIZE, mask=begin + token < end, other=0
        )
    offset = start[:, None] + column[None, :]
    if WORDS:
        word = tl.arange(0, COLUMNS // 4)
        word_offset = (start // 4)[:, None] + word[None, :]
        values_ptr = keys_ptr.to(tl.pointer_type(tl.int32)) + BLOCK_SIZE * STRIDE // 4
    for at in tl.range(begin, end, UNIT, num_stages=STAGES):
        inside = token < end - at
        following = at + UNIT
        line = block.to(tl.int64) * (2 * BLOCK_SIZE)
        if UNIT <= BLOCK_SIZE:
            line += at % BLOCK_SIZE
            block = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        else:
            line = line[:, None]
            block = tl.load(
                table_ptr + (following + token) // BLOCK_SIZE,
                mask=following + token < end,
                other=0,
            )
        ptr = keys_ptr + line * STRIDE + offset
        mask = inside[:, None]
        if COLUMNS > DIM:
            mask = mask & (column < DIM)[None, :]
        key = tl.load(ptr, mask=mask, other=0.0)
        if WORDS:
            mask = inside[:, None]
            if COLUMNS > DIM:
                mask = mask & (word < DIM // 4)[None, :]
            value = tl.load(values_ptr + line * (STRIDE // 4) + word_offset, mask=mask, other=0)
            key = decode_scaled(key, query.dtype)
        else:
            value = tl.load(ptr + BLOCK_SIZE * STRIDE, mask=mask, other=0.0)
            if keys_ptr.dtype.element_ty == tl.uint8:
                key, value = decode_e4m3(key, query.dtype), decode_e4m3(value, query.dtype)
        score = tl.dot(query, tl.trans(key))
        score = tl.where(matches & inside[None, :], score, float("-inf"))
        new_m = tl.maximum(m_i, tl.max(score, axis=1) * scale)
        p = tl.exp2(score * scale - new_m[:, None])
        alpha = tl.exp2(m_i - new_m)
        p_sum = p_sum * alpha[:, None] + p
        if WORDS:
            p = (p * factor_before(query.dtype)).to(query.dtype)
            value0, value1, value2, value3 = decode_words(value, query.dtype)
            acc0 = tl.dot(p, value0, acc0 * alpha[:, None])
            acc1 = tl.dot(p, value1, acc1 * alpha[:, None])
            acc2 = tl.dot(p, value2, acc2 * alpha[:, None])
            acc3 = tl.dot(p, value3, acc3 * alpha[:, None])
        else:
            acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])
        m_i = new_m
    if WORDS:
        acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)).reshape(ROWS, COLUMNS)
    return m_i, tl.sum(p_sum, axis=1), acc


@triton.jit
def _finish_item(
    acc_ptr,
    m_l_ptr,
    arrived_ptr,
    out_ptr,
    is_whole,
    partial,
    first,
    last,
    m_i,
    l_i,
    acc,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Writes the result of a whole item, or stores a partial result of a split item.

    CTAs [first, last] share a split item, and the last of them to finish merges their results.
    """
    ROWS: tl.constexpr = acc.shape[0]
    row, column = tl.arange(0, ROWS), tl.arange(0, acc.shape[1])
    offset = row[:, None] * DIM + column[None, :]
    inside, m_ptr = row < HEADS, m_l_ptr + partial * HEADS + row
    mask = inside[:, None] & (column < DIM)[None, :]
    if is_whole:
        result = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, result, mask=mask)
    else:
        # `.cg` bypasses L1, which is not coherent between SMs.
        tl.store(acc_ptr + partial * (HEADS * DIM) + offset, acc, mask=mask, cache_modifier=".cg")
        tl.store(m_ptr, m_i, mask=inside, cache_modifier=".cg")
        tl.store(m_ptr + SCRATCH, l_i, mask=inside, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel") == last - first:
            tl.debug_barrier()
            _merge(acc_ptr, m_l_ptr, out_ptr, first, last, ROWS, HEADS, DIM, acc.shape[1], SCRATCH)
            tl.store(arrived_ptr + first, 0)


@triton.jit
def _cta_of(unit, least, rest):
    """Returns the CTA that has a unit. The first `rest` CTAs have `least + 1` units."""
    longer = rest * (least + 1)
    behind = rest + (unit - longer) // tl.maximum(least, 1)
    return tl.where(unit < longer, unit // (least + 1), behind)


@triton.jit
def _merge(
    acc_ptr,
    m_l_ptr,
    out_ptr,
    first,
    last,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Merges the partial results of an item, in the order of the CTAs."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offset = row[:, None] * DIM + column[None, :]
    inside = row < HEADS
    mask = inside[:, None] & (column < DIM)[None, :]
    m_i = tl.full((ROWS,), -1e30, tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for cta in tl.range(first, last + 1, num_stages=4):
        # The item begins at the end of the first CTA's range, which is its second partial result.
        partial = 2 * cta + (cta == first).to(tl.int32)
        m_ptr = m_l_ptr + partial * HEADS + row
        part_m = tl.load(m_ptr, mask=inside, other=0.0, cache_modifier=".cg")
        part_l = tl.load(m_ptr + SCRATCH, mask=inside, other=1.0, cache_modifier=".cg")
        part_acc = tl.load(
            acc_ptr + partial * (HEADS * DIM) + offset, mask=mask, other=0.0, cache_modifier=".cg"
        )
        m_i, l_i, acc = merge_softmax(m_i, l_i, acc, part_m, part_l, part_acc)
    result = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, result, mask=mask)


@triton.jit
def merge_softmax(  # noqa: ANN201 - Triton blocks have no type
    m_i, l_i, acc, part_m, part_l, part_acc
):
    """Merges two partial softmaxes in base 2, given by row max, row sum and accumulator."""
    new_m = tl.maximum(m_i, part_m)
    alpha, beta = tl.exp2(m_i - new_m), tl.exp2(part_m - new_m)
    return new_m, l_i * alpha + part_l * beta, acc * alpha[:, None] + part_acc * beta[:, None]
