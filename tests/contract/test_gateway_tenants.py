"""Requests of two tenants that are ready together: one's flood does not go before the other's."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S

NUM_FLOOD = 150


@pytest.fixture
def stack(loop_thread, tmp_path) -> Iterator[GatewayStack]:
    found = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0, api_keys="flooding,quiet",
        log_level="ERROR",
    )  # fmt: skip
    yield found
    found.close()


def request(key: str) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %s\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (key.encode(), len(body), body)
    )


def test_a_request_is_not_behind_the_flood_that_came_with_it(stack: GatewayStack) -> None:
    keys = ["flooding"] * NUM_FLOOD + ["quiet"]
    with ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S))
            for _ in keys
        ]
        accepted = stack.server.server_state.connections
        stack.wait(lambda: len(accepted) == len(keys))

        # While the loop stands still all requests arrive; then it has them at once.
        def stand_still() -> None:
            for connection, key in zip(connections, keys, strict=True):
                connection.sendall(request(key))
            time.sleep(0.1)

        stack.on_loop(stand_still)
        for connection in connections:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    tenants = [submit.tenant for submit in stack.decoder.submits]
    counts = Counter(tenants)
    (quiet,) = (tenant for tenant, count in counts.items() if count == 1)
    assert counts.total() == NUM_FLOOD + 1
    assert tenants.index(quiet) < NUM_FLOOD // 10


def test_requests_that_follow_each_other_unasked_are_their_own_keys(stack: GatewayStack) -> None:
    """A server may begin a pipelined request in what is left of the one before."""
    keys = ["flooding", "quiet", "unknown", "flooding"]
    with socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S) as connection:
        connection.sendall(b"".join(map(request, keys)))
        answers = b""
        while answers.count(b"HTTP/1.1 ") < 4 or not answers.endswith(b"}"):
            answers += connection.recv(1 << 16)
    statuses = [answer[:3] for answer in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"401", b"200"]
    first, second, third = (submit.tenant for submit in stack.decoder.submits)
    assert first == third != second


def test_the_access_log_names_tenant_model_and_tokens(stack: GatewayStack, caplog) -> None:
    logger = "services.gateway.http.middleware"
    with caplog.at_level("INFO", logger), stack.client() as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        key = {"Authorization": "Bearer quiet"}
        usage = client.post("/v1/chat/completions", json=body, headers=key).json()["usage"]
        assert client.get("/v1/models", headers=key).status_code == 200
        assert client.get("/v1/models").status_code == 401
        stack.wait(lambda: sum(r.name == logger for r in caplog.records) == 3)
    chat, models, refused = (r.fields for r in caplog.records if r.name == logger)
    assert chat["model"] == MODEL and chat["outcome"] == "stop" and chat["tenant"]
    assert chat["prompt_tokens"] == usage["prompt_tokens"] > 0
    assert chat["completion_tokens"] == usage["completion_tokens"] > 0
    assert models.keys() == {"ms", "tenant"} and models["tenant"] == chat["tenant"]
    assert refused.keys() == {"ms"}
