"""Attention of many decodes as one Triton kernel that divides their contexts evenly.

An item is one sequence with eight key heads, a unit is its tokens that a tile holds. Units are in
order of sequence, heads and tokens, and each program takes an equal run of them, which it finds
from the lengths by itself: nothing is planned on the host, and a CUDA graph serves any lengths. A
run covers the end of one item, some whole ones and the beginning of another. Whole items are
written straight out; the parts of one that was cut lie in float32 until whoever comes last merges
them, in the order of the programs.

A tile is 64 rows of keys, each of one token and one head, so that a block is read as one run of
memory. All query heads of the item are multiplied with all rows, and what is of another key head is
masked: tensor cores want 16 rows of queries anyway, many more than share a key head.

The plain twin is `services.decoder.attention.sdpa`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.overlap import overlaps

# With fewer sequences flashinfer's kernel is faster: on an H200 whole steps by 3 % for 32 of 1,024
# tokens; for 40 the two are equal.
_LEAST_SEQUENCES = 48
_HEADS = 8  # of keys, per item
_MAX_GROUP = 2  # with more query heads per key head it was not measured
_TILE, _WARPS = 64, 4
# Programs per processor, and tiles on their way in each. Measured on an H200: by itself the kernel
# is faster with one, if that has so much memory that no processor is given two; beside prompts with
# one that leaves them memory, unless there are so many decodes that prompts end before them.
_ALONE, _BESIDE, _MANY_BESIDE = (1, 5), (1, 3), (2, 3)
_FEW = 64  # decodes
_AHEAD = 1  # tiles that are fetched into the second cache while the kernel before ends
_LOG2_E = 1.4426950408889634


class ManyAttention:
    """The kernel, and the memory where its programs meet: for one device, one step at a time.

    Args:
        device: of the model.
        num_heads: of the query.
        num_kv_heads: of keys and values.
        head_dim: of all.
        processors: that share the work; None: those of the device.
    """

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        processors: int | None = None,
    ) -> None:
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._group = num_heads // num_kv_heads
        if processors is None:
            processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self._processors = processors
        programs = processors * max(_ALONE[0], _BESIDE[0], _MANY_BESIDE[0])
        # A program has two parts of cut items at most: at the begin and at the end of its run.
        rows = 2 * programs * _HEADS * self._group
        self._sums = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        self._scales = torch.empty((2, rows), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(programs, dtype=torch.int32, device=device)

    @staticmethod
    def fits(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Whether it serves a model of this shape, on a device that `overlaps`."""
        return (
            num_kv_heads % _HEADS == 0
            and num_heads // num_kv_heads <= _MAX_GROUP
            and head_dim in (64, 128)
            and block_size % (_TILE // _HEADS) == 0
        )

    def gains(self, num_sequences: int) -> bool:
        """Whether it is the faster one for so many decodes."""
        return num_sequences >= _LEAST_SEQUENCES

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        accompanied: bool = False,
    ) -> None:
        """Attention of one token of each of S sequences, whose key and value are in the cache.

        Args:
            query: `[S, num_heads, head_dim]`, contiguous.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, contiguous.
            block_ids: the sequences' blocks one after the other, int32, perhaps more behind them.
            seq_lens: of the contexts, int32, perhaps more behind them; after the last one that is
                positive, those without a context, whose rows of `out` stay as they are.
            out: where the result goes, as `query`.
            accompanied: the next kernel on the stream reads what this one reads, runs beside it and
                waits for it at its end.
        """
        assert query.is_contiguous() and kv_cache.is_contiguous() and out.is_contiguous()
        num_sequences = len(query)
        beside = _BESIDE if num_sequences <= _FEW else _MANY_BESIDE
        share, stages = beside if accompanied else _ALONE
        programs = self._processors * share
        _many_attention_kernel[(programs,)](
            query, kv_cache, block_ids, seq_lens, self._sums, self._scales, self._arrived, out,
            num_sequences, self._head_dim**-0.5 * _LOG2_E,
            ITEMS=self._num_kv_heads // _HEADS, HEADS=_HEADS, GROUP=self._group,
            DIM=self._head_dim, BLOCK_SIZE=kv_cache.shape[2], TILE=_TILE, STAGES=stages,
            AHEAD=_AHEAD, SEQUENCES=max(triton.next_power_of_2(num_sequences), 32 * _WARPS),
            PROGRAMS=programs, OVERLAP=overlaps(), ACCOMPANIED=accompanied, num_warps=_WARPS,
            launch_pdl=overlaps(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences"])
def _many_attention_kernel(
    query_ptr, cache_ptr, block_ids_ptr, seq_lens_ptr, sums_ptr, scales_ptr, arrived_ptr, out_ptr,
    num_sequences, scale,
    ITEMS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    SEQUENCES: tl.constexpr, PROGRAMS: tl.constexpr, OVERLAP: tl.constexpr,
    ACCOMPANIED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEADS * GROUP  # of queries
    UNIT: tl.constexpr = TILE // HEADS  # tokens
    program = tl.program_id(0)
    if OVERLAP and not ACCOMPANIED:
        gdc_launch_dependents()

    unit, stop, least, rest, sequence, origin, blocks = _run_of(
        program, seq_lens_ptr, num_sequences, ITEMS, UNIT, BLOCK_SIZE, SEQUENCES, PROGRAMS
    )
    table_ptr = block_ids_ptr + blocks
    length = tl.load(seq_lens_ptr + tl.minimum(sequence, num_sequences - 1))
    if OVERLAP:
        if unit < stop:
            _prefetch(
                cache_ptr, table_ptr, unit - origin, length,
                ITEMS, UNIT, HEADS * DIM, BLOCK_SIZE, AHEAD,
            )  # fmt: skip
        gdc_wait()
        if ACCOMPANIED:  # not before what it reads is there
            gdc_launch_dependents()

    row, column = tl.arange(0, 16), tl.arange(0, DIM)
    place = row[:, None] * DIM + column[None, :]
    while unit < stop:
        count = (length + UNIT - 1) // UNIT
        item = (unit - origin) // count
        first = unit - origin - item * count
        taken = tl.minimum(count - first, stop - unit)
        number = sequence * ITEMS + item
        # The next one's length, early.
        ends = (item == ITEMS - 1) & (first + taken == count)
        sequence += ends.to(tl.int32)
        next_length = tl.load(seq_lens_ptr + tl.minimum(sequence, num_sequences - 1))

        inside = (row < ROWS)[:, None]
        query = tl.load(query_ptr + number * (ROWS * DIM) + place, mask=inside, other=0.0)
        top, weight, sums = _attend(
            query, cache_ptr + item * (HEADS * DIM), table_ptr, first * UNIT,
            tl.minimum((first + taken) * UNIT, length), scale,
            ITEMS * HEADS * DIM, HEADS, GROUP, DIM, BLOCK_SIZE, TILE, STAGES,
        )  # fmt: skip
        begin = unit - first
        _finish(
            sums_ptr, scales_ptr, arrived_ptr, out_ptr + number * (ROWS * DIM), taken == count,
            2 * program + (first == 0).to(tl.int32), _program_of(begin, least, rest),
            _program_of(begin + count - 1, least, rest), top, weight, sums, ROWS, DIM, PROGRAMS,
        )  # fmt: skip
        if ends:
            origin += count * ITEMS
            table_ptr += (length + BLOCK_SIZE - 1) // BLOCK_SIZE
        length = next_length
        unit += taken


@triton.jit
def _run_of(
    program, seq_lens_ptr, num_sequences,
    ITEMS: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEQUENCES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A program's run: its first unit and the one behind its last; what each program has at least,
    and how many have one more; the first unit's sequence, and the units and blocks before that.
    """
    sequences = tl.arange(0, SEQUENCES)
    lengths = tl.load(seq_lens_ptr + sequences, mask=sequences < num_sequences, other=0)
    units = (lengths + UNIT - 1) // UNIT * ITEMS
    total = tl.sum(units)
    least, rest = total // PROGRAMS, total % PROGRAMS
    unit = program * least + tl.minimum(program, rest)
    stop = unit + least + (program < rest).to(tl.int32)
    over = ((tl.cumsum(units) <= unit) & (sequences < num_sequences)).to(tl.int32)
    blocks = tl.sum(over * ((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE))
    return unit, stop, least, rest, tl.sum(over), tl.sum(over * units), blocks


@triton.jit
def _prefetch(
    cache_ptr, table_ptr, within, length,
    ITEMS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Asks for the first tiles of a run. The new token's key and value may be among them: they are
    written to the second cache, too.
    """
    count = (length + UNIT - 1) // UNIT
    item = within // count
    token = (within - item * count) * UNIT + tl.arange(0, AHEAD * UNIT)
    token = tl.minimum(token, length - 1)
    block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
    row = block * (2 * BLOCK_SIZE) + token % BLOCK_SIZE
    key_ptr = cache_ptr + (row * ITEMS + item) * WIDTH
    width: tl.constexpr = WIDTH * cache_ptr.dtype.element_ty.primitive_bitwidth // 8
    num_bytes = tl.full((AHEAD * UNIT,), width, tl.int32)
    for part in tl.static_range(2):
        tl.inline_asm_elementwise(
            "{ mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2; }", "=r,l,r",
            [key_ptr + part * (BLOCK_SIZE * ITEMS * WIDTH), num_bytes],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _attend(
    query, keys_ptr, table_ptr, begin, end, scale,
    TOKEN: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax, in base 2, of tokens [begin, end), where begin is a unit's: largest
    scores, sums of weights, weighted sums of values.
    """
    UNIT: tl.constexpr = TILE // HEADS
    row, column, query_row = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, 16)
    token = row // HEADS
    offset = (token * TOKEN + row % HEADS * DIM)[:, None] + column[None, :]
    # Padding counts as the first head's.
    own = tl.where(query_row < HEADS * GROUP, query_row // GROUP, 0)
    matches = own[:, None] == (row % HEADS)[None, :]
    top = tl.full((16,), -1e30, tl.float32)
    weights = tl.zeros((16, TILE), tl.float32)
    sums = tl.zeros((16, DIM), tl.float32)
    # Asked for a tile early, so that keys and values need not wait for it.
    block = tl.load(table_ptr + begin // BLOCK_SIZE)
    for at in tl.range(begin, end, UNIT, num_stages=STAGES):
        inside = token < end - at
        line = block.to(tl.int64) * (2 * BLOCK_SIZE * TOKEN) + at % BLOCK_SIZE * TOKEN
        place = keys_ptr + line + offset
        key = tl.load(place, mask=inside[:, None], other=0.0)
        value = tl.load(place + BLOCK_SIZE * TOKEN, mask=inside[:, None], other=0.0)
        block = tl.load(table_ptr + (at + UNIT) // BLOCK_SIZE, mask=at + UNIT < end, other=0)
        score = tl.dot(query, tl.trans(key))
        score = tl.where(matches & inside[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
        weight = tl.exp2(score * scale - new_top[:, None])
        old = tl.exp2(top - new_top)
        weights = weights * old[:, None] + weight
        sums = tl.dot(weight.to(value.dtype), value, sums * old[:, None])
        top = new_top
    return top, tl.sum(weights, axis=1), sums


@triton.jit
def _finish(
    sums_ptr, scales_ptr, arrived_ptr, out_ptr, is_whole, part, first, last, top, weight, sums,
    ROWS: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Writes an item out, or leaves a part of it that programs [first, last] share; the last of
    them to come merges.
    """
    row = tl.arange(0, 16)
    place = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside, scales = row < ROWS, scales_ptr + part * ROWS + row
    if is_whole:
        result = (sums / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, result, mask=inside[:, None])
    else:
        # Past the first cache, which other processors do not see.
        sums_place = sums_ptr + part * (ROWS * DIM) + place
        tl.store(sums_place, sums, mask=inside[:, None], cache_modifier=".cg")
        tl.store(scales, top, mask=inside, cache_modifier=".cg")
        tl.store(scales + 2 * PROGRAMS * ROWS, weight, mask=inside, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel") == last - first:
            tl.debug_barrier()
            _merge(sums_ptr, scales_ptr, out_ptr, first, last, ROWS, DIM, PROGRAMS)
            tl.store(arrived_ptr + first, 0)


@triton.jit
def _program_of(unit, least, rest):
    """Which program has a unit: the first `rest` programs have one more than `least`."""
    longer = rest * (least + 1)
    behind = rest + (unit - longer) // tl.maximum(least, 1)
    return tl.where(unit < longer, unit // (least + 1), behind)


@triton.jit
def _merge(
    sums_ptr, scales_ptr, out_ptr, first, last,
    ROWS: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The parts of one item, in the order of the programs."""
    row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    place = row[:, None] * DIM + column[None, :]
    top = tl.full((ROWS,), -1e30, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for program in tl.range(first, last + 1, num_stages=4):
        # The item begins in the first program's second part.
        part = 2 * program + (program == first).to(tl.int32)
        scales = scales_ptr + part * ROWS + row
        part_top = tl.load(scales, cache_modifier=".cg")
        part_weight = tl.load(scales + 2 * PROGRAMS * ROWS, cache_modifier=".cg")
        part_sums = tl.load(sums_ptr + part * (ROWS * DIM) + place, cache_modifier=".cg")
        top, weight, sums = joined(top, weight, sums, part_top, part_weight, part_sums)
    result = (sums / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result)


@triton.jit
def joined(  # noqa: ANN201 - three of the inputs' kind
    top, weight, sums, part_top, part_weight, part_sums
):
    """Two running softmaxes, in base 2, as one: largest scores, sums of weights, weighted sums of
    values.
    """
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    return new_top, weight * old + part_weight * new, sums * old[:, None] + part_sums * new[:, None]
