"""Embeddings that clients bring: rounded as torch rounds, refused before they are written."""

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import save

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.store import EmbeddingStore
from services.common.errors import InvalidRequest
from services.common.geometry import Geometry
from services.encoder.front import client_embeddings
from services.encoder.front.client_embeddings import ClientEmbeddings, checked, write_tensor
from services.encoder.front.embeddings import Embeddings, Origin
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.metrics import EncoderMetrics
from tests.noise import PATIENCE_S

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FEATURES, TOKENS, HIDDEN = 3, 5, 8


def store_of() -> EmbeddingStore[Work]:
    metrics = EncoderMetrics()
    return EmbeddingStore(Arena(1 << 20), [], metrics.hits, metrics.misses)


def embeddings_of(store: EmbeddingStore[Work]) -> Embeddings:
    like = EmbeddingSpec("bfloat16", FEATURES, 0, HIDDEN)
    geometry = Geometry(0, 16, 2, 1, 1 << 30)
    return Embeddings(like=like, geometry=geometry, store=store, sources=SourceStore(0))


def spec_of(dtype: str) -> EmbeddingSpec:
    return EmbeddingSpec(dtype, FEATURES, TOKENS, HIDDEN)


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES * HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("given", "wanted"), list(itertools.product(DTYPES, DTYPES)))
def test_features_are_written_one_after_another_in_the_models_dtype(given: str, wanted: str):
    tensor, spec = rows().to(DTYPES[given]), spec_of(wanted)
    file, into = save({"e": tensor}), bytearray(spec.size_bytes)
    write_tensor(file, checked(file, spec), spec, memoryview(into))
    found = torch.frombuffer(into, dtype=DTYPES[wanted]).reshape(spec.shape)
    expected = tensor.reshape(TOKENS, FEATURES, HIDDEN).movedim(1, 0).to(DTYPES[wanted])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_all_bits_round_to_bfloat16_as_torch_rounds(seed: int):
    bits = torch.randint(-(2**31), 2**31, (TOKENS, FEATURES * HIDDEN), dtype=torch.int64,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    tensor = bits.to(torch.int32).view(torch.float32).nan_to_num(1.0, 1.0, 1.0).clamp(-1e16, 1e16)
    spec, file = spec_of("bfloat16"), save({"e": tensor})
    into = bytearray(spec.size_bytes)
    write_tensor(file, checked(file, spec), spec, memoryview(into))
    found = torch.frombuffer(into, dtype=torch.bfloat16).reshape(spec.shape)
    assert torch.equal(found, tensor.bfloat16().reshape(TOKENS, FEATURES, HIDDEN).movedim(1, 0))


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("given", DTYPES)
def test_values_that_are_not_finite_are_refused(given: str, wanted: str, value: float):
    tensor, spec = rows(), spec_of(wanted)
    tensor[2, 9] = value
    file = save({"e": tensor.to(DTYPES[given])})
    with pytest.raises(InvalidRequest, match="NaN or infinite"):
        write_tensor(file, checked(file, spec), spec, memoryview(bytearray(spec.size_bytes)))


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("feature", range(FEATURES))
@pytest.mark.parametrize(
    ("given", "value"),
    [("float32", 3.4e38), ("float32", 3e38), ("float32", 1e20), ("float32", 1e17),
     ("bfloat16", 3e38), ("bfloat16", 1e17), ("float16", 65504.0), ("float16", 12000.0),
     ("float16", 10000.0), ("float32", 10000.0), ("bfloat16", 9000.0)],
)  # fmt: skip
def test_values_at_which_a_model_overflows_are_refused(
    given: str, value: float, feature: int, sign: float, wanted: str
):
    """Three features of a token add up to 2^15 in float16, and to 2^56 in the other dtypes."""
    tensor, spec = rows(), spec_of(wanted)
    tensor[4, feature * HIDDEN + 3] = sign * value
    file, into = save({"e": tensor.to(DTYPES[given])}), bytearray(spec.size_bytes)
    if value * FEATURES <= (2.0**15 if wanted == "float16" else 2.0**56):
        write_tensor(file, checked(file, spec), spec, memoryview(into))
        return
    with pytest.raises(InvalidRequest, match=f"magnitude: a model that computes in {wanted}"):
        write_tensor(file, checked(file, spec), spec, memoryview(into))


@pytest.mark.parametrize(
    "shape",
    [(TOKENS + 1, FEATURES * HIDDEN), (TOKENS, HIDDEN), (FEATURES * HIDDEN, TOKENS), (TOKENS,),
     (FEATURES, TOKENS, HIDDEN)],
)  # fmt: skip
def test_another_shape_is_refused_by_both_shapes(shape: tuple[int, ...]):
    with pytest.raises(InvalidRequest, match=r"\[5, 24\]"):
        checked(save({"e": torch.ones(shape)}), spec_of("float32"))


async def test_an_embedding_is_there_once_and_a_bad_one_leaves_nothing():
    store = store_of()
    embeddings = embeddings_of(store)
    clients, spec = ClientEmbeddings(embeddings), spec_of("bfloat16")
    file, key = save({"e": rows()}), b"k" * 32
    bad = save({"e": rows().fill_(float("nan"))})
    reader = asyncio.create_task(digest_read(embeddings, key))
    try:
        with pytest.raises(InvalidRequest):
            await clients.store(key, bad, spec)
        assert store.arena.get(key) is None and not store.arena.used_bytes
        assert not reader.done()
        assert (await clients.store(key, file, spec)).origin is Origin.COMPUTED
        assert (await clients.store(key, file, spec)).origin is Origin.MEMORY
        entry = store.arena.get(key)
        assert entry is not None
        found = torch.frombuffer(bytearray(store.arena.view(entry)), dtype=torch.bfloat16)
        expected = rows().bfloat16().reshape(TOKENS, FEATURES, HIDDEN).movedim(1, 0)
        assert torch.equal(found.reshape(spec.shape), expected)
        assert await reader == digest(store.arena.view(entry))
        assert entry.references == 0
    finally:
        await store.unmap()


async def digest_read(embeddings: Embeddings, key: bytes) -> bytes:
    async with embeddings.reading(key, PATIENCE_S) as reading:
        ranges = [each async for each in reading.ranges()]
        assert ranges == [(0, reading.entry.spec.size_bytes)]
        return await embeddings.store.digests.of(reading.entry)


async def test_memory_is_not_given_away_while_a_thread_writes_there(
    monkeypatch: pytest.MonkeyPatch,
):
    """A caller may leave at any time."""
    store, spec = store_of(), spec_of("bfloat16")
    writing, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_S)
        write_tensor(*arguments)

    monkeypatch.setattr(client_embeddings, "write_tensor", slow)
    clients = ClientEmbeddings(embeddings_of(store))
    caller = asyncio.create_task(clients.store(b"k" * 32, save({"e": rows()}), spec))
    try:
        assert await asyncio.to_thread(writing.wait, PATIENCE_S)
        caller.cancel()
        await asyncio.wait({caller}, timeout=0.05)
        assert store.arena.used_bytes
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert store.arena.get(b"k" * 32) is None and not store.arena.used_bytes
    finally:
        go_on.set()
        await store.unmap()
