"""Models for search through real processes, against the model cards' code in transformers: vectors
of images and texts by openai's client, and scores of pairs.

The tolerance is that of the whole model in float32. An image whose sides are no multiples of a
token is resized, which is part of the comparison.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.cluster import Service, wait_until
from tests.noise import PATIENCE_S
from tests.search_cards import Card
from tests.tiny_tokenizer import added_ids
from triptych.probes import gateway_ready

if TYPE_CHECKING:  # torch and transformers are imported where they are used: see tiny_tower.py
    from tests.parity.oracle import Oracle

# Every night: the contract tests of search and tests/parity/test_pooling.py hold the parts.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.slow]

TOLERANCE = 1e-5
SIZES = {"whole": (96, 64), "another": (64, 64), "odd": (131, 77)}


@dataclass
class Stack:
    """The services of one checkpoint, its card and transformers' model."""

    oracle: "Oracle"
    card: Card
    services: list[Service]

    @property
    def gateway(self) -> Service:
        return self.services[-1]

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    def post(self, path: str, **body: object) -> dict[str, Any]:
        answer = httpx2.post(self.url + path, json={"model": "tiny", **body}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def inputs(self, ids: list[int], *images: bytes) -> dict[str, "Any"]:
        """Inputs of transformers' model for a prompt with one placeholder per image."""
        import torch

        placeholder, inputs = added_ids()["<|image_pad|>"], {}
        if images:
            pixels, grids = self._pixels(images)
            counts = iter((grids.prod(-1) // 4).tolist())
            ids = [t for i in ids for t in ([i] * next(counts) if i == placeholder else [i])]
            inputs = {"pixel_values": pixels, "image_grid_thw": grids}
        tokens = torch.tensor([ids])
        if images:
            inputs["mm_token_type_ids"] = (tokens == placeholder).int()
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **inputs}

    def vector(self, ids: list[int], *images: bytes) -> np.ndarray:
        import torch

        with torch.no_grad():
            found = self.oracle.model.model(**self.inputs(ids, *images))
        hidden = found.last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=0).numpy()

    def _pixels(self, images: tuple[bytes, ...]) -> "tuple[Any, Any]":
        from transformers import Qwen2VLImageProcessor

        vision = self.oracle.spec.vision_part
        processor = Qwen2VLImageProcessor(
            size={
                "shortest_edge": vision.geometry.min_pixels,
                "longest_edge": vision.geometry.max_pixels,
            },
            patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )  # fmt: skip
        opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
        made = processor(images=opened, return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]


def picture(width: int, height: int) -> bytes:
    rng = np.random.default_rng(width)
    # Blocks of colours, as of drawings: noise would make each rounded pixel matter.
    blocks = rng.integers(0, 256, (-(-height // 16), -(-width // 16), 3), np.uint8)
    pixels = blocks.repeat(16, 0).repeat(16, 1)[:height, :width]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def started(oracle: "Oracle", directory: Path, *, images: bool) -> Stack:
    common: dict[str, object] = {"model": oracle.directory, "device": "cpu", "dtype": "float32"}
    decoder = Service("decoder", directory / "decoder.log", **common, kv_cache_bytes=32 << 20)
    services, addresses = [decoder], {"decoder_addresses": decoder.address}
    if images:
        services.append(Service("encoder", directory / "encoder.log", **common))
        addresses["encoder_addresses"] = services[-1].address
    gateway = Service(
        "gateway", directory / "gateway.log", model=oracle.directory, served_model_name="tiny",
        **addresses,
    )  # fmt: skip
    stack = Stack(oracle, Card(oracle.directory), [*services, gateway])
    for service in stack.services:
        service.start()

    def is_ready() -> bool:
        import asyncio

        return asyncio.run(gateway_ready(gateway.host, gateway.port))

    wait_until(is_ready, 120.0, "the gateway is ready")
    return stack


def stopped(stack: Stack) -> None:
    for service in reversed(stack.services):
        service.stop()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Qwen3-VL-Embedding's kind."""
    from tests.tiny_search_models import vision_embedder

    directory = tmp_path_factory.mktemp("embedder")
    stack = started(vision_embedder(directory), directory, images=True)
    yield stack
    stopped(stack)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Qwen3-Reranker's kind."""
    from tests.tiny_search_models import text_reranker

    directory = tmp_path_factory.mktemp("reranker")
    stack = started(text_reranker(directory), directory, images=False)
    yield stack
    stopped(stack)


def test_vectors_of_tokens_and_their_scores(tmp_path: Path) -> None:
    """ColQwen3: texts, images of odd sizes, and both together."""
    from tests.late_interaction import max_sim
    from tests.tiny_search_models import late_interaction

    late = late_interaction(tmp_path)
    stack = started(late.oracle, tmp_path, images=True)
    try:
        data, card = picture(*SIZES["odd"]), stack.card
        texts = ["a red circle", "The quick brown fox. " * 30]
        inputs = [*texts, {"image": data_url(data)}, {"image": data_url(data), "text": "left?"}]
        prompts = [
            *((card.late_text(text), ()) for text in texts),
            (card.late_image(), (data,)),
            (card.late_image("left?"), (data,)),
        ]
        expected = [late.vectors(**stack.inputs(ids, *images)) for ids, images in prompts]
        found = stack.post("/pooling", input=inputs, task="token_embed")["data"]
        for entry, vectors in zip(found, expected, strict=True):
            error = float(np.abs(np.array(entry["data"]) - vectors.numpy()).max())
            print(f"{len(entry['data'])} vectors: {error:.1e}")
            assert error < TOLERANCE
        scores = stack.post("/v1/score", queries=texts[0], documents=inputs[1:])["data"]
        # A sum of some 15 products.
        assert [each["score"] for each in scores] == pytest.approx(
            [max_sim(expected[0], each) for each in expected[1:]], abs=20 * TOLERANCE
        )
    finally:
        stopped(stack)


def test_vectors_of_texts_by_openais_client(embedder: Stack) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", timeout=PATIENCE_S)
    texts = ["a red circle", "", "中文 0123456789", "The quick brown fox. " * 30]
    for dimensions in (None, 12):
        given: dict[str, Any] = {} if dimensions is None else {"dimensions": dimensions}
        answer = client.embeddings.create(model="tiny", input=texts, **given)
        for text, entry in zip(texts, answer.data, strict=True):
            parts = [{"type": "text", "text": text}] if text else []
            expected = embedder.vector(embedder.card.embed_vision(parts))[:dimensions]
            expected /= np.linalg.norm(expected)
            np.testing.assert_allclose(entry.embedding, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", SIZES)
def test_vectors_of_images_and_mixtures(embedder: Stack, name: str) -> None:
    data = picture(*SIZES[name])
    image, text = {"type": "image"}, {"type": "text", "text": "what is left of it?"}
    inputs = [
        {"image": data_url(data)},
        {"image": data_url(data), "text": text["text"]},
        {"image": data_url(data), "text": text["text"], "instruction": "Find pictures"},
    ]
    found = embedder.post("/v1/embeddings", input=inputs)["data"]
    card = embedder.card
    prompts = [
        card.embed_vision([image]),
        card.embed_vision([image, text]),
        card.embed_vision([image, text], "Find pictures"),
    ]
    for entry, ids in zip(found, prompts, strict=True):
        expected = embedder.vector(ids, data)
        error = float(np.abs(np.array(entry["embedding"]) - expected).max())
        print(f"{name}: {error:.1e}")
        assert error < TOLERANCE


def test_a_known_image_costs_no_encode_and_little_prefill(embedder: Stack) -> None:
    body = {"input": [{"image": data_url(picture(128, 96))}]}
    first = embedder.post("/v1/embeddings", **body)
    again = embedder.post("/v1/embeddings", **body)
    vectors = [np.array(answer["data"][0]["embedding"]) for answer in (first, again)]
    np.testing.assert_allclose(vectors[0], vectors[1], rtol=0, atol=TOLERANCE)
    before, after = (
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)
    )
    assert after > before and after >= again["usage"]["prompt_tokens"] - 16


def test_cut_vectors_equal_the_cards(embedder: Stack) -> None:
    text = "The quick brown fox. " * 40
    ids = embedder.card.embed_vision([{"type": "text", "text": text}], None, 64)
    (entry,) = embedder.post("/v1/embeddings", input=text, truncate_prompt_tokens=64)["data"]
    assert entry["truncated"] is True
    np.testing.assert_allclose(entry["embedding"], embedder.vector(ids), rtol=0, atol=TOLERANCE)


def test_scores_of_pairs(reranker: Stack) -> None:
    import torch

    tokenizer = reranker.card.tokenizer
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    query, documents = "which fox?", ["a quick one", "", "a lazy dog", "The brown fox. " * 40]
    expected = []
    for document in documents:
        ids = torch.tensor([reranker.card.rank_text(query, document, "Find foxes")])
        with torch.no_grad():
            logits = reranker.oracle.model(ids).logits[0, -1]
        expected.append(float(torch.softmax(logits[[no, yes]], 0)[1]))
    answer = reranker.post(
        "/v1/score", queries=query, documents=documents, instruction="Find foxes"
    )
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
    ranked = reranker.post(
        "/v2/rerank", query=query, documents=documents, instruction="Find foxes"
    )["results"]
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [found["index"] for found in ranked] == order
