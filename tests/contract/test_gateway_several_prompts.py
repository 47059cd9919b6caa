"""Requests with several prompts: what prompts share is loaded once, and all are charged at once."""

import base64
import gc
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.common.errors import InvalidImage, Unavailable
from services.gateway.media.images import Image
from services.gateway.media.media_loader import MediaLoader
from services.gateway.request.completion import Completion
from services.gateway.request.search import SearchService
from services.gateway.tenancy.quota import TOKENS
from services.gateway.tenancy.tenants import Limits, Tenant
from tests.attacks.images import small
from tests.contract.test_gateway_search import post, refusal, start
from tests.contract.test_gateway_video import clip
from tests.fakes import forever, raising
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.search_cards import Card

IMAGE = image_url(64, 64)
LIMIT = 2_000
WORDS = "many words " * 80
TENANT = Tenant("a", Limits(tokens_per_minute=LIMIT), shares_caches=False)
AS_TENANT = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def _reranker(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = start(loop_thread, tmp_path_factory.mktemp("reranker"), "rank")
    yield stack
    stack.close()


@pytest.fixture
def reranker(_reranker) -> Iterator[GatewayStack]:
    """A gateway of Qwen3-VL-Reranker's kind, reset."""
    yield from _reranker.lend()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of loads of each URL."""
    found, load = Counter[str](), MediaLoader.load

    async def counted(self, url, *args):
        found[url] += 1
        return await load(self, url, *args)

    monkeypatch.setattr(MediaLoader, "load", counted)
    return found


def padded_image(num_bytes: int) -> str:
    return "data:image/png;base64," + base64.b64encode(small(1) + bytes(num_bytes)).decode()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/v1/score"])
def test_the_image_of_a_query_is_loaded_once(
    reranker: GatewayStack, loads: Counter[str], path: str
) -> None:
    documents = [f"d{n}" for n in range(200)]
    name = "queries" if path == "/v1/score" else "query"
    answer = post(reranker, path, **{name: {"image": IMAGE}, "documents": documents})
    assert answer.status_code == 200, answer.text
    assert loads == {IMAGE: 1}
    card, image = Card(reranker.model_directory), [{"type": "image"}]
    num_tokens = sum(
        len(card.rank_vision(image, [{"type": "text", "text": each}])) + 3 for each in documents
    )
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens


def test_images_of_documents_that_are_equal_are_loaded_once(
    reranker: GatewayStack, loads: Counter[str]
) -> None:
    other = padded_image(1)
    documents = [{"image": other}, {"image": IMAGE}, {"image": other, "text": "a"}]
    answer = post(reranker, "/v1/rerank", query={"image": IMAGE}, documents=documents)
    assert answer.status_code == 200, answer.text
    assert loads == {IMAGE: 1, other: 1}


def test_the_memory_of_a_request_does_not_grow_with_its_documents(
    reranker: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts that have ended are freed, and copies in calls to encoders are counted."""
    query, run = padded_image(1 << 20), SearchService.run
    num_images, num_completions, num_bytes = list[int](), list[int](), list[int]()
    running = most = 0

    async def watched(self, completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if "d299" in completion.chat.messages[1].content:
                found = [each for each in gc.get_objects() if type(each) is Completion]
                num_completions.append(len(found))
                media = [each.images[0] for each in found]
                files = {id(each.data) for each in media if isinstance(each, Image)}
                num_images.append(len(files))
                num_bytes.append(completion.slot.memory.num_bytes)
            return await run(self, completion)
        finally:
            running -= 1

    monkeypatch.setattr(SearchService, "run", watched)
    gc.collect()
    documents = [f"d{n}" for n in range(300)]
    answer = post(reranker, "/v1/rerank", query={"image": query}, documents=documents)
    assert answer.status_code == 200, answer.text
    assert num_images == [1]
    assert num_completions[0] <= 2 * most < 100
    assert num_bytes[0] >= (most - 1) * (2 << 20)


@pytest.mark.parametrize(
    ("query", "document", "param"),
    [
        ({"image": padded_image(0)[:40]}, "a", "query.image"),
        ("a", {"image": padded_image(0)[:40]}, "documents[0].image"),
        ({"video": clip(500)}, {"video": clip(600)}, "documents[0].video"),
    ],
)
def test_an_error_of_a_shared_load_names_its_first_place(
    reranker: GatewayStack, query: object, document: object, param: str
) -> None:
    given = {"mm_processor_kwargs": {"num_frames": 400}} if "video" in param else {}
    error = refusal(
        reranker, "/v1/rerank", query=query, documents=[document, "b", document], **given
    )
    assert error["param"] == param
    assert not reranker.decoder.submits
    assert post(reranker, "/v1/rerank", query="a", documents=["b"]).status_code == 200


def test_an_encoders_refusal_names_the_pairs_own_place(reranker: GatewayStack) -> None:
    reranker.encoder.before, reranker.decoder.before = raising(InvalidImage("no image")), forever
    error = refusal(reranker, "/v1/rerank", query={"image": IMAGE}, documents=["a", "b"])
    assert (error["code"], error["param"]) == ("invalid_image", "query.image")


def test_the_video_of_a_query_is_probed_once(reranker: GatewayStack) -> None:
    """The file stays open while any pair runs: the first pair that ends does not close it."""
    documents = [f"d{n}" for n in range(20)]
    answer = post(reranker, "/v1/rerank", query={"video": clip(50)}, documents=documents)
    assert answer.status_code == 200, answer.text
    assert len(reranker.encoder.probes) == 1


def test_a_client_that_leaves_during_the_load_ends_only_its_request(
    reranker: GatewayStack,
) -> None:
    reranker.encoder.before_probe = forever
    body = {"model": MODEL, "query": {"video": clip(50)}, "documents": ["a", "b"]}
    data = json.dumps(body).encode()
    head = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", reranker.port)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        reranker.wait(lambda: len(reranker.encoder.probes) == 1)
    reranker.wait(lambda: reranker.gateway.admission.num_running == 0)
    assert reranker.num_in_flight() == 0
    assert post(reranker, "/v1/rerank", query={"image": IMAGE}, documents=["a"]).is_success


@pytest.fixture(params=["/v1/embeddings", "/v1/completions"])
def limited(request, loop_thread, tmp_path: Path) -> Iterator[tuple[GatewayStack, str, str]]:
    """A gateway whose tenant has a limit of tokens, a path, and the path's field of prompts."""
    keys = tmp_path / "keys.json"
    key = {"id": "k", "tenant": "a", "sha256": hashlib.sha256(b"k").hexdigest()}
    tenants = {"a": {"tokens_per_minute": LIMIT}}
    keys.write_text(json.dumps({"tenants": tenants, "keys": [key]}))
    given = {"text_only": True, "num_encoders": 0, "api_keys": f"file:{keys}"}
    with ExitStack() as closing:
        if request.param == "/v1/embeddings":
            stack, name = start(loop_thread, tmp_path, "embed", **given), "input"
        else:
            stack = GatewayStack(loop_thread, tmp_path, log_level="ERROR", **given)
            name = "prompt"
        closing.callback(stack.close)
        yield stack, request.param, name


def used_tokens(stack: GatewayStack) -> int:
    return stack.on_loop(lambda: stack.gateway.admission._leases.quota(TENANT).used()[TOKENS])


def test_prompts_above_the_limit_are_served_in_an_empty_window(
    limited: tuple[GatewayStack, str, str],
) -> None:
    stack, path, name = limited
    body = {"model": MODEL, name: [WORDS] * 30}
    with stack.client(headers=AS_TENANT) as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["total_tokens"]
        assert used_tokens(stack) == used > LIMIT
        assert len(stack.decoder.submits) == 30
        assert client.post(path, json=body).status_code == 429
    assert used_tokens(stack) == used
    assert len(stack.decoder.submits) == 30


def test_prompts_that_do_not_fit_now_take_nothing(limited: tuple[GatewayStack, str, str]) -> None:
    stack, path, name = limited
    with stack.client(headers=AS_TENANT) as client:
        answer = client.post(path, json={"model": MODEL, name: "a"})
        used = answer.json()["usage"]["total_tokens"]
        for _ in range(3):
            refused = client.post(path, json={"model": MODEL, name: [WORDS] * 30})
            assert refused.status_code == 429, refused.text
        assert used_tokens(stack) == used
        assert len(stack.decoder.submits) == 1
        assert client.post(path, json={"model": MODEL, name: WORDS}).status_code == 200


def test_prompts_that_no_decoder_was_sent_are_given_back(
    limited: tuple[GatewayStack, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, path, name = limited
    decoders = stack.gateway.service.decoders

    def choose(*_: object) -> None:
        raise Unavailable("no decoder is available")

    monkeypatch.setattr(type(decoders), "choose", choose)
    with stack.client(headers=AS_TENANT) as client:
        answer = client.post(path, json={"model": MODEL, name: [WORDS] * 3})
        assert answer.status_code == 503, answer.text
    assert used_tokens(stack) == 0
