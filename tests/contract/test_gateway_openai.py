"""The official client against the real gateway over a real port."""

import asyncio
import json
import re
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import openai
import pytest
from prometheus_client import generate_latest
from tokenizers import Tokenizer

from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import MODEL
from tests.noise import PATIENCE_S, least
from tests.tiny_tokenizer import tokenizer_json

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < PATIENCE_S
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "A red circle."
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


def test_a_prediction_is_sent_and_its_tokens_are_counted(client, stack):
    decoder = stack.decoders[0]
    given = {"type": "content", "content": [{"type": "text", "text": "A red "}] * 2}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, prediction=given)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    ids = np.frombuffer(decoder.submits[-1].prediction, "<i4").tolist()
    assert Tokenizer.from_str(tokenizer_json()).decode(ids) == "A red A red "
    decoder.predicted = 2, 1
    given["content"] = "A red circle."
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, prediction=given, max_tokens=3
    )
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 3)
    assert len(decoder.submits[-1].prediction) == 4 * 3  # no more than the answer can have
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.usage.completion_tokens_details is None
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, prediction={"type": "content", "content": 5}
        )
    assert refused.value.param == "prediction.content"


def test_answer_about_images(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=asking(image_url(300, 200), image_url()), max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "A red"
    assert answer.usage.prompt_tokens_details.image_tokens == 70 + 70


def test_stream_equals_the_whole_answer(client):
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, seed=1)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, seed=1, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_no_usage_where_it_is_refused(client):
    options = {"include_usage": False, "continuous_usage_stats": True}
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=options
    )
    text = client.completions.create(model=MODEL, prompt="x", stream=True, stream_options=options)
    assert not [chunk for chunk in (*chat, *text) if chunk.usage]


def test_continuous_usage(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )  # fmt: skip
    assert all(chunk.usage for chunk in chunks)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts[0] == 0 and chunks[0].usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len(counts) >= 4


async def test_async_client(async_client):
    answers = await asyncio.gather(
        *(async_client.chat.completions.create(model=MODEL, messages=HELLO) for _ in range(20))
    )
    assert {a.choices[0].message.content for a in answers} == {"A red circle."}
    stream = await async_client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == "A red circle."


def test_stream_helper_of_the_client(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "A red circle."


def test_choices(client, stack):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True))
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["A red circle."] * 3
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3, stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    assert "".join(entry.token for entry in entries) == "A red circle."
    assert bytes(b for entry in entries for b in entry.bytes) == b"A red circle."
    assert all(entry.logprob == -0.5 for entry in entries)
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 4
    assert entries[0].top_logprobs[2].logprob == -9999


def test_stop_and_extra_fields(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, stop=[" circle"], user="me", metadata={"a": "b"},
        extra_body={"include_stop_str_in_output": True, "top_k": 5, "min_p": 0.1},
    )  # fmt: skip
    assert answer.choices[0].message.content == "A red circle"


def test_multi_byte_characters_stream_whole(client, stack):
    text = "naïve 中文 🙂👩‍👧"
    stack.decoder.reply = stack.tokenizer.encode_text(text)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    ]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_beginning_of_an_answer_can_be_echoed(client):
    messages = [*HELLO, {"role": "assistant", "content": "An apple"}]
    body = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    options = {"model": MODEL, "messages": messages, "extra_body": body, "n": 2}
    for choice in client.chat.completions.create(**options).choices:
        assert choice.message.content == "An appleA red circle."
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["An appleA red circle."] * 2
    asked = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"echo": True})
    assert asked.choices[0].message.content == "A red circle."


def test_stage_times(client):
    url = image_url(90, 80, (1, 2, 3))
    for expected in ("computed", "memory"):
        answer = client.chat.completions.create(
            model=MODEL, messages=asking(url), extra_body={"include_stage_times": True}
        )
        assert set(answer.stage_times_ms) == {
            "fetch", "tokenize", "encode", "queue", "transfer", "prefill", "first_token", "total",
        }  # fmt: skip
        assert all(value >= 0 for value in answer.stage_times_ms.values())
        times, metrics = answer.stage_times_ms, answer.metrics
        assert metrics["time_to_first_token_ms"] == times["first_token"]
        assert metrics["queue_time_ms"] == times["queue"]
        generation_ms = times["total"] - times["first_token"]
        assert metrics["generation_time_ms"] == pytest.approx(generation_ms, abs=2e-3)
        assert metrics["mean_itl_ms"] == pytest.approx(generation_ms / 4, abs=2e-3)
        assert metrics["tokens_per_second"] == pytest.approx(5e3 / times["total"], rel=1e-2)
        assert (
            answer.images
            == [{"encode_source": expected, "num_tokens": 64, "grid_thw": [1, 16, 16]}]
            or answer.images[0]["encode_source"] == expected
        )
    last = list(client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, max_tokens=1,
        extra_body={"include_stage_times": True},
    ))[-1]  # fmt: skip
    assert last.metrics["tokens_per_second"] > 0 and "mean_itl_ms" not in last.metrics


def test_models(client, stack):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "triptych")
    assert model.max_model_len == 4096
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id.startswith("req-")


def test_decoder_death_in_mid_stream_raises_in_the_client(client, stack):
    stack.decoder.die_after, stack.decoder.delay_s = 2, 0.02
    text = ""
    with pytest.raises(openai.APIError) as broken:
        for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "A red"
    assert broken.value.code == "unavailable"


def test_client_retries_a_dead_decoder(stack):
    stack.decoder.die_after = 0
    reviver = threading.Timer(0.3, lambda: setattr(stack.decoder, "die_after", None))
    reviver.start()
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=4) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    reviver.join()
    assert answer.choices[0].message.content == "A red circle."


# Other clients


def test_a_client_that_offers_http2_keeps_its_body(stack):
    """Java's does so in its first request. (httptools, as uvicorn uses it, would drop the body.)"""
    headers = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    }
    with stack.client(headers=headers) as client:
        response = client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    assert response.json()["choices"][0]["message"]["content"] == "A red circle."


@pytest.mark.parametrize(
    "head",
    [b"x" * (80 << 10), b"GET /health HTTP/1.1\r\nx-long: " + b"y" * (80 << 10)],
    ids=["line", "header"],
)
def test_a_head_that_is_too_long_is_refused(stack, head):
    with socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S) as connection:
        answer = b" 400 "
        with suppress(ConnectionError):  # it may close before it has read everything
            connection.sendall(head)
            answer = connection.recv(64)
        assert b" 400 " in answer


# Request ids


def test_request_id_is_echoed_and_passed_on(stack):
    headers = {"x-request-id": "my.id-1:2_3"}
    with stack.client(headers=headers) as client:
        body = {"model": MODEL, "messages": asking(image_url(33, 44))}
        response = client.post("/v1/chat/completions", json=body)
    assert response.headers["x-request-id"] == "my.id-1:2_3"
    assert stack.decoder.submits[0].request_id == "my.id-1:2_3"
    assert stack.encoder.request_ids == ["my.id-1:2_3"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a/b", "é", '"'])
def test_bad_request_id_is_replaced(stack, given):
    with stack.client() as client:
        response = client.get("/health", headers={"x-request-id": given.encode()})
    assert response.headers["x-request-id"].startswith("req-")


# Other endpoints


def test_tokenize(stack):
    with stack.client() as client:
        plain = client.post("/tokenize", json={"prompt": "hello <|im_end|>"}).json()
        assert plain["tokens"] == stack.tokenizer.encode_text("hello <|im_end|>")
        assert plain["count"] == len(plain["tokens"])
        assert plain["max_model_len"] == 4096
        messages = asking(image_url(300, 200), image_url(64, 64))
        counted = client.post("/tokenize", json={"messages": messages}).json()
        assert counted["count"] == stack.chat(messages=messages).json()["usage"]["prompt_tokens"]
        sent = np.frombuffer(stack.decoder.submits[0].prompt_token_ids, "<i4")
        assert counted["tokens"] == sent.tolist()
        broken = asking("data:image/png;base64,AAAA")
        assert client.post("/tokenize", json={"messages": broken}).status_code == 400
        for bad in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 1}, {"x": 1}):
            assert client.post("/tokenize", json=bad).status_code == 400


def test_metrics(stack):
    stack.chat(messages=asking(image_url()))
    text = generate_latest(stack.gateway.metrics.registry).decode()
    for name in (
        "triptych_gateway_requests_total", "triptych_gateway_ttft_seconds_bucket",
        "triptych_gateway_stage_seconds_bucket",
        'triptych_gateway_healthy_pods{service="encoder"} 1.0',
        'triptych_gateway_healthy_pods{service="decoder"} 1.0',
        "triptych_gateway_requests_running", "triptych_gateway_tokens_total",
        "triptych_gateway_encodes_total",
    ):  # fmt: skip
        assert name in text


PAGE_FILES = sorted(path.name for path in Path("services/gateway/static").iterdir())


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_external_and_hold_no_script(stack, path):
    with stack.client() as client:
        response = client.get(path)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for forbidden in (
        "http://",
        "https://",
        'src="//',
        "@import",
        "<style",
        " style=",
        " onclick=",
    ):
        assert forbidden not in response.text.replace("http://www.w3.org", "")
    assert re.findall(r"<script[^>]*>(.*?)</script>", response.text, re.DOTALL)[0] == ""
    assert not any(re.findall(r"<script[^>]*>(.*?)</script>", response.text, re.DOTALL))


@pytest.mark.parametrize("name", PAGE_FILES)
def test_page_files_are_served_once(stack, name):
    with stack.client() as client:
        first = client.get(f"/static/{name}")
        again = client.get(f"/static/{name}", headers={"if-none-match": first.headers["etag"]})
    assert first.status_code == 200
    assert first.content == (Path("services/gateway/static") / name).read_bytes()
    assert first.headers["x-content-type-options"] == "nosniff"
    assert again.status_code == 304
    assert again.content == b""


TEXT_FILES = (".css", ".html", ".js")
OWN_FILES = [name for name in PAGE_FILES if ".min." not in name and name.endswith(TEXT_FILES)]


@pytest.mark.parametrize("name", OWN_FILES)
def test_page_files_make_no_html_of_text_and_load_nothing_external(name):
    text = (Path("services/gateway/static") / name).read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "@import", "//cdn"):
        assert forbidden not in text
    addresses = set(re.findall(r"https?://[\w.:]+", text))
    assert addresses <= {"http://www.w3.org", "http://127.0.0.1:8000"}  # a name, what is replaced


def test_other_files_are_not_served(stack):
    with stack.client() as client:
        for name in ("nothing.js", "..%2fsettings.py", "%2e%2e/settings.py", ""):
            assert client.get(f"/static/{name}").status_code == 404


# Clients that disconnect


def send_raw(stack, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", stack.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_sequence(stack, stream):
    stack.decoder.reply = [40] * 1000
    stack.decoder.delay_s = 0.02
    cancelled = stack.metric("triptych_gateway_requests_total", outcome="cancelled")

    def seconds() -> float:
        connection = send_raw(stack, {"model": MODEL, "messages": HELLO, "stream": stream})
        stack.wait(lambda: len(stack.decoder.running) == 1)
        if stream:
            connection.recv(1000)
        connection.close()
        return stack.wait(lambda: not stack.decoder.running)

    assert least(seconds, 1) < 1
    stack.wait(lambda: stack.gateway.admission.num_running == 0)
    expected = cancelled + len(stack.decoder.submits)
    name = "triptych_gateway_requests_total"
    stack.wait(lambda: stack.metric(name, outcome="cancelled") == expected)


def test_disconnect_cancels_the_encode(stack):
    async def slow(_):
        await asyncio.sleep(2 * PATIENCE_S)

    stack.encoder.before = slow
    stack.decoder.before = slow

    def seconds() -> float:
        sent = len(stack.encoder.requests) + 1
        connection = send_raw(stack, {"model": MODEL, "messages": asking(image_url(77, 66))})
        stack.wait(lambda: len(stack.encoder.requests) == sent)
        connection.close()
        return stack.wait(lambda: stack.encoder.num_cancelled == sent and not stack.decoder.running)

    assert least(seconds, 2) < 2


def test_disconnect_in_the_body_frees_what_is_held(stack):
    def seconds() -> float:
        stack.wait(lambda: stack.gateway.admission.held_bytes == 0)
        connection = socket.create_connection(("127.0.0.1", stack.port))
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        )
        stack.wait(lambda: stack.gateway.admission.held_bytes > 0)
        connection.close()
        return stack.wait(lambda: stack.gateway.admission.held_bytes == 0)

    assert least(seconds, 1) < 1


def test_slow_reader_delays_no_other_request(stack):
    stack.decoder.reply = stack.tokenizer.encode_text("hello " * 500)
    stack.decoder.tokens_per_event = 10
    connection = send_raw(stack, {"model": MODEL, "messages": HELLO, "stream": True})
    stack.wait(lambda: len(stack.decoder.submits) == 1)

    def seconds() -> float:
        start = time.monotonic()
        for _ in range(5):
            assert stack.chat(max_tokens=1).status_code == 200
        return time.monotonic() - start

    assert least(seconds, 5) < 5
    connection.close()
