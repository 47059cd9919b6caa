"""Vectors, reranking and scores over HTTP, against fakes of the other services.

The fake decoder's result of a prompt is a function of its token ids, so that each answer shows
which prompt it belongs to.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from services.common.errors import EngineLost, Overloaded
from tests.fakes import forever, raising
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S
from tests.search_cards import Card
from tests.search_checkpoints import answering_tokenizer, appending_tokenizer
from tests.tiny_tokenizer import added_ids

WIDTH = 32
IMAGE = image_url(64, 64)


def vector_of(ids: np.ndarray) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)


def score_of(ids: np.ndarray) -> np.ndarray:
    return vector_of(ids)[:1] * 3


def unit(ids: list[int], dimensions: int = WIDTH) -> np.ndarray:
    vector = vector_of(np.array(ids, np.int32))[:dimensions]
    return vector / np.linalg.norm(vector)


def probability(ids: list[int]) -> float:
    return 1 / (1 + math.exp(-float(score_of(np.array(ids, np.int32))[0])))


def start(loop_thread, directory, task: str, **options: Any) -> GatewayStack:
    tokenizer = appending_tokenizer() if task == "embed" else answering_tokenizer()
    given = {"log_level": "ERROR", "files": {"tokenizer.json": tokenizer}, **options}
    stack = GatewayStack(loop_thread, directory, task=task, **given)
    for decoder in stack.decoders:
        decoder.vector_of = vector_of if task == "embed" else score_of
    return stack


@pytest.fixture(scope="module")
def _embedder(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = start(loop_thread, tmp_path_factory.mktemp("embedder"), "embed")
    yield stack
    stack.close()


@pytest.fixture
def embedder(_embedder) -> Iterator[GatewayStack]:
    """A gateway of Qwen3-VL-Embedding's kind, reset."""
    yield from _embedder.lend()


@pytest.fixture(scope="module")
def _text(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    directory = tmp_path_factory.mktemp("text")
    stack = start(
        loop_thread, directory, "embed", text_only=True, num_encoders=0, num_decoders=2,
        request_timeout_s=PATIENCE_S,
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def text(_text) -> Iterator[GatewayStack]:
    """A gateway of Qwen3-Embedding's kind with two decoders, reset."""
    yield from _text.lend()


@pytest.fixture(scope="module")
def _reranker(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = start(loop_thread, tmp_path_factory.mktemp("reranker"), "rank")
    yield stack
    stack.close()


@pytest.fixture
def reranker(_reranker) -> Iterator[GatewayStack]:
    """A gateway of Qwen3-VL-Reranker's kind, reset."""
    yield from _reranker.lend()


def post(stack: GatewayStack, path: str, **fields: object) -> httpx2.Response:
    with stack.client() as client:
        return client.post(path, json={"model": MODEL, **fields})


def vectors(stack: GatewayStack, **fields: object) -> list[np.ndarray]:
    answer = post(stack, "/v1/embeddings", **fields)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [np.array(entry["embedding"]) for entry in data]


def refusal(stack: GatewayStack, path: str, **fields: object) -> dict[str, Any]:
    answer = post(stack, path, **fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def placed(ids: list[int], num_tokens: int = 4) -> list[int]:
    """Ids with each image's placeholder repeated for an image of 64 x 64 pixels."""
    image = added_ids()["<|image_pad|>"]
    return [token for i in ids for token in ([i] * num_tokens if i == image else [i])]


def test_texts_are_vectors_in_their_order(text: GatewayStack) -> None:
    card = Card(text.model_directory)
    inputs = [f"text number {n}" for n in range(40)]
    answer = post(text, "/v1/embeddings", input=inputs).json()
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    prompts = [card.embed_text(each) for each in inputs]
    for entry, ids in zip(answer["data"], prompts, strict=True):
        np.testing.assert_allclose(entry["embedding"], unit(ids), rtol=0, atol=1e-6)
        assert entry["object"] == "embedding" and "truncated" not in entry
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, prompts))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7 * len(inputs)


def test_ids_and_texts_may_be_one_or_many(text: GatewayStack) -> None:
    card = Card(text.model_directory)
    ids = card.embed_text("a square")
    assert len(vectors(text, input="a square")) == 1
    for given in ("a square", ["a square"], ids, [ids], {"text": "a square"}):
        np.testing.assert_allclose(vectors(text, input=given)[0], unit(ids), atol=1e-6)
    both = vectors(text, input=[ids, "a square"])
    np.testing.assert_array_equal(both[0], both[1])


def test_a_sequence_is_one_step_without_sampling(text: GatewayStack) -> None:
    vectors(text, input="a square", priority=3)
    (submit,) = (submit for decoder in text.decoders for submit in decoder.submits)
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (1, 0.0)
    assert not submit.sampling.stop_token_ids and not submit.HasField("grammar")
    assert submit.priority == 3


def test_the_instruction_is_the_models(text: GatewayStack) -> None:
    card = Card(text.model_directory)
    (found,) = vectors(text, input="shapes?", instruction="Find shapes")
    np.testing.assert_allclose(found, unit(card.embed_text("shapes?", "Find shapes")), atol=1e-6)
    own, other = vectors(
        text, input=[{"text": "a", "instruction": "Own"}, "a"], instruction="Find shapes"
    )
    np.testing.assert_allclose(own, unit(card.embed_text("a", "Own")), atol=1e-6)
    np.testing.assert_allclose(other, unit(card.embed_text("a", "Find shapes")), atol=1e-6)


def test_dimensions_are_cut_before_the_vector_is_normalized(text: GatewayStack) -> None:
    ids = Card(text.model_directory).embed_text("a square")
    for dimensions in (1, 7, WIDTH):
        (found,) = vectors(text, input="a square", dimensions=dimensions)
        np.testing.assert_allclose(found, unit(ids, dimensions), atol=1e-6)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_base64_is_little_endian_float32(text: GatewayStack) -> None:
    plain, encoded = (
        post(text, "/v1/embeddings", input="a", encoding_format=form).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    found = np.frombuffer(base64.b64decode(encoded), "<f4")
    np.testing.assert_array_equal(found, np.array(plain, np.float32))


def test_openais_client_reads_vectors(text: GatewayStack) -> None:
    client = openai.OpenAI(base_url=f"{text.url}/v1", api_key="none")
    ids = Card(text.model_directory).embed_text("a square")
    answer = client.embeddings.create(model=MODEL, input=["a square"], dimensions=8, user="me")
    np.testing.assert_allclose(answer.data[0].embedding, unit(ids, 8), atol=1e-6)
    assert answer.usage.total_tokens == len(ids)


def test_a_cut_input_says_so(text: GatewayStack) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 10
    card = Card(text.model_directory)
    answer = post(text, "/v1/embeddings", input=[long, "a"], truncate_prompt_tokens=20).json()
    first, second = answer["data"]
    assert first["truncated"] is True and "truncated" not in second
    expected = unit(card.embed_text(long, None, 20))
    np.testing.assert_allclose(first["embedding"], expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == 20 + len(card.embed_text("a"))


def test_an_input_beyond_the_context_is_refused_or_cut(text: GatewayStack) -> None:
    long = "x y z " * 3000
    error = refusal(text, "/v1/embeddings", input=["a", long])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert not any(decoder.submits for decoder in text.decoders)
    answer = post(text, "/v1/embeddings", input=["a", long], truncate_prompt_tokens=-1).json()
    assert answer["data"][1]["truncated"] is True
    error = refusal(text, "/v1/embeddings", input=long, truncate_prompt_tokens=5000)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[5, 99999]]}, "input[0][1]"),
        ({"input": [{}]}, "input[0]"),
        ({"input": [{"text": "a", "content": "b"}]}, "input[0]"),
        ({"input": ["a", {"image": IMAGE}]}, "input[1].image"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "messages",
        ),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "cache_salt": "a/b"}, "cache_salt"),
        ({"input": "a", "pooling": "mean"}, "pooling"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "late_chunking": True}, "late_chunking"),
        ({"input": "a", "task": "retrieval.query"}, "task"),
        ({"input": "a", "truncate": True}, "truncate"),
        ({"input": "a", "embedding_type": "ubinary"}, "embedding_type"),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(
    text: GatewayStack, fields: dict[str, Any], param: str
) -> None:
    assert refusal(text, "/v1/embeddings", **fields)["param"] == param
    assert not any(decoder.submits for decoder in text.decoders)


def test_hints_change_nothing(text: GatewayStack) -> None:
    plain = vectors(text, input="a")
    hinted = vectors(
        text, input="a", user="me", add_special_tokens=True, continue_final_message=True,
        normalize=True, late_chunking=False, embedding_type="float", truncate=False,
    )  # fmt: skip
    np.testing.assert_array_equal(plain, hinted)


def test_another_model_is_not_found(text: GatewayStack) -> None:
    assert post(text, "/v1/embeddings", input="a", model="other").status_code == 404


def test_images_and_texts_are_one_input(embedder: GatewayStack) -> None:
    card = Card(embedder.model_directory)
    text = {"type": "text", "text": "a square"}
    image = {"type": "image"}
    alone, both, words = vectors(
        embedder, input=[{"image": IMAGE}, {"image": IMAGE, "text": "a square"}, "a square"]
    )
    for found, parts in ((alone, [image]), (both, [image, text]), (words, [text])):
        np.testing.assert_allclose(found, unit(placed(card.embed_vision(parts))), atol=1e-6)
    # One image, one key: the second prompt's encode call joins or finds the first one's.
    assert len({image.image_key for s in embedder.decoder.submits for image in s.images}) == 1


def test_the_url_of_an_image_as_an_input_is_the_image(
    embedder: GatewayStack, text: GatewayStack
) -> None:
    """As Jina's clients send it. To a model without images it is a text."""
    alone, named = vectors(embedder, input=[IMAGE, {"image": IMAGE}])
    np.testing.assert_array_equal(alone, named)
    bad = refusal(embedder, "/v1/embeddings", input=["a", "data:image/png;base64,AAAA"])
    assert (bad["code"], bad["param"]) == ("invalid_image", "input[1].image")
    small = "data:image/png;base64,AAAA"
    ids = Card(text.model_directory).embed_text(small)
    np.testing.assert_allclose(vectors(text, input=small)[0], unit(ids), atol=1e-6)


def test_messages_are_one_input(embedder: GatewayStack) -> None:
    card = Card(embedder.model_directory)
    content = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "x"}]
    user = {"role": "user", "content": content}
    ids = placed(card.embed_vision([{"type": "image"}, {"type": "text", "text": "x"}], "Find it"))
    system = {"role": "system", "content": [{"type": "text", "text": "Find it."}]}
    forms: list[dict[str, Any]] = [
        {"messages": [system, user]},
        {"messages": [user], "instruction": "Find it"},
        # vLLM's example for Qwen3-VL-Embedding
        {
            "messages": [system, user, {"role": "assistant", "content": ""}],
            "continue_final_message": True,
            "add_special_tokens": True,
        },
    ]
    for form in forms:
        (found,) = vectors(embedder, **form)
        np.testing.assert_allclose(found, unit(ids), atol=1e-6)


def test_the_pixels_of_images_are_the_cards(embedder: GatewayStack) -> None:
    """The processor's file asks for 65,536 pixels at least; the card's code for 4,096."""
    answer = post(embedder, "/v1/embeddings", input=[{"image": IMAGE}]).json()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 4


def test_an_unreadable_image_is_refused_by_its_place(embedder: GatewayStack) -> None:
    bad = {"text": "a", "image": "data:image/png;base64,AAAA"}
    error = refusal(embedder, "/v1/embeddings", input=["a", bad])
    assert (error["code"], error["param"]) == ("invalid_image", "input[1].image")
    content = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    error = refusal(embedder, "/v1/embeddings", input=[content])
    assert error["param"] == "input[0].content[0]"


def test_a_chat_request_to_a_model_for_vectors_is_refused(embedder: GatewayStack) -> None:
    error = embedder.chat().json()["error"]
    assert "POST /v1/embeddings" in error["message"] and error["param"] == "model"
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"queries": "a", "documents": ["b"]}),
    ):
        assert post(embedder, path, **fields).status_code == 400
    assert not embedder.decoder.submits


def test_a_search_request_to_a_chat_model_is_refused(stack: GatewayStack) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"queries": "a", "documents": ["b"]}),
    ):
        error = refusal(stack, path, **fields)
        assert "POST /v1/chat/completions" in error["message"]
    assert not stack.decoder.submits


def documents_of(reranker: GatewayStack, query: str, documents: list[str]) -> list[float]:
    card = Card(reranker.model_directory)
    return [
        probability(
            card.rank_vision([{"type": "text", "text": query}], [{"type": "text", "text": each}])
        )
        for each in documents
    ]


def test_documents_are_ranked(reranker: GatewayStack) -> None:
    documents = [f"document {n}" for n in range(9)]
    scores = documents_of(reranker, "which?", documents)
    order = sorted(range(9), key=lambda index: -scores[index])
    answer = post(reranker, "/v1/rerank", query="which?", documents=documents).json()
    assert [found["index"] for found in answer["results"]] == order
    for found in answer["results"]:
        assert found["relevance_score"] == pytest.approx(scores[found["index"]], abs=1e-6)
        assert found["document"] == {"text": documents[found["index"]]}
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    assert answer["meta"]["api_version"] == {"version": "1"}


def test_version_2_shows_no_documents_unless_asked(reranker: GatewayStack) -> None:
    fields: dict[str, Any] = {"query": "which?", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}
    answer = post(reranker, "/v2/rerank", **fields).json()
    assert len(answer["results"]) == 2
    assert all("document" not in found for found in answer["results"])
    assert answer["meta"]["api_version"] == {"version": "2"}
    shown = post(reranker, "/v2/rerank", **fields, return_documents=True).json()["results"]
    assert {found["document"]["text"] for found in shown} <= {"a", "b", "c"}
    hidden = post(reranker, "/v1/rerank", **fields, return_documents=False).json()["results"]
    assert all("document" not in found for found in hidden)


def test_a_pair_may_have_images_on_both_sides(reranker: GatewayStack) -> None:
    card = Card(reranker.model_directory)
    image, text = {"type": "image"}, {"type": "text", "text": "a square"}
    pairs: list[tuple[Any, Any, list, list]] = [
        ({"image": IMAGE}, "a square", [image], [text]),
        ("a square", {"image": IMAGE}, [text], [image]),
        ({"image": IMAGE, "text": "a square"}, {"image": IMAGE}, [image, text], [image]),
        (
            {"content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
            {"content": "a square"},
            [image],
            [text],
        ),
    ]
    for query, document, left, right in pairs:
        answer = post(
            reranker, "/v1/score", queries=query, documents=[document], instruction="Find"
        ).json()
        ids = placed(card.rank_vision(left, right, "Find"))
        assert answer["data"][0]["score"] == pytest.approx(probability(ids), abs=1e-6)


def test_scores_have_vllms_names_and_shapes(reranker: GatewayStack) -> None:
    documents = ["a", "b"]
    expected = documents_of(reranker, "q", documents)
    for left, right in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        answer = post(reranker, "/v1/score", **{left: "q", right: documents}).json()
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-6)
        assert [entry["object"] for entry in answer["data"]] == ["score", "score"]
    pairwise = post(reranker, "/v1/score", text_1=["q", "q"], text_2=documents).json()["data"]
    assert [entry["score"] for entry in pairwise] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1},
         "max_tokens_per_doc"),
        ("/v1/rerank", {"query": {"text": "a", "instruction": "b"}, "documents": ["c"]},
         "query.instruction"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"image": "data:image/png;base64,AA"}]},
         "documents[1].image"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x y z " * 3000]}, "documents[1]"),
        ("/v1/score", {"queries": "a"}, "documents"),
        ("/v1/score", {"queries": "a", "text_1": "b", "documents": "c"}, "queries"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
    ],
)  # fmt: skip
def test_a_wrong_ranking_is_refused_by_its_field(
    reranker: GatewayStack, path: str, fields: dict[str, Any], param: str
) -> None:
    assert refusal(reranker, path, **fields)["param"] == param


def test_documents_are_cut_to_their_tokens(reranker: GatewayStack) -> None:
    """As in Cohere's and vLLM's API; Haystack's client of Cohere always sends 4,096."""
    tokenizer = Card(reranker.model_directory).tokenizer
    long = "The quick brown fox jumps over the lazy dog. " * 10
    ids = tokenizer.encode(long, add_special_tokens=False)
    cut = tokenizer.decode(ids[:20])
    assert tokenizer.encode(cut, add_special_tokens=False) == ids[:20]
    expected = documents_of(reranker, "q", ["a fox", cut])
    fields: dict[str, Any] = {"documents": ["a fox", long], "max_tokens_per_doc": 20}
    found = post(reranker, "/v1/score", queries="q", **fields).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(expected, abs=1e-6)
    assert [each.get("truncated") for each in found] == [None, True]
    ranked = post(reranker, "/v2/rerank", query="q", **fields).json()["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(expected)), abs=1e-6
    )
    # More than the context, and left whole.
    fields["documents"] = ["a fox", long * 20]
    assert post(reranker, "/v2/rerank", query="q", **fields).status_code == 200
    whole = documents_of(reranker, "q", [long])
    for most in (0, 4096):
        kept = post(
            reranker, "/v1/score", queries="q", documents=long, max_tokens_per_doc=most
        ).json()["data"]
        assert kept[0]["score"] == pytest.approx(whole[0], abs=1e-6)
        assert "truncated" not in kept[0]


def test_a_decoder_that_dies_is_replaced(text: GatewayStack) -> None:
    inputs = [f"input {n}" for n in range(6)]
    expected = vectors(text, input=inputs)
    text.reset()
    text.decoders[0].die_after = 0
    found = vectors(text, input=inputs)
    np.testing.assert_array_equal(found, expected)


def test_without_a_decoder_the_request_fails_once(text: GatewayStack) -> None:
    for decoder in text.decoders:
        decoder.before = raising(EngineLost("gone"))
    answer = post(text, "/v1/embeddings", input=["a", "b"])
    assert answer.status_code == 503, answer.text


def test_a_full_decoder_is_told(text: GatewayStack) -> None:
    for decoder in text.decoders:
        decoder.before = raising(Overloaded("full"))
    assert post(text, "/v1/embeddings", input="a").status_code == 503


def test_a_prompt_that_fails_ends_the_others(text: GatewayStack) -> None:
    async def before(submit) -> None:
        if len(submit.prompt_token_ids) > 400:
            raise EngineLost("gone")
        await forever(submit)

    for decoder in text.decoders:
        decoder.before = before
    answer = post(text, "/v1/embeddings", input=["a", "b", "many words " * 40, "c"])
    assert answer.status_code == 503
    text.wait(lambda: not any(decoder.running for decoder in text.decoders))


def test_metrics_count_prompts(text: GatewayStack) -> None:
    name = "triptych_gateway_tokens_total"
    before = text.metric(name, kind="prompt")
    answer = post(text, "/v1/embeddings", input=["a", "b c d"]).json()
    # The gateway counts a request after it has written the answer.
    expected = before + answer["usage"]["prompt_tokens"]
    text.wait(lambda: text.metric(name, kind="prompt") == expected)
    text.wait(lambda: text.metric("triptych_gateway_requests_total", outcome="stop") > 0)


def test_a_decoder_of_another_task_gets_no_work(loop_thread, tmp_path) -> None:
    stack = start(
        loop_thread, tmp_path, "embed", text_only=True, num_encoders=0, num_decoders=2,
        request_timeout_s=PATIENCE_S,
    )  # fmt: skip
    try:
        chat = stack.decoders[1]
        stack.thread.run(chat.stop())
        chat.description.task = ""
        stack.thread.run(chat.start(chat.address))
        service = stack.gateway.service
        stack.wait(lambda: list(service.decoders.misfits()) == [chat.address])
        for _ in range(8):
            assert len(vectors(stack, input="a")) == 1
        assert not chat.submits
    finally:
        stack.close()


def test_tenants_pay_for_their_prompts(loop_thread, tmp_path) -> None:
    keys = tmp_path / "keys.json"
    digest = hashlib.sha256(b"k").hexdigest()
    limits = {"tokens_per_minute": 2_000, "max_sequences": 4}
    key = {"id": "k", "tenant": "a", "sha256": digest}
    keys.write_text(json.dumps({"tenants": {"a": limits}, "keys": [key]}))
    stack = start(
        loop_thread, tmp_path, "embed", text_only=True, num_encoders=0, api_keys=f"file:{keys}"
    )
    try:
        with stack.client(headers={"Authorization": "Bearer k"}) as client:
            body = {"model": MODEL, "input": [f"text {n}" for n in range(40)]}
            answer = client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            assert {submit.tenant for submit in stack.decoder.submits} == {"a"}
            words = "many words " * 80
            statuses = [
                client.post("/v1/embeddings", json=body | {"input": [words] * 4}).status_code
                for _ in range(3)
            ]
            assert statuses[-1] == 429, statuses
    finally:
        stack.close()
