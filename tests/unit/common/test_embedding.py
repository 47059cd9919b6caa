import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.embedding import (
    BLOCK_BYTES,
    ITEM_BYTES,
    STORED_HEADER_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    all_finite,
    block_digests,
    digest,
    join_digests,
    pack_header,
    split_blocks,
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


@given(specs, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_header_says_what_was_packed(spec: EmbeddingSpec, key: bytes, found: bytes) -> None:
    header = pack_header(key, spec, found)
    assert len(header) == STORED_HEADER_BYTES
    assert unpack_header(header, key) == (spec, found)


@given(specs, st.integers(0, STORED_HEADER_BYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_never_reads_the_same(spec: EmbeddingSpec, place: int, bit: int) -> None:
    header = bytearray(pack_header(KEY, spec, b"d" * 32))
    header[place] ^= 1 << bit
    try:
        found = unpack_header(bytes(header), KEY)
    except CorruptEmbedding:
        return
    # Shape and digest are checked by who reads the body; padding carries nothing.
    assert found != (spec, b"d" * 32) or 41 <= place < 44


@pytest.mark.parametrize(
    "header", [b"", b"x" * STORED_HEADER_BYTES, bytes(STORED_HEADER_BYTES + 1)]
)
def test_other_bytes_are_corrupt(header: bytes) -> None:
    with pytest.raises(CorruptEmbedding):
        unpack_header(header, KEY)


def test_another_keys_entry_is_corrupt() -> None:
    header = pack_header(KEY, EmbeddingSpec("float32", 1, 2, 3), b"d" * 32)
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


def test_a_digest_covers_every_byte() -> None:
    data = bytearray(np.arange(1000, dtype=np.uint8).tobytes())
    before = digest(bytes(data))
    assert digest(memoryview(data)) == before
    data[999] ^= 1
    assert digest(bytes(data)) != before


@pytest.mark.parametrize("size", [2, BLOCK_BYTES, BLOCK_BYTES + 2, 5 * BLOCK_BYTES - 2])
@pytest.mark.parametrize("max_parts", [1, 2, 3, 8])
def test_a_digest_can_be_made_of_parts(size: int, max_parts: int) -> None:
    data = memoryview(np.random.default_rng(size).bytes(size))
    parts = split_blocks(data, max_parts)
    assert b"".join(parts) == bytes(data)
    assert 1 <= len(parts) <= max_parts and all(len(part) for part in parts)
    assert join_digests(d for part in parts for d in block_digests(part)) == digest(data)
