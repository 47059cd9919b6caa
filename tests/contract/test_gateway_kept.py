"""Answers and images that clients name again: `previous_response_id`, `uuid`; whose they are."""

import base64
import json

import openai
import pytest
from blake3 import blake3

from tests.contract.test_gateway_responses import (
    THOUGHT,
    TOOLS,
    chat_prompt,
    client_of,
    events_of,
    prompt,
    say,
)
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import wait_until
from tests.redis_server import RedisServer
from tests.unit.gateway.test_answers import CALLS


def post(stack, key="", **fields):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with stack.client(headers=headers) as client:
        return client.post("/v1/responses", json={"model": MODEL, "input": "hello", **fields})


def get(stack, response_id, method="GET", key=""):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with stack.client(headers=headers) as client:
        return client.request(method, f"/v1/responses/{response_id}")


@pytest.fixture
def client(stack):
    with client_of(stack) as client:
        yield client


def test_a_conversation_goes_on_from_an_answer(client, stack):
    first = client.responses.create(model=MODEL, input="one", instructions="Be brief.")
    assert first.model_extra["store"] is True
    second = client.responses.create(
        model=MODEL, input="two", previous_response_id=first.id, instructions="Be long."
    )
    assert second.previous_response_id == first.id
    third = client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    answer = {"role": "assistant", "content": "A red circle."}
    one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
    assert prompt(stack) == chat_prompt(stack, messages=[one, answer, two, answer, three])
    # Another branch, with instructions of its own alone.
    client.responses.create(
        model=MODEL, input="two", previous_response_id=first.id, instructions="Be kind."
    )
    system = {"role": "system", "content": "Be kind."}
    assert prompt(stack) == chat_prompt(stack, messages=[system, one, answer, two])
    assert client.responses.retrieve(third.id) == third
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(third.id, stream=True)


def test_thoughts_and_calls_are_part_of_it(thinking):
    with client_of(thinking) as client:
        say(thinking, THOUGHT + "Text. " + CALLS["hermes"])
        first = client.responses.create(model=MODEL, input="one", tools=TOOLS)
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        say(thinking, "Thanks.")
        client.responses.create(
            model=MODEL, input=[result], tools=TOOLS, previous_response_id=first.id
        )
        found = prompt(thinking)
        sent = [{"role": "user", "content": "one"}, *map(dict, first.output), result]
        client.responses.create(model=MODEL, input=sent, tools=TOOLS)
        assert found == prompt(thinking)


def test_items_of_answers_are_named_instead_of_sent(thinking):
    with client_of(thinking) as client:
        say(thinking, THOUGHT + "Text. " + CALLS["hermes"])
        first = client.responses.create(model=MODEL, input="one", tools=TOOLS)
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        one = {"role": "user", "content": "one"}
        client.responses.create(model=MODEL, input=[one, *first.output, result], tools=TOOLS)
        found = prompt(thinking)
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        second = client.responses.create(model=MODEL, input=[one, *named, result], tools=TOOLS)
        assert len(named) == 4 and prompt(thinking) == found
        # What is kept has the items themselves.
        client.responses.delete(first.id)
        client.responses.create(model=MODEL, input="two", previous_response_id=second.id)
        for wrong in (named[0], {"type": "item_reference"}, {**named[0], "id": "x"}):
            refused = post(thinking, input=[one, wrong])
            assert refused.status_code == 404 and refused.json()["error"]["param"] == "input[1].id"


def test_an_item_is_named_once(stack):
    item = post(stack).json()["output"][0]
    named = {"type": "item_reference", "id": item["id"]}
    refused = post(stack, input=[named, named])
    assert refused.status_code == 404 and refused.json()["error"]["param"] == "input[1].id"


def test_answers_to_requests_of_one_id_are_kept_apart(client, stack):
    """As a caller has one that passes its own request's id on."""
    same = {"x-request-id": "mine"}
    first = client.responses.create(model=MODEL, input="one", extra_headers=same)
    second = client.responses.create(
        model=MODEL, input="two", previous_response_id=first.id, extra_headers=same
    )
    client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    answer = {"role": "assistant", "content": "A red circle."}
    one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
    assert prompt(stack) == chat_prompt(stack, messages=[one, answer, two, answer, three])
    assert first.id.startswith("resp_mine") and client.responses.retrieve(first.id) == first


@pytest.mark.parametrize("given", ["", "known", "a" * 128, "resp_x-y_z.1:2"])
def test_whoever_knows_a_requests_id_does_not_know_its_responses(stack, given):
    """The id of a response has 160 random bits of its own, with a client's `x-request-id`, too."""
    found: set[str] = set()
    for _ in range(2):
        headers = {"x-request-id": given} if given else {}
        with stack.client(headers=headers) as client:
            answer = client.post("/v1/responses", json={"model": MODEL, "input": "one"}).json()
        name, _, secret = answer["id"].rpartition("-")
        assert name == f"resp_{given}" if given else name.startswith("resp_")
        assert len(secret) == 40 and set(secret) <= set("0123456789abcdef")
        found.add(secret)
        assert get(stack, answer["id"]).json() == answer
        assert get(stack, answer["id"][:-1]).status_code == 404
        item = {"type": "item_reference", "id": answer["output"][0]["id"]}
        assert post(stack, input=[item, {"role": "user", "content": "and?"}]).status_code == 200
    assert len(found) == 2


def test_long_turns_are_kept_too(stack):
    metadata = {"note": "x" * 90_000}
    first = post(stack, input="one", metadata=metadata).json()
    assert get(stack, first["id"]).json() == first and first["metadata"] == metadata
    assert post(stack, previous_response_id=first["id"]).status_code == 200


def test_streams_are_kept_and_say_so(stack):
    events = events_of(post(stack, stream=True))
    done = events[-1]["response"]
    assert events[0]["response"]["store"] is done["store"] is True
    assert get(stack, done["id"]).json() == done


def test_what_is_not_to_be_kept_is_not_found(client, stack):
    answer = client.responses.create(model=MODEL, input="hello", store=False)
    assert answer.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError, match=r"not found.*Without Redis each gateway"):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    assert refused.value.param == "previous_response_id"
    assert len(stack.decoder.submits) == 1


def test_deleted_answers_are_gone(client, stack):
    first = client.responses.create(model=MODEL, input="one")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    assert get(stack, first.id).status_code == 404
    assert get(stack, first.id, "DELETE").status_code == 404
    assert client.responses.retrieve(second.id) == second
    assert post(stack, previous_response_id=second.id).status_code == 404


def test_images_are_sent_once(stack):
    small, large = image_url(64, 64), image_url(700, 500)
    noise = (
        "data:image/png;base64,"
        + base64.b64encode(base64.b64decode(large.partition(",")[2]) + bytes(100_000)).decode()
    )  # so much is cut out of the body before it is parsed
    content = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": small, "detail": "low"},
        {"type": "input_image", "image_url": noise},
    ]
    first = post(stack, input=[{"role": "user", "content": content}]).json()
    assert first["store"] is True
    keys = [ref.image_key for ref in stack.decoder.submits[-1].images]
    second = post(stack, input="and?", previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    assert [ref.image_key for ref in stack.decoder.submits[-1].images] == keys
    assert len(set(keys)) == 2


def test_an_answer_whose_oldest_images_were_cut_is_not_kept(stack):
    image = {"type": "input_image", "image_url": image_url()}
    turn = {"role": "user", "content": [image, {"type": "input_text", "text": "long " * 2000}]}
    items = [turn, {"role": "assistant", "content": "x"}, {"role": "user", "content": "short"}]
    answer = post(stack, input=items, truncation="auto")
    assert answer.status_code == 200, answer.text
    assert "input" in answer.headers["x-triptych-ignored"]
    assert answer.json()["store"] is False


def by_uuid(uuid, url=None, **fields):
    return [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url, **fields} if url or fields else None,
         "uuid": uuid},
        {"type": "text", "text": "what?"},
    ]}]  # fmt: skip


def test_an_image_with_a_uuid_is_sent_once(stack):
    assert stack.chat(messages=by_uuid("it", image_url(64, 64))).status_code == 200
    keys = [ref.image_key for ref in stack.decoder.submits[-1].images]
    for messages in (by_uuid("it"), by_uuid("it", detail="high")):
        answer = stack.chat(messages=messages)
        assert answer.status_code == 200, answer.text
        assert [ref.image_key for ref in stack.decoder.submits[-1].images] == keys
    # The bytes decide, not the name.
    assert stack.chat(messages=by_uuid("it", image_url(64, 64, (0, 0, 255)))).status_code == 200
    assert [ref.image_key for ref in stack.decoder.submits[-1].images] != keys


def test_unknown_uuids_and_images_without_any_are_refused(stack):
    refused = stack.chat(messages=by_uuid("never seen"))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (
        error["param"] == "messages[0].content[0]"
        and "send the image with its URL" in error["message"]
    )
    refused = stack.chat(messages=by_uuid(None))
    assert refused.json()["error"]["param"] == "messages[0].content[0]"
    assert not stack.decoder.submits


@pytest.mark.parametrize("prefix", ["blake3:", "image:blake3:", "content:", ""])
@pytest.mark.parametrize("path", ["chat", "responses"])
def test_no_uuid_of_a_client_names_an_image_of_a_response(stack, path, prefix):
    """The images of a kept response stay what they were, whatever a client calls another image."""
    width = {"chat": 64, "responses": 96}[path]  # the tests of this table share a gateway
    red, blue = image_url(width, 64), image_url(width, 64, (0, 0, 255))
    item = {"role": "user", "content": [{"type": "input_image", "image_url": red}]}
    first = post(stack, input=[item]).json()
    assert first["store"] is True
    (kept,) = [ref.image_key for ref in stack.decoder.submits[-1].images]
    uuid = prefix + blake3(base64.b64decode(red.partition(",")[2])).hexdigest()

    def ask(**image):
        if path == "chat":
            return stack.chat(messages=[{"role": "user", "content": [
                {"type": "image_url", "uuid": uuid, "image_url": image.get("image_url")}
            ]}])  # fmt: skip
        part = {"type": "input_image", "uuid": uuid, **image}
        return post(stack, input=[{"role": "user", "content": [part]}])

    assert ask().status_code == 400  # nothing has been sent under this uuid yet
    assert ask(image_url=blue).status_code == 200
    (other,) = [ref.image_key for ref in stack.decoder.submits[-1].images]
    assert other != kept
    for _ in range(2):  # a turn that was kept, and one that goes on from it
        assert post(stack, previous_response_id=first["id"]).status_code == 200
        assert [ref.image_key for ref in stack.decoder.submits[-1].images] == [kept]
        assert ask().status_code == 200
        assert [ref.image_key for ref in stack.decoder.submits[-1].images] == [other]


def test_an_image_of_a_uuid_is_kept_with_its_response_by_its_bytes(stack):
    """A response keeps the image that it has seen, also when its uuid names another one later."""
    red, blue = image_url(64, 64), image_url(64, 64, (0, 0, 255))
    part = {"type": "input_image", "uuid": "mine", "image_url": red}
    first = post(stack, input=[{"role": "user", "content": [part]}]).json()
    keys = [ref.image_key for ref in stack.decoder.submits[-1].images]
    part = {**part, "image_url": blue}
    assert post(stack, input=[{"role": "user", "content": [part]}]).status_code == 200
    assert [ref.image_key for ref in stack.decoder.submits[-1].images] != keys
    assert post(stack, previous_response_id=first["id"]).status_code == 200
    assert [ref.image_key for ref in stack.decoder.submits[-1].images] == keys


@pytest.fixture(scope="module")
def gateways(loop_thread, tmp_path_factory):
    """Two gateways of one Redis, each with services of its own, and two tenants."""
    with RedisServer() as server:
        stacks = [
            GatewayStack(
                loop_thread, tmp_path_factory.mktemp("kept"), api_keys="one,two",
                redis_url=server.url, log_level="ERROR",
            )
            for _ in range(2)
        ]  # fmt: skip
        yield *stacks, server
        for stack in stacks:
            stack.close()


def test_other_gateways_find_it_and_other_tenants_do_not(gateways):
    here, there, _ = gateways
    first = post(here, "one").json()
    assert first["store"] is True
    assert get(there, first["id"], key="one").json() == first
    assert post(there, "one", previous_response_id=first["id"]).status_code == 200
    for stack in (here, there):
        assert get(stack, first["id"], key="two").status_code == 404
        assert get(stack, first["id"], "DELETE", key="two").status_code == 404
        assert post(stack, "two", previous_response_id=first["id"]).status_code == 404
    assert get(there, first["id"]).status_code == 401
    assert get(here, first["id"], "DELETE", key="one").status_code == 200
    assert get(there, first["id"], key="one").status_code == 404


def test_images_are_their_tenants(gateways):
    here, there, _ = gateways

    def ask(stack, key, messages):
        with stack.client(headers={"authorization": f"Bearer {key}"}) as client:
            body = {"model": MODEL, "messages": messages}
            return client.post("/v1/chat/completions", json=body).status_code

    assert ask(here, "one", by_uuid("it", image_url())) == 200
    assert ask(there, "one", by_uuid("it")) == 200
    assert ask(there, "two", by_uuid("it")) == 400


def test_without_an_answer_of_redis_nothing_is_promised(gateways):
    here, _, server = gateways
    first = post(here, "one").json()
    server.freeze()
    try:
        streamed = post(here, "one", stream=True)
        assert events_of(streamed)[-1]["response"]["store"] is False
        refused = post(here, "one", previous_response_id=first["id"])
        assert refused.status_code == 503 and refused.headers["retry-after"]
    finally:
        server.thaw()
    # Redis is asked again after a pause, in which the other tests would find nothing.
    wait_until(lambda: post(here, "one").json()["store"], "answers are kept again")


def test_entries_of_another_version_are_not_found(stack):
    kept = stack.gateway.service.images.store
    entry = json.dumps({"another": "form"}).encode()
    stack.thread.run(kept.put("", "response:resp_old", entry))
    assert get(stack, "resp_old").status_code == 404
