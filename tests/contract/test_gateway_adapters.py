"""Adapters by name: every surface, the list of models, loading, unloading, and who sees what."""

import hashlib
import json
from collections.abc import Iterator

import pytest

from services.gateway.clients.pods import Pod
from services.gateway.clients.served_adapters import LOAD_TIMEOUT_S
from tests.fakes import FakeDecoder
from tests.gateway_stack import MODEL, GatewayStack

SURFACES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}


def post(stack: GatewayStack, path: str, body: dict, key: str = ""):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with stack.client(headers=headers) as client:
        return client.post(path, json=body)


def load(stack: GatewayStack, name: str = "sql", key: str = ""):
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
    return post(stack, "/v1/load_lora_adapter", body, key)


def names(stack: GatewayStack, key: str = "") -> dict[str, str | None]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with stack.client(headers=headers) as client:
        return {each["id"]: each["parent"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("path", SURFACES)
def test_each_surface_serves_an_adapter_under_its_name(stack: GatewayStack, path: str) -> None:
    assert load(stack).text == "Success: LoRA adapter 'sql' added successfully."
    answer = post(stack, path, SURFACES[path] | {"model": "sql"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "sql"
    assert stack.decoder.submits[-1].adapter.strip() == b"sql"
    base = post(stack, path, SURFACES[path] | {"model": MODEL})
    assert base.json()["model"] == MODEL and stack.decoder.submits[-1].adapter == b""
    missing = post(stack, path, SURFACES[path] | {"model": "other"})
    assert missing.status_code == 404 and "sql" in missing.text


def test_models_are_listed_with_their_parent(stack: GatewayStack) -> None:
    load(stack)
    assert names(stack) == {MODEL: None, "sql": MODEL}
    with stack.client() as client:
        assert client.get("/v1/models/sql").json()["parent"] == MODEL
        assert client.get("/v1/models/other").status_code == 404


def test_pickers_read_the_loaded_adapters(stack: GatewayStack) -> None:
    info = "vllm:lora_requests_info{"
    with stack.client() as client:
        assert info not in client.get("/metrics").text
        load(stack)
        assert stack.decoder.load is not None
        stack.decoder.load.max_adapters = 4
        pods = stack.gateway.service.decoders
        stack.wait(lambda: any(found.max_adapters for found in pods.loads()))
        (line,) = [x for x in client.get("/metrics").text.splitlines() if x.startswith(info)]
        assert 'max_lora="4"' in line and 'running_lora_adapters="sql"' in line
        assert 'waiting_lora_adapters=""' in line
        stack.decoder.adapters["sql"].num_waiting = 2
        stack.wait(lambda: any(a.num_waiting for found in pods.loads() for a in found.adapters))
        assert 'waiting_lora_adapters="sql"' in client.get("/metrics").text


def test_unloading_interrupts_no_stream(stack: GatewayStack) -> None:
    load(stack)
    stack.decoder.delay_s = 0.05
    body = SURFACES["/v1/chat/completions"] | {"model": "sql", "stream": True}
    with stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as open:
        lines = open.iter_lines()
        next(lines)
        removed = post(stack, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
        assert names(stack) == {MODEL: None}
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and all('"model":"sql"' in line for line in rest[:-1])
    assert post(stack, "/v1/chat/completions", body).status_code == 404


def test_a_call_that_cannot_be_obeyed_is_an_error_that_names_why(stack: GatewayStack) -> None:
    unload = post(stack, "/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert unload.status_code == 404 and "is not loaded" in unload.text
    assert load(stack).status_code == 200
    assert load(stack).status_code == 400
    assert load(stack, MODEL).status_code == 400
    assert post(stack, "/v1/load_lora_adapter", {"lora_name": "a"}).status_code == 400
    assert (
        post(stack, "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}).status_code == 400
    )
    stack.decoder.refuses_adapters = "rank 512 is not supported"
    refused = load(stack, "wide")
    assert refused.status_code == 400 and "rank 512" in refused.text
    assert names(stack) == {MODEL: None, "sql": MODEL}


def test_an_adapter_that_one_decoder_refuses_is_on_none(pair: GatewayStack) -> None:
    pair.decoders[1].refuses_adapters = "out of memory"
    assert load(pair).status_code == 400
    assert not pair.decoders[0].adapters and names(pair) == {MODEL: None}


def test_a_decoder_may_take_longer_to_load_than_to_answer_a_check(
    pair: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[tuple[str, tuple[float, ...]]](), Pod.ask

    async def recorded(pod, method, request, *timeout_s):
        asked.append((type(request).__name__, timeout_s))
        return await ask(pod, method, request, *timeout_s)

    monkeypatch.setattr(Pod, "ask", recorded)
    assert load(pair).status_code == 200
    found = [timeout_s for name, timeout_s in asked if name == "LoadAdapterRequest"]
    assert found == [(LOAD_TIMEOUT_S,)] * 2


def test_only_decoders_with_the_adapter_get_its_requests(pair: GatewayStack) -> None:
    load(pair)
    (lacking, having) = pair.decoders
    lacking.adapters.clear()
    pods = pair.gateway.service.decoders
    pair.wait(lambda: sum(bool(pod.adapters) for pod in pods.healthy()) == 1)
    body = SURFACES["/v1/chat/completions"] | {"model": "sql"}
    assert all(post(pair, "/v1/chat/completions", body).status_code == 200 for _ in range(6))
    assert len(having.submits) == 6 and not lacking.submits


def stop(stack: GatewayStack, decoder: FakeDecoder) -> None:
    """Ends a decoder, and waits until the gateway has noticed it."""
    pool = stack.gateway.service.decoders
    stack.thread.run(decoder.stop())
    stack.wait(lambda: decoder.address not in {pod.address for pod in pool.healthy()})


def restart(stack: GatewayStack, decoder: FakeDecoder) -> None:
    stack.thread.run(decoder.start(decoder.address))
    stack.wait(stack.all_healthy)


def test_a_request_may_be_tried_again_while_no_decoder_is_there(stack: GatewayStack) -> None:
    load(stack)
    stop(stack, stack.decoder)
    for path, fields in SURFACES.items():
        for model in (MODEL, "sql", "other"):  # nobody knows what the next decoder has
            answer = post(stack, path, fields | {"model": model})
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1", model
    assert names(stack) == {MODEL: None, "sql": MODEL}
    with stack.client() as client:
        assert client.get("/v1/models/sql").json()["parent"] == MODEL
        assert client.get("/v1/models/other").status_code == 503
    assert post(stack, "/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 503
    restart(stack, stack.decoder)
    body = SURFACES["/v1/chat/completions"]
    for model, status in ((MODEL, 200), ("sql", 200), ("other", 404)):
        assert post(stack, "/v1/chat/completions", body | {"model": model}).status_code == status


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_adapter_is_missed_while_its_decoder_restarts(
    pair: GatewayStack, comes_back: bool
) -> None:
    """The other decoder never had it. One that was loaded by a call does not come back."""
    load(pair)
    lacking, having = pair.decoders
    lacking.adapters.clear()
    pods = pair.gateway.service.decoders
    pair.wait(lambda: sum(bool(pod.adapters) for pod in pods.healthy()) == 1)
    stop(pair, having)
    body = SURFACES["/v1/chat/completions"]
    for model, status in ((MODEL, 200), ("sql", 503), ("other", 404)):
        answer = post(pair, "/v1/chat/completions", body | {"model": model})
        assert answer.status_code == status, model
        assert (answer.headers.get("retry-after") == "1") is (status == 503)
    assert names(pair) == {MODEL: None, "sql": MODEL}
    unload = post(pair, "/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert unload.status_code == 503 and unload.json()["error"]["code"] == "unavailable"
    if not comes_back:
        having.adapters.clear()
    restart(pair, having)
    answer = post(pair, "/v1/chat/completions", body | {"model": "sql"})
    assert answer.status_code == (200 if comes_back else 404)
    assert ("sql" in names(pair)) is comes_back


def test_an_unloaded_adapter_is_not_missed(pair: GatewayStack) -> None:
    load(pair)
    stop(pair, pair.decoders[1])
    assert post(pair, "/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
    assert names(pair) == {MODEL: None}
    body = SURFACES["/v1/chat/completions"] | {"model": "sql"}
    assert post(pair, "/v1/chat/completions", body).status_code == 404


@pytest.fixture
def keyed(loop_thread, tmp_path) -> Iterator[GatewayStack]:
    """Two tenants, of which one has a list of adapters, and an administrator."""
    keys = [
        {
            "id": name, "tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(),
            "scopes": ["admin" if name == "admin" else "inference"],
        }
        for name in ("free", "bound", "admin")
    ]  # fmt: skip
    file = {"keys": keys, "tenants": {"bound": {"adapters": ["sql"]}}}
    (tmp_path / "keys.json").write_text(json.dumps(file))
    found = GatewayStack(
        loop_thread, tmp_path, api_keys=f"file:{tmp_path / 'keys.json'}", log_level="ERROR"
    )
    yield found
    found.close()


def test_a_tenant_sees_and_uses_the_adapters_of_its_list_alone(keyed: GatewayStack) -> None:
    assert load(keyed, "sql", "free").status_code == 403
    assert load(keyed, "sql", "admin").status_code == 200
    assert load(keyed, "secret", "admin").status_code == 200
    assert names(keyed, "free") == {MODEL: None, "sql": MODEL, "secret": MODEL}
    assert names(keyed, "bound") == {MODEL: None, "sql": MODEL}
    for key, name, status in (
        ("free", "secret", 200),
        ("bound", "sql", 200),
        ("bound", "secret", 404),
    ):
        body = SURFACES["/v1/chat/completions"] | {"model": name}
        answer = post(keyed, "/v1/chat/completions", body, key)
        assert answer.status_code == status
        assert status == 200 or "secret" not in answer.text.replace("'secret'", "")


def test_adapters_of_others_do_not_exist_while_no_decoder_is_there(keyed: GatewayStack) -> None:
    for name in ("sql", "secret"):
        load(keyed, name, "admin")
    stop(keyed, keyed.decoder)
    assert names(keyed, "free") == {MODEL: None, "sql": MODEL, "secret": MODEL}
    assert names(keyed, "bound") == {MODEL: None, "sql": MODEL}
    for key, name, status in (
        ("free", "secret", 503),
        ("bound", "sql", 503),
        ("bound", "secret", 404),
    ):
        body = SURFACES["/v1/chat/completions"] | {"model": name}
        assert post(keyed, "/v1/chat/completions", body, key).status_code == status
