"""Vectors of tokens and MaxSim over HTTP, against fakes of the other services.

The fake decoder's vectors are a function of the prompt's token ids, so that each answer shows which
prompt it belongs to.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from services.common.errors import EngineLost
from tests.fakes import raising
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.search_cards import Card
from tests.search_checkpoints import late_config
from tests.tiny_tokenizer import added_ids, write_model_directory

WIDTH = 24
IMAGE = image_url(64, 64)


def vectors_of(ids: np.ndarray) -> np.ndarray:
    """Unit vectors `[T, n]` that depend on the tokens up to each one."""
    table = np.random.default_rng(5).normal(size=(1024, WIDTH))
    found = table[np.asarray(ids) % 1024].cumsum(0)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def max_sim(query: list[int], document: list[int]) -> float:
    """`score_multi_vector` of the card."""
    left, right = vectors_of(np.array(query)), vectors_of(np.array(document))
    return float(np.einsum("nd,sd->ns", left, right).max(1).sum())


@pytest.fixture(scope="module")
def _late(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    base = write_model_directory(tmp_path_factory.mktemp("base") / "tiny")
    config = late_config(json.loads((base / "config.json").read_text()), WIDTH)
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("late"), log_level="ERROR", num_decoders=2,
        files={"config.json": json.dumps(config)}, decoder_task="token_embed",
        request_timeout_s=20,
    )  # fmt: skip
    for decoder in stack.decoders:
        decoder.vector_of = vectors_of
    yield stack
    stack.close()


@pytest.fixture
def late(_late) -> Iterator[GatewayStack]:
    """A gateway of ColQwen3's kind with two decoders, reset."""
    yield from _late.lend()


def post(stack: GatewayStack, path: str, **fields: object) -> httpx2.Response:
    with stack.client() as client:
        return client.post(path, json={"model": MODEL, **fields})


def answer(stack: GatewayStack, path: str, **fields: object) -> dict[str, Any]:
    found = post(stack, path, **fields)
    assert found.status_code == 200, found.text
    return found.json()


def placed(ids: list[int], num_tokens: int = 64) -> list[int]:
    """Ids with the image's placeholder repeated for an image of 64 x 64 pixels, which is enlarged
    to the least pixels of the processor's file, 65,536.
    """
    image = added_ids()["<|image_pad|>"]
    return [token for i in ids for token in ([i] * num_tokens if i == image else [i])]


def test_each_token_has_a_vector(late: GatewayStack) -> None:
    card = Card(late.model_directory)
    inputs = [" a square ", {"image": IMAGE}, {"image": IMAGE, "text": "left? "}, IMAGE, ""]
    found = answer(late, "/pooling", input=inputs, task="token_embed")
    image = placed(card.late_image())
    prompts = [
        card.late_text("a square"), image, placed(card.late_image("left?")), image,
        card.late_text(""),
    ]  # fmt: skip
    assert [each["index"] for each in found["data"]] == list(range(5))
    for each, ids in zip(found["data"], prompts, strict=True):
        assert each["object"] == "pooling" and "truncated" not in each
        np.testing.assert_allclose(each["data"], vectors_of(np.array(ids)), rtol=0, atol=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_vector_that_is_not_finite_is_no_answer(
    late: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(ids: np.ndarray) -> np.ndarray:
        found = vectors_of(ids)
        found[1] = np.nan
        return found

    for decoder in late.decoders:
        monkeypatch.setattr(decoder, "vector_of", spoiled)
    for path, fields in (
        ("/pooling", {"input": "a square", "task": "token_embed"}),
        ("/v1/score", {"queries": "which?", "documents": ["a fox"]}),
    ):
        found = post(late, path, **fields)
        assert found.status_code == 500 and "not finite" in found.text


def test_messages_and_ids_are_inputs(late: GatewayStack) -> None:
    card = Card(late.model_directory)
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "x"}]
    messages = [{"role": "user", "content": parts}]
    (found,) = answer(late, "/pooling", messages=messages)["data"]
    expected = vectors_of(np.array(placed(card.late_image("x"))))
    np.testing.assert_allclose(found["data"], expected, rtol=0, atol=1e-6)
    ids = card.late_text("a square")
    (found,) = answer(late, "/pooling", input=ids, encoding_format="base64")["data"]
    vectors = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(-1, WIDTH)
    np.testing.assert_array_equal(vectors, vectors_of(np.array(ids)))


def test_a_cut_input_keeps_its_end(late: GatewayStack) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 9
    ids = Card(late.model_directory).late_text(long, 30)
    (found,) = answer(late, "/pooling", input=long, truncate_prompt_tokens=30)["data"]
    assert found["truncated"] is True
    np.testing.assert_allclose(found["data"], vectors_of(np.array(ids)), rtol=0, atol=1e-6)


def test_scores_are_sums_of_the_best_products(late: GatewayStack) -> None:
    card = Card(late.model_directory)
    long = "The quick brown fox jumps over the lazy dog. " * 40
    documents: list[Any] = ["a fox", {"image": IMAGE}, long, "a fox"]
    prompts = [card.late_text("a fox"), placed(card.late_image()), card.late_text(long)]
    query = card.late_text("which fox?")
    expected = [max_sim(query, prompt) for prompt in (*prompts, prompts[0])]
    found = answer(late, "/v1/score", queries="which fox?", documents=documents)
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-4)
    # The query's vectors are computed once.
    assert sum(len(decoder.submits) for decoder in late.decoders) == 5
    ranked = answer(late, "/v2/rerank", query="which fox?", documents=documents, top_n=2)
    order = sorted(range(4), key=lambda index: -expected[index])[:2]
    assert [each["index"] for each in ranked["results"]] == order
    # A long query is multiplied piece by piece.
    found = answer(late, "/v1/score", queries=[long, "a"], documents=["a fox", long])
    pairs = [(card.late_text(long), prompts[0]), (card.late_text("a"), prompts[2])]
    assert [each["score"] for each in found["data"]] == pytest.approx(
        [max_sim(*pair) for pair in pairs], abs=1e-3
    )


def test_documents_are_cut_and_queries_are_not(late: GatewayStack) -> None:
    card = Card(late.model_directory)
    long = "The quick brown fox jumps over the lazy dog. " * 4
    tokens = card.tokenizer.encode(long.strip(), add_special_tokens=False)
    cut = [*tokens[:20], *card.late_text("")]
    found = answer(
        late, "/v1/score", queries=long, documents=[long.strip(), "a"], max_tokens_per_doc=20
    )["data"]
    expected = [max_sim(card.late_text(long), each) for each in (cut, card.late_text("a"))]
    assert [each["score"] for each in found] == pytest.approx(expected, abs=1e-4)
    assert [each.get("truncated") for each in found] == [True, None]


def test_blanks_around_a_document_count_as_none_of_its_tokens(late: GatewayStack) -> None:
    card, blanks = Card(late.model_directory), "\n\t " * 100
    documents = [blanks + "a fox" + blanks, {"image": IMAGE, "text": "left?" + blanks}]
    found = answer(late, "/v1/score", queries="q", documents=documents, max_tokens_per_doc=20)
    prompts = [card.late_text("a fox"), placed(card.late_image("left?"))]
    expected = [max_sim(card.late_text("q"), each) for each in prompts]
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-4)
    assert not any("truncated" in each for each in found["data"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/pooling", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/pooling", {"input": "a", "instruction": "Find"}, "instruction"),
        ("/pooling", {"input": "a", "task": "embed"}, "task"),
        ("/pooling", {"input": ["a", {"video": "data:video/mp4;base64,AA"}]}, "input[1].video"),
        ("/pooling", {"input": [{"content": [
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "image_url", "image_url": {"url": IMAGE}}]}]}, "input[0].content"),
        ("/v1/score", {"queries": "a", "documents": "b", "instruction": "Find"}, "instruction"),
        ("/v1/rerank", {"query": {"text": "a", "instruction": "b"}, "documents": ["c"]},
         "instruction"),
        ("/v1/embeddings", {"input": "a"}, "model"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_its_field(
    late: GatewayStack, path: str, fields: dict[str, Any], param: str
) -> None:
    found = post(late, path, **fields)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param
    assert not any(decoder.submits for decoder in late.decoders)


def test_a_chat_model_has_no_vectors_of_tokens(stack: GatewayStack) -> None:
    found = post(stack, "/pooling", input="a")
    assert found.status_code == 400 and "POST /v1/chat/completions" in found.text


def test_vectors_that_a_lost_decoder_has_sent_come_again(late: GatewayStack) -> None:
    """Each decoder sends the vectors of the tokens before the last first."""
    ids = Card(late.model_directory).late_text("a square")
    for decoder in late.decoders:
        decoder.before_tokens = raising(EngineLost("gone"))
    assert post(late, "/pooling", input="a square").status_code == 503
    assert all(len(decoder.submits) == 1 for decoder in late.decoders)
    late.reset()
    late.decoders[0].before_tokens = raising(EngineLost("gone"))
    for _ in range(4):  # whichever decoder is chosen first
        (found,) = answer(late, "/pooling", input="a square")["data"]
        np.testing.assert_allclose(found["data"], vectors_of(np.array(ids)), rtol=0, atol=1e-6)
