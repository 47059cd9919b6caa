"""The failure contract: each request ends exactly once, and one broken pod fails no request."""

import asyncio
import copy
import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from services.common.errors import (
    EmbeddingUnavailable,
    EngineLost,
    InternalError,
    InvalidImage,
    Overloaded,
    Unavailable,
)
from services.common.transport import rpc
from services.gateway.clients.encoders import EncoderPod
from tests.fakes import forever, once, raising
from tests.gateway_fixtures import asking, image_url
from tests.noise import PATIENCE_S

RANDOM = random.Random(0)


def new_image() -> str:
    """Another image each time; which encoder gets it depends on the encoders' ports, too."""
    color = RANDOM.randrange(256), RANDOM.randrange(256), RANDOM.randrange(256)
    return image_url(RANDOM.randrange(20, 90), 40, color)


def serving(pair):
    """The encoder that got the last image first, and the other one."""
    first = next(e for e in pair.encoders if e.requests)
    return first, next(e for e in pair.encoders if e is not first)


def answer(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def error(response, status: int) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


# Encoders


def test_equal_images_go_to_one_encoder(pair):
    url = new_image()
    for _ in range(6):
        answer(pair.chat(messages=asking(url)))
    assert sorted(len(e.requests) for e in pair.encoders) == [0, 6]
    for _ in range(200):  # of 30, one encoder has at most 4 once in 30,000 runs
        answer(pair.chat(messages=asking(new_image())))
        if all(len(e.requests) > 4 for e in pair.encoders):
            break
    assert all(len(e.requests) > 4 for e in pair.encoders)


@pytest.mark.parametrize(
    "failure",
    [Unavailable("x"), InternalError("x"), Overloaded("x"), EmbeddingUnavailable("x"), None],
    ids=["unavailable", "internal", "overloaded", "embedding", "hangs"],
)
def test_broken_encoder_costs_a_retry(pair, failure, monkeypatch):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)
    for decoder in pair.decoders:
        decoder.before = once(lambda: second.requests)
    first.before = forever if failure is None else raising(failure)
    if failure is None:  # that encoder alone has little time
        pods = pair.gateway.service.encoders.pods
        pod = next(pod for pod in pods if pod.address == first.address)
        monkeypatch.setattr(pod, "encode", lambda request, *_: EncoderPod.encode(pod, request, 0.5))
    retries = pair.metric("triptych_gateway_retries_total", service="encoder")
    assert answer(pair.chat(messages=asking(url))) == "A red circle."
    assert len(second.requests) == 1
    assert pair.metric("triptych_gateway_retries_total", service="encoder") == retries + 1
    sent = [s.images[0].encoder_address for d in pair.decoders for s in d.submits]
    assert sent.count(second.address) == 1


def test_a_fault_of_the_call_itself_costs_a_retry_and_not_the_deadline(pair, monkeypatch):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)

    async def faulty(*_: object) -> None:
        raise TypeError("a fault of the gateway")

    pods = pair.gateway.service.encoders.pods
    pod = next(pod for pod in pods if pod.address == first.address)
    monkeypatch.setattr(pod, "encode", faulty)
    for decoder in pair.decoders:
        decoder.before = once(lambda: second.requests)
    assert answer(pair.chat(messages=asking(url))) == "A red circle."
    assert len(second.requests) == 1


def test_killed_encoder_costs_a_retry(pair):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)
    first.before = forever
    for decoder in pair.decoders:
        decoder.before = once(lambda: second.requests)
    first.requests.clear()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pair.chat, messages=asking(url))
        pair.wait(lambda: first.requests)
        pair.thread.run(first.stop())
        assert answer(asked.result()) == "A red circle."
    assert len(second.requests) == 1


def test_an_image_that_waited_in_a_lost_engine_is_not_counted(pair):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)
    first.before = raising(Unavailable("the engine ended"))
    for decoder in pair.decoders:
        decoder.before = once(lambda: second.requests)
    assert answer(pair.chat(messages=asking(url))) == "A red circle."
    assert len(second.requests) == 1


def test_an_image_that_was_in_work_when_two_engines_ended_is_refused(pair):
    for encoder in pair.encoders:
        encoder.before = raising(EngineLost("the engine ended"))
    for decoder in pair.decoders:
        decoder.before = forever
    found = error(pair.chat(messages=asking(new_image())), 400)
    assert (found["code"], found["param"]) == ("invalid_image", "messages[0].content[0]")
    pair.reset()
    answer(pair.chat(messages=asking(new_image())))


def test_images_of_an_encoder_that_an_operator_kills_are_encoded_elsewhere(pair):
    released, lost = threading.Event(), set()
    killed, other = pair.encoders
    for encoder in pair.encoders:
        encoder.before = once(released.is_set)
    for decoder in pair.decoders:
        decoder.before = once(lambda: released.is_set() and lost <= other.known)
    with ThreadPoolExecutor(30) as threads:
        urls = [new_image() for _ in range(30)]
        asked = [threads.submit(pair.chat, messages=asking(url)) for url in urls]
        pair.wait(lambda: len(killed.requests) + len(other.requests) == 30)
        lost |= {request.image_key for request in killed.requests}
        assert len(lost) > 1
        pair.thread.run(killed.stop())
        released.set()
        for one in asked:
            assert answer(one.result()) == "A red circle."


def test_encoder_that_returns_another_size_costs_a_retry(pair):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)
    first.num_tokens_error = 1
    for decoder in pair.decoders:
        decoder.before = once(lambda: second.requests)
    answer(pair.chat(messages=asking(url)))
    assert len(second.requests) == 1


def test_no_encoder_left_is_503_and_never_an_answer_without_the_image(pair):
    for encoder in pair.encoders:
        encoder.before = raising(InternalError("x"))
    for decoder in pair.decoders:
        decoder.before = forever
    response = pair.chat(messages=asking(new_image()))
    assert error(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == "1"
    assert all(len(e.requests) == 1 for e in pair.encoders)
    pair.wait(lambda: not any(d.running for d in pair.decoders))


def test_image_that_the_encoder_refuses_is_a_400_without_retry(pair):
    for encoder in pair.encoders:
        encoder.before = raising(InvalidImage("truncated"))
    for decoder in pair.decoders:
        decoder.before = forever
    response = pair.chat(messages=asking(new_image(), new_image()))
    found = error(response, 400)
    assert found["code"] == "invalid_image"
    assert found["param"] in ("messages[0].content[0]", "messages[0].content[1]")
    images = [request.image for encoder in pair.encoders for request in encoder.requests]
    assert images and len(set(images)) == len(images)  # no retry


def test_decoder_that_cannot_get_an_embedding_names_the_encoder_to_avoid(pair):
    url = new_image()
    answer(pair.chat(messages=asking(url)))
    first, second = serving(pair)

    async def before(submit):
        if submit.images[0].encoder_address == first.address:
            raise EmbeddingUnavailable("gone")
        await once(lambda: second.requests)(submit)

    for decoder in pair.decoders:
        decoder.fail_encoder_address = first.address
        decoder.before = before
    assert answer(pair.chat(messages=asking(url))) == "A red circle."
    assert len(second.requests) == 1


def test_only_encoder_is_retried_once_for_a_lost_embedding(stack):
    attempts = itertools.count(1)

    async def before(_):
        attempt = next(attempts)
        async with asyncio.timeout(PATIENCE_S):
            while len(stack.encoder.requests) < attempt:  # noqa: ASYNC110 - a list of a fake
                await asyncio.sleep(0.001)
        if attempt == 1:
            raise EmbeddingUnavailable("evicted")

    stack.decoder.before = before
    stack.decoder.fail_encoder_address = stack.encoder.address
    assert answer(stack.chat(messages=asking(new_image()))) == "A red circle."
    assert len(stack.encoder.requests) == 2


# Decoders


def test_full_encoders_say_when_to_retry(pair):
    for encoder in pair.encoders:
        encoder.before = raising(Overloaded("full", retry_after_s=7))
    for decoder in pair.decoders:
        decoder.before = forever
    response = pair.chat(messages=asking(new_image()))
    assert error(response, 503)["code"] == "overloaded"
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("failure", [Unavailable("x"), Overloaded("x"), None])
def test_decoder_lost_before_the_first_token_costs_a_retry(pair, failure):
    answer(pair.chat())
    first = next(d for d in pair.decoders if d.submits)
    second = next(d for d in pair.decoders if d is not first)
    if failure is None:
        first.die_after = 0
    else:
        first.before = raising(failure)
    for stream in (False, True):
        response = pair.chat(stream=stream)
        assert response.status_code == 200
        assert "circle" in response.text
    assert len(second.submits) == 2


def test_no_decoder_left_is_503(pair):
    for decoder in pair.decoders:
        decoder.before = raising(Overloaded("full"))
    response = pair.chat()
    assert error(response, 503)["code"] == "overloaded"
    assert "retry-after" in response.headers
    assert all(len(d.submits) == 1 for d in pair.decoders)


def test_decoder_bug_is_500_and_not_retried(pair):
    for decoder in pair.decoders:
        decoder.before = raising(InternalError("object at 0x7f00aa11bb22"))
    found = error(pair.chat(), 500)
    assert found["code"] == "internal_error"
    assert "0x7f" not in found["message"]
    assert sum(len(d.submits) for d in pair.decoders) == 1


def lose(decoder, how: str, after: int = 2) -> None:
    decoder.delay_s = 0.02
    if how == "die":
        decoder.die_after = after
    else:
        decoder.fail_after = (after, how)


def chunks_of(response) -> list[dict]:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(event) for event in events if event != "[DONE]"]


def continued(submit) -> list[int]:
    return np.frombuffer(submit.generated_token_ids, "<i4").tolist()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["die", "unavailable", "overloaded", "cancelled"])
def test_an_answer_whose_decoder_is_lost_goes_on_at_another_one(pair, how, stream):
    fields = {"logprobs": True, "top_logprobs": 1, "n": 2, "seed": 7, "include_stage_times": True}
    undisturbed = pair.chat(stream=stream, **fields)
    first = next(d for d in pair.decoders if d.submits)
    second = next(d for d in pair.decoders if d is not first)
    handovers = pair.metric("triptych_gateway_handovers_total")
    lose(first, how)
    first.before = once(lambda: len(first.submits) == 4)  # both choices begin
    response = pair.chat(stream=stream, **fields)
    assert response.status_code == 200
    assert pair.metric("triptych_gateway_handovers_total") == handovers + 1
    # As it was, but for what the client has seen already.
    assert {tuple(continued(s)) for s in second.submits} <= {tuple(first.reply[:n]) for n in (1, 2)}
    assert [s.sampling for s in second.submits] == [s.sampling for s in first.submits[2:]]
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        texts, entries = ["", ""], [[], []]
        for chunk in chunks_of(response):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
                entries[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
        assert texts == ["A red circle."] * 2
        assert [len(found) for found in entries] == [len(first.reply)] * 2
        assert chunks_of(response)[-1]["stage_times_ms"]["handover"] > 0
    else:
        body, wanted = response.json(), undisturbed.json()
        assert body["choices"] == wanted["choices"]
        assert body["usage"] == wanted["usage"]
        assert body["stage_times_ms"]["handover"] > 0
    pair.wait(pair.all_healthy)


def test_a_choice_that_has_ended_is_not_submitted_again(pair):
    answer(pair.chat())
    first = next(d for d in pair.decoders if d.submits)
    second = next(d for d in pair.decoders if d is not first)
    seeds = []

    async def slow_second_choice(submit):
        seeds.append(submit.sampling.seed)
        if len(seeds) == 2:
            await once(lambda: first.cancelled)(submit)
            first.die_after = 0

    first.before, first.delay_s = slow_second_choice, 0.02
    first.reply += [40] * 1000  # it ends because the gateway has found the stop
    response = pair.chat(n=2, stop=["red"])
    assert [c["message"]["content"] for c in response.json()["choices"]] == ["A "] * 2
    assert [s.sampling.seed for s in second.submits] == [seeds[1]]
    pair.wait(pair.all_healthy)


@pytest.mark.parametrize("how", ["die", "unavailable"])
def test_an_answer_without_a_decoder_left_ends_with_an_error_event(pair, how):
    for decoder in pair.decoders:
        lose(decoder, how)
        decoder.reply = decoder.reply * 5
    response = pair.chat(stream=True)
    assert response.status_code == 200
    assert chunks_of(response)[-1]["error"]["code"] == "unavailable"
    assert "[DONE]" not in response.text
    # A stream that breaks comes back at once; still, no third decoder is lost.
    assert sum(len(d.submits) for d in pair.decoders) == 2
    if how == "die":
        pair.wait(pair.all_healthy)
    failed = pair.chat()
    assert error(failed, 503)["code"] == "unavailable"
    assert failed.headers["retry-after"]
    if how == "die":
        pair.wait(pair.all_healthy)


def test_draining_decoder_ends_its_streams_and_gets_no_new_ones(pair):
    answer(pair.chat())
    first = next(d for d in pair.decoders if d.submits)
    second = next(d for d in pair.decoders if d is not first)
    first.delay_s = 0.5
    results = []
    slow = threading.Thread(target=lambda: results.append(answer(pair.chat())))
    slow.start()
    pair.wait(lambda: len(first.submits) == 2)
    pair.thread.run(first.drain())
    pair.wait(lambda: len(pair.gateway.service.decoders.healthy()) == 1)
    answer(pair.chat())
    assert len(second.submits) == 1
    slow.join()
    assert results == ["A red circle."]
    pair.thread.run(first.health.set("", 1))


def test_hanging_request_ends_at_its_deadline(pair):
    pair.gateway.service.request_timeout_s = 0.3
    try:
        for decoder in pair.decoders:
            decoder.before = forever
        assert error(pair.chat(), 504)["code"] == "deadline_exceeded"
        pair.wait(lambda: not any(d.running for d in pair.decoders))
        for decoder in pair.decoders:
            decoder.reset()
            decoder.delay_s = 0.2
        text = pair.chat(stream=True).text
        assert "deadline_exceeded" in text
        assert "[DONE]" not in text
    finally:
        pair.gateway.service.request_timeout_s = PATIENCE_S


def test_restarted_pods_are_used_again(pair):
    with pair.client() as client:
        assert client.get("/ready").status_code == 200
    for fake in (*pair.encoders, *pair.decoders):
        pair.thread.run(fake.stop())
    pair.wait(lambda: not pair.gateway.service.ready())
    with pair.client() as client:
        assert client.get("/ready").status_code == 200  # it was; connections are not refused
        assert client.get("/health").status_code == 200
    response = pair.chat()
    assert error(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == "1"
    pair.reset()
    assert answer(pair.chat(messages=asking(new_image()))) == "A red circle."
    with pair.client() as client:
        assert client.get("/ready").status_code == 200


def test_services_that_do_not_fit_are_not_ready(pair):
    description = pair.gateway.service.encoders.description
    try:
        pair.gateway.service.encoders.description = lambda: type(
            "D", (), {"dtype": 2, "num_features": 3, "hidden": 32}
        )
        assert not pair.gateway.service.ready()
    finally:
        pair.gateway.service.encoders.description = description


@pytest.fixture
def restart_as(pair):
    """Restarts a fake under its address with another description; puts it back afterwards."""
    changed = []

    def restart(fake, **fields):
        changed.append((fake, copy.deepcopy(fake.description)))
        pair.thread.run(fake.stop())
        for name, value in fields.items():
            setattr(fake.description, name, value)
        pair.thread.run(fake.start(fake.address))

    yield restart
    for fake, description in changed:
        pair.thread.run(fake.stop())
        fake.description.CopyFrom(description)
    pair.reset()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"vocab_size": 77}, "its vocab_size is 77"),
        ({"hidden": 48}, "its hidden is 48"),
        ({"num_features": 1}, "its num_features is 1"),
        ({"fingerprint": b"other" * 4}, "it serves checkpoint 6f74686572"),
        ({"max_model_len": 2048}, "its context is 2048 tokens, not 4096"),
    ],
    ids=["vocabulary", "hidden size", "features", "weights", "context"],
)
def test_a_decoder_that_comes_back_with_another_model_gets_no_work(pair, restart_as, fields, why):
    served = pair.gateway.service.decoders.served
    served.fingerprint, served.is_own = b"own" * 8, True
    try:
        answer(pair.chat())
        first = next(d for d in pair.decoders if d.submits)
        first.reset()
        restart_as(first, **fields)
        pair.wait(lambda: first.address in pair.gateway.service.decoders.misfits())
        for _ in range(3):
            answer(pair.chat())
        assert not first.submits
        assert pair.gateway.service.decoders.misfits()[first.address].startswith(why)
        with pair.client() as client:
            ready = client.get("/ready")
        assert ready.json()["left_out"] == 1
        assert first.address not in ready.text  # which needs no key
    finally:
        served.fingerprint, served.is_own = b"", False


def test_a_decoder_of_less_memory_fits_again_after_it_was_away(pair, restart_as):
    pool = pair.gateway.service.decoders
    first, served = pair.decoders[0], pool.served
    restart_as(first, max_model_len=2048)
    pair.wait(lambda: len(pool.misfits()) == 1)
    served.max_model_len = 2048  # as when both had been there from the start
    pair.wait(lambda: len(pool.healthy()) == 2)
    answer(pair.chat())
    try:
        pair.thread.run(first.stop())
        pair.wait(lambda: len(pool.healthy()) == 1)
        answer(pair.chat())  # by the decoder with the longer context, alone
        pair.thread.run(first.start(first.address))
        pair.wait(lambda: len(pool.serving()) == 2)
        assert not pool.misfits()
    finally:
        served.max_model_len = None


def test_an_encoder_of_other_weights_gets_no_images(pair, restart_as):
    served = pair.gateway.service.decoders.served
    served.fingerprint, served.is_own = b"own" * 8, True
    try:
        for encoder in pair.encoders:
            restart_as(encoder, fingerprint=b"other" * 4)
        pair.wait(lambda: len(pair.gateway.service.encoders.misfits()) == 2)
        assert error(pair.chat(messages=asking(new_image())), 503)
        assert not any(e.requests for e in pair.encoders)
        answer(pair.chat())  # text needs no encoder
    finally:
        served.fingerprint, served.is_own = b"", False


def test_services_of_another_protocol_get_no_work_and_are_named(pair, restart_as):
    first, second = pair.decoders
    pools = pair.gateway.service.decoders, pair.gateway.service.encoders
    restart_as(first, protocol=rpc.PROTOCOL + 1)
    restart_as(pair.encoders[0], protocol=0)  # of before there were versions
    pair.wait(lambda: all(len(pool.misfits()) == 1 for pool in pools))
    (why,) = pools[0].misfits().values()
    assert why == "it speaks protocol 2, this gateway 1: they are of two releases"
    (why,) = pools[1].misfits().values()
    assert why.startswith("it speaks protocol 0, this gateway 1")
    for _ in range(4):
        answer(pair.chat(messages=asking(new_image())))
    assert second.submits and not first.submits
    assert pair.encoders[1].requests and not pair.encoders[0].requests
    # The last one that it can speak to goes: a clear refusal, and no try of the other.
    restart_as(second, protocol=rpc.PROTOCOL + 1)
    pair.wait(lambda: len(pools[0].misfits()) == 2)
    assert error(pair.chat(), 503)
    assert not first.submits


def test_choices_of_an_answer_are_of_one_checkpoint(pair, restart_as):
    """Also if those that have begun have ended, too."""
    decoders = pair.gateway.service.decoders
    served = decoders.served
    first, second = pair.decoders

    async def lose_the_last_choice(submit):
        if len(first.submits) < 2 or submit.sequence_id != first.submits[1].sequence_id:
            return
        # Until the gateway has heard of the other's end.
        while sum(pod.num_in_flight for pod in decoders.healthy()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for pod in decoders.healthy():
            pod.healthy = False  # until its next check
        raise Unavailable("shutting down")

    try:
        restart_as(first, fingerprint=b"old" * 4)
        pair.wait(lambda: pair.gateway.service.ready() and served.fingerprint == b"old" * 4)
        restart_as(second, fingerprint=b"new" * 4)
        pair.wait(lambda: second.address in decoders.misfits())
        first.before = lose_the_last_choice
        assert error(pair.chat(n=2), 503)
        assert len(first.submits) == 2 and not second.submits
    finally:
        served.fingerprint = b""


def test_without_weights_of_its_own_a_gateway_serves_what_its_decoders_do(pair, restart_as):
    served = pair.gateway.service.decoders.served
    assert not served.fingerprint
    first, second = pair.decoders
    try:
        restart_as(first, fingerprint=b"old" * 4)
        pair.wait(lambda: pair.gateway.service.ready() and served.fingerprint == b"old" * 4)
        restart_as(second, fingerprint=b"new" * 4)
        pair.wait(lambda: second.address in pair.gateway.service.decoders.misfits())
        answer(pair.chat())
        assert first.submits and not second.submits
        # An answer that has begun with one checkpoint is not continued with another.
        first.reply, first.delay_s, first.die_after = [40] * 50, 0.02, 2
        chunks = chunks_of(pair.chat(stream=True))
        assert chunks[-1]["error"]["code"] == "unavailable"
        assert not second.submits
        pair.thread.run(first.stop())
        pair.wait(lambda: pair.gateway.service.decoders.description() is not None)
        answer(pair.chat())
        assert second.submits and served.fingerprint == b"new" * 4
    finally:
        served.fingerprint = b""
