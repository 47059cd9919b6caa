"""Small endpoints, CORS, and fields of answers that OpenAI does not have."""

import json
import socket

import numpy as np
import pytest

from services.common.errors import ContextLengthExceeded, InvalidRequest, NoTokenAllowed
from services.gateway.endpoints.request_context import RequestContext
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import Update
from services.gateway.http.exchange import Exchange
from services.gateway.request.chat import ChatService
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import tokenizer_json_with_long_token

PAGE = "https://page.example"


def get(stack, path):
    with stack.client() as client:
        return client.get(path)


def post(stack, path, body):
    with stack.client() as client:
        return client.post(path, json=body)


def test_models_have_what_benchmark_clients_read(stack):
    (model,) = get(stack, "/v1/models").json()["data"]
    assert (model["id"], model["root"], model["parent"]) == (MODEL, MODEL, None)


def test_version_and_ping(stack):
    assert set(get(stack, "/version").json()) == {"version"}
    assert get(stack, "/ping").status_code == 200


def test_tokens_become_their_text(stack):
    text = "naïve 中文 🙂"
    tokens = post(stack, "/tokenize", {"prompt": text}).json()["tokens"]
    assert post(stack, "/detokenize", {"model": MODEL, "tokens": tokens}).json() == {"prompt": text}
    end = stack.decoder.end_token
    assert post(stack, "/detokenize", {"tokens": [end]}).json() == {"prompt": "<|im_end|>"}
    assert post(stack, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": [1, 1 << 20]}, "tokens[1]"),
        ({"tokens": "x"}, "tokens"),
    ],
)
def test_bad_tokens_are_refused_by_place(stack, body, param):
    response = post(stack, "/detokenize", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_no_more_tokens_than_the_context_become_text(stack):
    context = post(stack, "/tokenize", {"prompt": "x"}).json()["max_model_len"]
    assert len(post(stack, "/detokenize", {"tokens": [0] * context}).json()["prompt"]) == context
    response = post(stack, "/detokenize", {"tokens": [0] * (context + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_a_text_keeps_its_slot_and_its_bytes_until_it_is_read(loop_thread, tmp_path):
    """Answers to clients that do not read are bounded as requests are."""
    tokenizer, long = tokenizer_json_with_long_token(10_000)  # more than sockets buffer
    stack = GatewayStack(loop_thread, tmp_path, files={"tokenizer.json": tokenizer})
    context = post(stack, "/tokenize", {"prompt": "x"}).json()["max_model_len"]
    body = json.dumps({"tokens": [long] * context}).encode()
    admission = stack.gateway.admission
    stack.wait(lambda: not admission.held_bytes)  # the request before has ended
    with socket.create_connection(("127.0.0.1", stack.port), timeout=PATIENCE_S) as client:
        head = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert admission.num_running == 1
        assert admission.held_bytes > 3 * 10_000 * context
    stack.wait(lambda: not (admission.num_running or admission.held_bytes))
    stack.close()


def test_token_strings_are_the_vocabularys(stack):
    body = {"prompt": "hello world", "return_token_strs": True}
    found = post(stack, "/tokenize", body).json()
    assert "".join(found["token_strs"]) == "helloĠworld"
    assert post(stack, "/tokenize", {"prompt": "x"}).json()["token_strs"] is None


def test_text_is_tokenized_as_a_prompt_of_completions_if_special_tokens_are_mentioned(stack):
    text = "hello <|im_end|>"
    plain = post(stack, "/tokenize", {"prompt": text}).json()["tokens"]
    prompt = post(stack, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert prompt["tokens"][-1] == stack.decoder.end_token
    assert stack.decoder.end_token not in plain
    body = {"model": MODEL, "prompt": text, "max_tokens": 1}
    assert post(stack, "/v1/completions", body).status_code == 200
    sent = np.frombuffer(stack.decoder.submits[-1].prompt_token_ids, "<i4").tolist()
    assert sent == prompt["tokens"]
    messages = [{"role": "user", "content": "hello"}]
    for value in (False, True):  # this tokenizer adds none
        given = {"messages": messages, "add_special_tokens": value}
        assert (
            post(stack, "/tokenize", given).json()
            == post(stack, "/tokenize", {"messages": messages}).json()
        )


def test_a_text_that_is_too_long_is_named_by_its_field(stack):
    text = "x " * (stack.gateway.service.max_model_len() * stack.tokenizer.max_token_bytes)
    for path, prompt, param in (
        ("/tokenize", text, "prompt"),
        ("/v1/completions", text, "prompt"),
        ("/v1/completions", ["x", text], "prompt[1]"),
    ):
        error = post(stack, path, {"prompt": prompt}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, TEXT = {"messages": MESSAGES}, {"prompt": ["x", "y"]}
RESPONSES, ANTHROPIC = {"input": "hello", "store": False}, {"messages": MESSAGES, "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "error", "param"),
    [
        ("/v1/chat/completions", CHAT, ContextLengthExceeded.of(9, 5), "messages"),
        ("/v1/chat/completions", {**CHAT, "stream": True}, ContextLengthExceeded.of(9, 5),
         "messages"),
        ("/v1/completions", TEXT, ContextLengthExceeded.of(9, 5), "prompt"),
        ("/v1/responses", RESPONSES, ContextLengthExceeded.of(9, 5), "input"),
        ("/v1/messages", ANTHROPIC, ContextLengthExceeded.of(9, 5), None),
        ("/v1/chat/completions", {**CHAT, "allowed_token_ids": [5], "bad_words": ["a"]},
         NoTokenAllowed("no token"), "allowed_token_ids"),
        ("/v1/chat/completions", {**CHAT, "bad_words": ["a"]}, NoTokenAllowed("no token"),
         "bad_words"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"regex": "a"}},
         NoTokenAllowed("no token"), "structured_outputs.regex"),
        ("/v1/chat/completions", CHAT, InvalidRequest("the prompt is empty"), None),
    ],
)  # fmt: skip
def test_a_request_that_only_the_decoder_refuses_is_a_400_by_its_field(
    stack, path, body, error, param
):
    async def refuse(_submit):
        raise error

    stack.decoder.before = refuse
    response = post(stack, path, {"model": MODEL, **body})
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert error.message in found["message"]
    if path == "/v1/messages":  # Anthropic's errors have neither code nor param
        assert found["type"] == "invalid_request_error"
    else:
        assert (found["code"], found["param"]) == (error.code, param)
    stack.wait(lambda: stack.gateway.admission.num_running == 0)
    assert len(stack.decoder.submits) == len(body.get("prompt", "x"))  # each was sent once


def test_tokenizer_info_has_the_template(stack):
    found = get(stack, "/tokenizer_info").json()
    assert "<|im_start|>" in found["chat_template"]


# Fields of answers


def test_stop_reason_is_the_string_or_the_token(stack):
    tokens = stack.tokenizer.encode_text("A red circle.")

    def choice(**fields):
        return stack.chat(**fields).json()["choices"][0]

    assert choice()["stop_reason"] is None
    assert choice(max_tokens=1)["stop_reason"] is None
    assert choice(stop=[" circle"])["stop_reason"] == " circle"
    stack.decoder.reply, end = tokens[:2], stack.decoder.end_token
    assert choice(stop_token_ids=[end])["stop_reason"] == end
    assert stack.chat().json()["prompt_logprobs"] is None


def test_max_tokens_above_what_is_left_are_clamped(stack):
    response = stack.chat(max_tokens=1 << 20)
    assert response.status_code == 200
    submit = stack.decoder.submits[0]
    assert submit.sampling.max_tokens == 4096 - len(submit.prompt_token_ids) // 4


# Browsers


@pytest.fixture(scope="module")
def open_stack(loop_thread, tmp_path_factory):
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("cors"), allowed_sites=PAGE, api_keys="secret"
    )
    yield stack
    stack.close()


def preflight(stack, origin):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    with stack.client() as client:
        return client.options("/v1/chat/completions", headers=headers)


def test_preflight_needs_no_key(open_stack):
    response = preflight(open_stack, PAGE)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers


def test_other_origins_get_nothing(open_stack, stack):
    assert "access-control-allow-origin" not in preflight(open_stack, "https://evil").headers
    refused = preflight(stack, PAGE)
    assert refused.status_code == 403  # the gateway listens on loopback
    assert "access-control-allow-origin" not in refused.headers


def test_a_page_of_another_site_gets_a_refusal_with_an_id_and_nothing_else(stack):
    for host, origin in (("evil.example", ""), ("localhost", "https://evil.example"), ("[", "")):
        with stack.client(headers={"host": host, "x-request-id": "its-id"}) as client:
            headers = {"origin": origin} if origin else {}
            for path in ("/", "/v1/models"):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "forbidden"
                assert refused.headers["x-request-id"] == "its-id"
            refused = client.post("/v1/messages", headers=headers, json={})
            assert refused.json()["type"] == "error"


def test_answers_and_errors_can_be_read_by_the_page(open_stack):
    with open_stack.client(headers={"origin": PAGE}) as client:
        refused = client.post("/v1/chat/completions", json={})
        assert refused.status_code == 401
        for response in (refused, client.get("/ping")):
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        (None, 200),
        ("text/plain", 415),  # this and the next need no preflight in browsers
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_body_declared_as_something_other_than_json_is_refused(stack, path, content_type, status):
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
    headers = {} if content_type is None else {"content-type": content_type}
    with stack.client() as client:
        response = client.post(path, content=body.encode(), headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.fixture(scope="module")
def network_stack(loop_thread, tmp_path_factory):
    """A gateway without keys that does not listen on loopback alone."""
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("network"), host="0.0.0.0", api_keys="none"
    )
    yield stack
    stack.close()


_HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
_BODIES = {
    "/v1/chat/completions": _HELLO, "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"}, "/v1/messages": {**_HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": _HELLO, "/v1/media": {"url": image_url()},
    "/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [1]},
}  # fmt: skip


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "its own", ""])
@pytest.mark.parametrize(("path", "body"), _BODIES.items(), ids=_BODIES.keys())
def test_a_web_page_cannot_send_a_body_without_a_type(network_stack, path, body, origin):
    """A Blob without a type needs no preflight. A program sends no Origin and need name no type."""
    if origin == "its own":
        origin = f"http://127.0.0.1:{network_stack.port}"
    for kind in (None, "application/json"):
        headers = {"origin": origin} if origin else {}
        if kind is not None:
            headers["content-type"] = kind
        num_submits = len(network_stack.decoder.submits)
        with network_stack.client() as client:
            answer = client.post(path, content=json.dumps(body).encode(), headers=headers)
        if kind is None and origin:
            assert answer.status_code == 415
            assert "Content-Type must be application/json" in answer.text
            assert len(network_stack.decoder.submits) == num_submits
        else:
            assert answer.status_code == 200, answer.text


def test_a_web_page_needs_no_type_where_it_sends_no_body(open_stack):
    headers = {"origin": PAGE, "authorization": "Bearer secret"}
    with open_stack.client(headers=headers) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/responses/resp_unknown").status_code == 404
        assert client.delete("/v1/responses/resp_unknown").status_code == 404


def test_a_bug_before_the_answer_is_a_500_that_says_nothing_of_it(stack, monkeypatch, caplog):
    async def fail(*_, **_options):
        raise RuntimeError("a secret")

    monkeypatch.setattr(ChatService, "prepare", fail)
    response = stack.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"]
    assert "secret" not in response.text and "a secret" in caplog.text


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}


def events_of(answer: str) -> list[dict]:
    lines = [line for line in answer.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("breaks_writer", [False, True])
def test_a_bug_in_mid_stream_is_an_error_event(
    stack, monkeypatch, caplog, path: str, breaks_writer: bool
) -> None:
    """The client learns that the answer is not whole, and the log says why."""

    async def fail(service, completion, **_):
        yield [Update(0, [Text("a")], None, None)]
        raise RuntimeError("a secret")

    def fail_again(*_):
        raise RuntimeError("another secret")

    monkeypatch.setattr(ChatService, "answer", fail)
    if breaks_writer:
        monkeypatch.setattr(RequestContext, "error_events", fail_again)
    name, labels = "triptych_gateway_requests_total", {"outcome": "internal_error"}
    num_failed = stack.metric(name, **labels)
    answer = post(stack, path, {**STREAMS[path], "model": MODEL, "stream": True})
    assert answer.status_code == 200 and "secret" not in answer.text
    last = events_of(answer.text)[-1]
    if breaks_writer or "completions" in path:
        assert last["error"]["code"] == "internal_error"
    elif path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    else:
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "RuntimeError: a secret" in caplog.text and "Traceback" in caplog.text
    stack.wait(lambda: stack.metric(name, **labels) == num_failed + 1)
    monkeypatch.undo()
    assert stack.chat().status_code == 200


def test_a_bug_behind_the_answers_end_sends_nothing_more(stack, monkeypatch, caplog) -> None:
    write = Exchange.write

    async def fail(exchange, data, *, last=False):
        await write(exchange, data, last=last)
        if last:
            raise RuntimeError("a secret")

    monkeypatch.setattr(Exchange, "write", fail)
    answer = stack.chat(stream=True).text
    assert answer.endswith("data: [DONE]\n\n") and "error" not in answer
    monkeypatch.undo()
    stack.wait(lambda: "a secret" in caplog.text)
