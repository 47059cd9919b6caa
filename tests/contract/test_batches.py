"""/v1/files and /v1/batches by OpenAI's own client: what a batch answers, whose it is, its ends."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from services.common.errors import Overloaded
from services.common.pb.decoder_pb2 import Adapter
from services.gateway.batches.batch_runner import RunnerBounds
from services.gateway.batches.line_caller import LineCaller
from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S, wait_until
from tests.redis_server import RedisServer
from triptych.serve import REDIS_RULES

QUICK = RunnerBounds(tick=0.02, retry=0.02, last_retry=0.1, lease=PATIENCE_S)
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = CHAT, method: str = "POST", **body: object) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": f"hello {custom_id}"}]}
    if url != CHAT:
        content = {"input" if "responses" in url else "prompt": f"hello {custom_id}"}
    body = {"model": MODEL, **content, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def send(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def end_of(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, "the batch has ended")
    return client.batches.retrieve(batch_id)


def counts(client: openai.OpenAI, batch_id: str) -> Any:
    return client.batches.retrieve(batch_id).request_counts


def results(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def client_of(stack: GatewayStack, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def _batching(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("batching"), batch_bounds=QUICK, log_level="ERROR",
        api_keys="first,second", batch_bytes=1 << 20,
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def batching(_batching: GatewayStack) -> GatewayStack:
    """A gateway with two tenants and without Redis, reset."""
    _batching.reset()
    return _batching


@pytest.fixture
def client(batching: GatewayStack) -> Iterator[openai.OpenAI]:
    with client_of(batching, "first") as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)


def test_a_batch_is_answered_in_order_with_its_ids(client, batching) -> None:
    """Answers are those of the endpoint itself. Wrong lines are in the error file."""
    lines = [line(f"id-{n}") for n in range(40)]
    lines[7]["body"]["messages"] = asking(image_url())
    lines[11] = line("wrong", temperature=-1)
    lines[12] = line("no such model", model="other")
    batch = send(client, jsonl(lines), metadata={"for": "me"})
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"for": "me"}
    batch = end_of(client, batch.id)
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 38, "failed": 2}
    found = results(client, batch.output_file_id)
    right = [each["custom_id"] for each in lines if each["custom_id"].startswith("id-")]
    assert [each["custom_id"] for each in found] == right
    assert len({each["id"] for each in found}) == 38
    for each in found:
        assert each["error"] is None and each["response"]["status_code"] == 200
        answer = ChatCompletion.model_validate(each["response"]["body"])
        assert answer.choices[0].message.content == "A red circle."
    wrong, other = results(client, batch.error_file_id)
    assert wrong["custom_id"] == "wrong" and wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    assert other["response"]["body"]["error"]["code"] == "model_not_found"
    described = client.files.retrieve(batch.output_file_id)
    assert described.purpose == "batch_output" and described.status == "processed"
    assert described.bytes == len(client.files.content(batch.output_file_id).content)
    # All of its work was background work of the tenant, and nothing is left of it.
    submits = batching.decoder.submits
    assert len(submits) == 38 and all(submit.background for submit in submits)
    assert {submit.tenant.endswith("/batch") for submit in submits} == {True}
    assert all(call.background for call in batching.encoder.requests)
    batching.wait(lambda: batching.gateway.admission.num_running == 0)
    tenant = submits[0].tenant.removesuffix("/batch")
    usage = batching.metric(
        "triptych_gateway_tenant_usage_total", tenant=tenant, kind="completion_tokens"
    )
    assert usage >= 38
    assert batching.metric("triptych_gateway_ttft_seconds_count") == 0


def test_requests_have_a_turn_between_two_lines(
    client, batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks for other work after it has begun a line, however many may run."""
    own, turn, begun = LineCaller.call, [0], list[int]()

    def next_turn() -> None:
        turn[0] += 1
        if turn[0] > 0:
            asyncio.get_running_loop().call_soon(next_turn)

    async def call(caller: LineCaller, *given: Any) -> Any:
        if not begun:
            next_turn()
        begun.append(turn[0])
        return await own(caller, *given)

    monkeypatch.setattr(LineCaller, "call", call)
    batching.decoder.delay_s = 0.01
    try:
        assert end_of(client, send(client, jsonl([line(str(n)) for n in range(200)])).id)
        assert len(begun) == 200
        assert max(Counter(begun[1:]).values()) <= 2
    finally:
        turn[0] = -1 << 60


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
def test_other_endpoints_are_served(client, url: str) -> None:
    batch = end_of(client, send(client, jsonl([line("a", url), line("b", url)]), url).id)
    assert batch.status == "completed", batch.errors
    objects = {each["response"]["body"]["object"] for each in results(client, batch.output_file_id)}
    assert objects == {"text_completion" if "completions" in url else "response"}


FAULTS = [
    ([line("a"), line("a")], "duplicate_custom_id", 2),
    ([line("a"), line("b", "/v1/completions")], "mismatched_url", 2),
    ([line("a", method="GET")], "invalid_method", 1),
    ([line("a"), line("b", stream=True)], "invalid_request", 2),
    ([{"custom_id": "a"}], "invalid_json_line", 1),
    ([line("a"), "text"], "invalid_json_line", 2),
]


@pytest.mark.parametrize(("lines", "code", "number"), FAULTS)
def test_a_file_with_a_wrong_line_fails_before_a_line_runs(
    client, batching, lines, code, number
) -> None:
    batch = end_of(client, send(client, jsonl(lines)).id)
    assert batch.status == "failed" and batch.failed_at
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, number)
    assert batch.output_file_id is None and not batching.decoder.submits


def test_wrong_requests_are_refused_by_field(client, batching) -> None:
    with pytest.raises(openai.BadRequestError, match="media") as refused:
        client.files.create(file=("x.jsonl", b"{}"), purpose="vision")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.files.create(file=("x.jsonl", b""), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="GATEWAY_BATCH_BYTES") as refused:
        client.files.create(file=("x.jsonl", bytes(1 << 20)), purpose="batch")
    assert refused.value.status_code == 413
    file = client.files.create(file=("x.jsonl", jsonl([line("a")])), purpose="batch")
    for field, wrong in [
        ("input_file_id", "file-none"), ("endpoint", "/v1/embeddings"),
        ("endpoint", "/v1/moderations"), ("completion_window", "1d"), ("completion_window", "999h"),
    ]:  # fmt: skip
        given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(**(given | {field: wrong}))
        assert refused.value.param == field
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_none")
    with pytest.raises(openai.NotFoundError):
        client.files.content("file-none")
    with batching.client(headers={"authorization": "Bearer first"}) as http:
        form = {"content-type": "multipart/form-data; boundary=b"}
        assert http.post("/v1/files", content=b"--b\r\nwrong", headers=form).status_code == 400
        assert http.get("/v1/files?limit=0").json()["error"]["param"] == "limit"
    with batching.client(headers={"origin": "http://elsewhere.example"}) as http:
        assert http.post("/v1/files", files={"file": b"{}"}).status_code in (401, 403)


def test_lists_have_pages(client) -> None:
    ids = [send(client, jsonl([line("a")])).id for _ in range(3)]
    for each in ids:
        end_of(client, each)
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    files = list(client.files.list(purpose="batch", order="asc", limit=2))
    assert [file.id for file in files] == [client.batches.retrieve(i).input_file_id for i in ids]


def test_files_and_batches_are_visible_to_their_tenant_alone(client, batching) -> None:
    batch = end_of(client, send(client, jsonl([line("a")])).id)
    with client_of(batching, "second") as other:
        assert not list(other.files.list()) and not list(other.batches.list())
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            for name in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    call(name)
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.BadRequestError):
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )


def test_a_cancelled_batch_keeps_its_results(client, batching) -> None:
    """Lines that have not ended are in the error file, and the input cannot go meanwhile."""
    decoder = batching.decoder

    async def hold(submit) -> None:
        if len(decoder.submits) > 4:
            await forever.wait()

    forever = batching.on_loop(asyncio.Event)
    decoder.before = hold
    batch = send(client, jsonl([line(str(n)) for n in range(30)]))
    wait_until(lambda: counts(client, batch.id).completed == 4, "four lines")
    with pytest.raises(openai.BadRequestError, match=batch.id):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = end_of(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    answered = results(client, batch.output_file_id)
    given_up = results(client, batch.error_file_id)
    assert (len(answered), len(given_up)) == (4, 26)
    assert {each["error"]["code"] for each in given_up} == {"batch_cancelled"}
    assert {each["custom_id"] for each in answered + given_up} == {str(n) for n in range(30)}
    wait_until(lambda: not decoder.running, "the lines were cancelled")
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)
    batching.on_loop(forever.set)


@pytest.mark.parametrize("reason", ["expired", "full"])
def test_a_batch_that_is_given_up_keeps_its_results(client, batching, reason: str) -> None:
    """One whose completion window is over, and one whose results take too many bytes."""
    decoder, store = batching.decoder, batching.gateway.batches.store
    forever = batching.on_loop(asyncio.Event)

    async def hold(submit) -> None:
        if len(decoder.submits) > 4:
            await forever.wait()

    decoder.before = hold
    batch = send(client, jsonl([line(str(n)) for n in range(30)]))
    wait_until(lambda: counts(client, batch.id).completed == 4, "four lines")

    def give_up() -> None:
        if reason == "full":
            store.files.max_tenant_bytes = 1
            return
        (key,) = (key for key in store._state._texts if key.endswith(f"/{batch.id}")
                  and key.startswith("batch:"))  # fmt: skip
        data, end = store._state._texts[key]
        record = json.loads(data) | {"expires_at": 1}
        store._state._texts[key] = json.dumps(record).encode(), end

    most = store.files.max_tenant_bytes
    batching.on_loop(give_up)
    batch = end_of(client, batch.id)
    store.files.max_tenant_bytes = most
    assert len(results(client, batch.output_file_id)) == 4
    if reason == "full":
        assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
    else:
        assert batch.status == "expired" and batch.expired_at
        given_up = results(client, batch.error_file_id)
        assert len(given_up) == 26
        assert {each["error"]["code"] for each in given_up} == {"batch_expired"}
    batching.on_loop(forever.set)


def test_lost_decoders_and_full_ones_cost_no_line(client, batching) -> None:
    """A decoder that ends under every line, and one that refuses some at first."""
    refused: set[str] = set()

    async def refuse(submit) -> None:
        if len(refused) < 8 and submit.request_id not in refused:
            refused.add(submit.request_id)
            raise Overloaded("full")

    batching.decoder.before = refuse
    batch = end_of(client, send(client, jsonl([line(str(n)) for n in range(20)])).id)
    assert batch.request_counts.completed == 20 and len(refused) == 8
    assert batching.metric("triptych_gateway_batch_lines_total", outcome="retried") >= 1


def test_a_restart_of_its_adapters_decoder_costs_no_line(loop_thread, tmp_path: Path) -> None:
    """The other decoder, which lacks the adapter, is healthy all the time."""
    stack = GatewayStack(
        loop_thread, tmp_path, num_decoders=2, batch_bounds=QUICK, log_level="ERROR",
        batch_bytes=1 << 20,
    )  # fmt: skip
    pool, restarting = stack.gateway.service.decoders, stack.decoders[1]
    restarting.adapters["sql"] = Adapter(name="sql", digest=b"sql")
    stack.wait(lambda: any(pod.adapters for pod in pool.healthy()))
    stack.thread.run(restarting.stop())
    stack.wait(lambda: len(pool.healthy()) == 1)
    with client_of(stack) as client:
        started = send(client, jsonl([line(str(n), model="sql") for n in range(5)]))
        labels = {"outcome": "retried"}
        name = "triptych_gateway_batch_lines_total"
        stack.wait(lambda: stack.metric(name, **labels) > 5 * 4)
        stack.thread.run(restarting.start(restarting.address))
        assert end_of(client, started.id).request_counts.completed == 5
    stack.close()


def test_a_line_whose_adapter_does_not_come_back_fails(client, batching) -> None:
    """While no decoder is there, each name may be that of an adapter."""
    batching.thread.run(batching.decoder.stop())
    batching.wait(lambda: not batching.gateway.service.decoders.healthy())
    started = send(client, jsonl([line("a"), line("b", model="sql")]))
    batching.thread.run(batching.decoder.start(batching.decoder.address))
    batch = end_of(client, started.id)
    assert batch.request_counts.completed == batch.request_counts.failed == 1
    (failed,) = results(client, batch.error_file_id)
    assert failed["custom_id"] == "b" and failed["response"]["status_code"] == 404


@pytest.mark.parametrize("form", ["tokens", "strings"])
def test_a_file_of_each_form_is_stored(client, batching, form: str) -> None:
    """.NET writes names without quotes."""
    mark = '"' if form == "strings" else ""
    purpose = f"Content-Disposition: form-data; name={mark}purpose{mark}\r\n\r\nbatch"
    file = (
        f"Content-Disposition: form-data; name={mark}file{mark}; filename={mark}l.jsonl{mark}; "
        "filename*=utf-8''l.jsonl\r\n\r\n"
    )
    content = jsonl([line("a")]).decode()
    body = f"--b\r\n{purpose}\r\n--b\r\n{file}{content}\r\n--b--\r\n".encode()
    headers = {
        "content-type": 'multipart/form-data; boundary="b"', "authorization": "Bearer first"
    }  # fmt: skip
    with batching.client(headers=headers) as http:
        stored = http.post("/v1/files", content=body).json()
        wrong = http.post("/v1/files", content=body.replace(b"purpose", b"pur pose"))
    assert stored["filename"] == "l.jsonl" and stored["bytes"] == len(content)
    assert client.files.content(stored["id"]).content == content.encode()
    assert form == "strings" or "part 1 of the form cannot be read" in wrong.text
    assert wrong.status_code == 400


def test_another_gateway_continues_and_no_line_is_lost_or_twice(
    loop_thread, tmp_path: Path
) -> None:
    """The first gateway loses its lease in the middle, as if it were frozen, and later ends.
    Everything is in Redis, as its user with the rules of the deployment.
    """
    users = tmp_path / "users.acl"
    rules = {"default": "~* +@all", "gateway": REDIS_RULES["gateway"]}
    users.write_text("".join(f"user {u} on nopass {r}\n" for u, r in rules.items()))
    with RedisServer("--aclfile", str(users)) as server:
        stacks = [
            GatewayStack(
                loop_thread, tmp_path / str(n), text_only=True, num_encoders=0,
                batch_bounds=QUICK, redis_url=server.url_of("gateway"), log_level="ERROR",
            )
            for n in range(2)
        ]  # fmt: skip
        first, second = stacks
        try:
            _hand_over(first, second, server)
        finally:
            for stack in stacks:
                stack.close()


def _hand_over(first: GatewayStack, second: GatewayStack, server: RedisServer) -> None:
    runners: list[Any] = [stack.gateway.batches for stack in (first, second)]
    second.on_loop(lambda: setattr(runners[1], "_closing", True))  # looks for nothing yet
    wait_until(runners[1]._task.done, "the second one is still")
    thawed, decoder = first.on_loop(asyncio.Event), first.decoder

    async def hold(submit) -> None:
        if len(decoder.submits) > 10:
            await thawed.wait()

    decoder.before = hold
    with client_of(first) as client, client_of(second) as other:
        batch = send(client, jsonl([line(str(n)) for n in range(60)]))
        wait_until(lambda: counts(client, batch.id).completed == 10, "ten lines")
        first.on_loop(lambda: setattr(runners[0], "_closing", True))
        wait_until(runners[0]._task.done, "the first one renews no lease, and its lines wait")
        num_held = len(decoder.submits) - 10
        with server.client() as redis:  # the lease's time is over
            (lease,) = redis.keys("*:lease:*")  # type: ignore[misc]
            redis.delete(lease)
        second.on_loop(runners[1].start)
        wait_until(lambda: len(second.decoder.submits) > 5, "the second one continues")
        first.on_loop(thawed.set)  # what it has now was given to the second one
        batch = end_of(other, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
        found = results(other, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [str(n) for n in range(60)]
        assert num_held > 0 and len(second.decoder.submits) == 50
        wait_until(lambda: not runners[0].names, "the first one has learned that it lost the lease")
        for file in list(other.files.list()):
            other.files.delete(file.id)
        keys = server.keys()
        assert not [key for key in keys if b"piece" in key or b"output" in key]
        with server.client() as redis:
            sizes = redis.hgetall("triptych:kept:@batch:bytes")
        assert set(sizes.values()) == {b"0"}  # type: ignore[union-attr]


def test_a_batch_takes_half_of_its_tenants_limits(loop_thread, tmp_path: Path) -> None:
    """The other half is left to requests of the tenant."""
    keys = tmp_path / "keys.json"
    digest = hashlib.sha256(b"secret").hexdigest()
    content = {
        "tenants": {"t": {"requests_per_minute": 20}},
        "keys": [{"id": "k", "tenant": "t", "sha256": digest}],
    }
    keys.write_text(json.dumps(content))
    stack = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0,
        batch_bounds=replace(QUICK, max_lines=1), api_keys=f"file:{keys}", log_level="ERROR",
    )  # fmt: skip
    try:
        with client_of(stack, "secret") as client:
            batch = send(client, jsonl([line(str(n)) for n in range(30)]))
            # The upload and the creation are requests, too; the lines take what is left of ten.
            wait_until(lambda: len(stack.decoder.submits) == 8, "the lines of half a limit")
            for _ in range(10):
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "now"}]
                )
            assert sum(submit.background for submit in stack.decoder.submits) == 8
            client.batches.cancel(batch.id)
            end_of(client, batch.id)
    finally:
        stack.close()
