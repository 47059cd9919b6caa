"""GET /metrics and /load, POST /reset_prefix_cache: what they do, and for whom."""

import hashlib
import json

import pytest

from services.gateway.http.middleware import scope_of
from tests.gateway_stack import GatewayStack

PATHS = [("/metrics", "GET"), ("/load", "GET"), ("/reset_prefix_cache", "POST")]


def ask(stack, path, method, key=""):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with stack.client(headers=headers) as client:
        return client.request(method, path)


def test_metrics_are_those_of_the_port(stack):
    before = stack.metric("triptych_gateway_requests_total", outcome="stop")
    assert stack.chat().status_code == 200
    # The gateway counts a request after it has written the answer.
    stack.wait(
        lambda: stack.metric("triptych_gateway_requests_total", outcome="stop") == before + 1
    )
    response = ask(stack, "/metrics", "GET")
    assert response.headers["content-type"].startswith("text/plain")
    assert f'triptych_gateway_requests_total{{outcome="stop"}} {before + 1}' in response.text


def test_load_counts_requests_that_run(stack):
    assert ask(stack, "/load", "GET").json() == {"server_load": 0}
    stack.decoder.reply, stack.decoder.delay_s = [40] * 1000, 0.2
    with stack.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            assert ask(stack, "/load", "GET").json() == {"server_load": 1}
            assert stack.metric("triptych_gateway_requests_running") == 1


def test_all_decoders_empty_their_caches(pair):
    assert ask(pair, "/reset_prefix_cache", "POST").json() == {"decoders": 2}
    assert [decoder.num_resets for decoder in pair.decoders] == [1, 1]
    for decoder in pair.decoders:
        pair.thread.run(decoder.stop())
    pair.wait(lambda: not pair.gateway.service.decoders.healthy())
    response = ask(pair, "/reset_prefix_cache", "POST")
    assert response.status_code == 503 and response.headers["retry-after"]


@pytest.fixture(scope="module")
def keyed(loop_thread, tmp_path_factory):
    """A gateway whose keys have a scope each, as their name says."""
    directory = tmp_path_factory.mktemp("keyed")
    keys = [
        {"id": scope, "tenant": "t", "sha256": hashlib.sha256(scope.encode()).hexdigest(),
         "scopes": [scope]}
        for scope in ("inference", "metrics", "admin")
    ]  # fmt: skip
    (directory / "keys.json").write_text(json.dumps({"keys": keys}))
    stack = GatewayStack(
        loop_thread, directory, api_keys=f"file:{directory / 'keys.json'}", log_level="ERROR"
    )
    yield stack
    stack.close()


@pytest.mark.parametrize(("path", "method"), [*PATHS, ("/version", "GET")])
def test_a_key_opens_what_its_scope_says(keyed, path, method):
    for key in ("inference", "metrics", "admin"):
        status = ask(keyed, path, method, key).status_code
        assert status == (200 if key == scope_of(path) else 403)
    assert ask(keyed, path, method).status_code == 401


def test_what_a_key_does_not_open_is_told_in_the_shape_of_the_path(keyed):
    answer = ask(keyed, "/v1/messages", "POST", "metrics")
    assert answer.status_code == 403
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "permission_error"
    assert "type" not in ask(keyed, "/v1/chat/completions", "POST", "metrics").json()


def test_without_keys_only_a_gateway_of_this_machine_opens_them(loop_thread, tmp_path):
    stack = GatewayStack(loop_thread, tmp_path, host="0.0.0.0", api_keys="none", log_level="ERROR")
    try:
        for path, method in PATHS:
            assert ask(stack, path, method).status_code == 403
        assert stack.chat().status_code == 200
    finally:
        stack.close()


def test_a_key_that_is_alone_opens_everything_and_one_of_several_does_not(loop_thread, tmp_path):
    for keys, status in (("one", 200), ("one,two", 403)):
        stack = GatewayStack(loop_thread, tmp_path / keys, api_keys=keys, log_level="ERROR")
        try:
            assert {ask(stack, *found, "one").status_code for found in PATHS} == {status}
        finally:
            stack.close()
