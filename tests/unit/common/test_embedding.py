from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from services.common.embeddings.embedding import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    ITEM_BYTES,
    STORED_HEADER_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    TensorDigest,
    all_finite,
    all_within,
    digest,
    pack_header,
    split_blocks,
    split_evenly,
    unpack_header,
)

KEY = bytes(range(32))
specs = st.builds(
    EmbeddingSpec,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 5),
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 14),
)


@given(
    specs,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES),
)
def test_a_header_says_what_was_packed(spec: EmbeddingSpec, key: bytes, found: bytes) -> None:
    header = pack_header(key, spec, found)
    assert len(header) == STORED_HEADER_BYTES
    assert unpack_header(header, key) == (spec, found)


@given(specs, st.integers(0, STORED_HEADER_BYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_never_reads_the_same(spec: EmbeddingSpec, place: int, bit: int) -> None:
    header = bytearray(pack_header(KEY, spec, b"d" * DIGEST_BYTES))
    header[place] ^= 1 << bit
    try:
        found = unpack_header(bytes(header), KEY)
    except CorruptEmbedding:
        return
    # The reader of the body checks shape and digest; padding carries nothing.
    assert found != (spec, b"d" * DIGEST_BYTES) or 41 <= place < 44


@pytest.mark.parametrize(
    "header", [b"", b"x" * STORED_HEADER_BYTES, bytes(STORED_HEADER_BYTES + 1)]
)
def test_other_bytes_are_corrupt(header: bytes) -> None:
    with pytest.raises(CorruptEmbedding):
        unpack_header(header, KEY)


def test_another_keys_entry_is_corrupt() -> None:
    header = pack_header(KEY, EmbeddingSpec("float32", 1, 2, 3), b"d" * DIGEST_BYTES)
    with pytest.raises(CorruptEmbedding):
        unpack_header(header, bytes(32))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None])
def test_finite_is_torchs_finite(dtype: str, bad: float | None) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    values[:4] = torch.tensor([0.0, -0.0, 1e-7, 60000.0])
    if bad is not None:
        values[777] = bad
    tensor = values.to(getattr(torch, dtype))
    data = tensor.view(torch.uint8).numpy().tobytes()
    assert len(data) == 1000 * ITEM_BYTES[dtype]
    assert all_finite(data, dtype) == bool(torch.isfinite(tensor).all()) == (bad is None)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("bound", [1.0, 8192.0, 2.0**15 / 3, 300.7])
def test_magnitudes_are_bounded_to_the_last_bit(dtype: str, bound: float) -> None:
    kind = getattr(torch, dtype)
    most = torch.tensor(bound, dtype=torch.float64)
    nearest = most.to(kind)
    if nearest.double() > most:
        nearest = torch.nextafter(nearest, torch.zeros((), dtype=kind))
    beyond = torch.nextafter(nearest, torch.full((), float("inf"), dtype=kind))
    for value, is_within in ((nearest, True), (beyond, False)):
        for sign in (1, -1):
            data = torch.stack([torch.zeros((), dtype=kind), sign * value]).view(torch.uint8)
            assert all_within(data.numpy().tobytes(), dtype, bound) is is_within
    for value in (float("nan"), float("inf"), -float("inf")):
        data = torch.tensor([0.0, value], dtype=kind).view(torch.uint8).numpy().tobytes()
        assert not all_within(data, dtype, bound)
    assert all_within(b"", dtype, bound)


def test_a_digest_covers_every_byte() -> None:
    data = bytearray(np.arange(1000, dtype=np.uint8).tobytes())
    before = digest(bytes(data))
    assert digest(memoryview(data)) == before
    data[999] ^= 1
    assert digest(bytes(data)) != before


@pytest.mark.parametrize("size", [2, BLOCK_BYTES, BLOCK_BYTES + 2, 5 * BLOCK_BYTES - 2])
@pytest.mark.parametrize("num_ranges", [1, 2, 3, 8])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_digest_is_the_same_in_whatever_ranges_the_tensor_comes(
    size: int, num_ranges: int, threads: int
) -> None:
    data = np.random.default_rng(size).bytes(size)
    cuts = sorted({0, size, *np.random.default_rng(1).integers(0, size, num_ranges - 1).tolist()})
    ranges = list(pairwise(cuts))
    target = bytearray(size)
    whole = TensorDigest(memoryview(target))

    def arrive(where: tuple[int, int]) -> None:
        target[slice(*where)] = data[slice(*where)]
        whole.add(*where)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(arrive, ranges[::-1]))
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
    expected = xxh3_128_digest(b"".join(map(xxh3_128_digest, blocks)))
    assert whole.finish() == expected == digest(data)


@pytest.mark.parametrize("ranges", [[], [(0, 5)], [(0, 10), (5, 10)]])
def test_a_digest_of_parts_that_are_not_the_whole_is_none(ranges: list[tuple[int, int]]) -> None:
    whole = TensorDigest(memoryview(bytes(10)))
    for each in ranges:
        whole.add(*each)
    with pytest.raises(CorruptEmbedding):
        whole.finish()


def test_ranges_are_cut_at_blocks_and_each_goes_to_one_thread() -> None:
    size = BLOCK_BYTES
    assert split_blocks(0, size) == [(0, size)]
    assert split_blocks(5, 5) == []
    cut = split_blocks(size - 2, 3 * size + 1)
    assert cut == [
        (size - 2, size),
        (size, 2 * size),
        (2 * size, 3 * size),
        (3 * size, 3 * size + 1),
    ]
    for parts in (1, 2, 3, 9):
        shares = split_evenly(cut, parts)
        assert len(shares) == min(parts, len(cut)) and all(shares)
        assert [each for share in shares for each in share] == cut
