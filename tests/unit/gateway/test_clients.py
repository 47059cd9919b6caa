"""Pods: name resolution, health, load balancing, and broken streams."""

import asyncio
import collections
import gc

import numpy as np
import pytest

from services.common.errors import EngineLost, ProcessLost, TriptychError, Unavailable
from services.common.pb import decoder_pb2 as pb
from services.common.pb.encoder_pb2 import EncodeRequest, Grid
from services.gateway.clients import pods
from services.gateway.clients.decoders import DecoderPod, DecoderPool
from services.gateway.clients.encoders import EncoderPod, EncoderPool, for_file
from services.gateway.clients.pods import Pod, PodDialer, PodNames, PodTimes, Pool, pick
from services.gateway.clients.sent_prompts import PromptChain
from services.gateway.clients.served_model import ServedModel
from services.gateway.clients.token_event import EmbeddingLost
from services.gateway.request.mailbox import Mailbox as RequestMailbox
from tests.fakes import FakeDecoder, FakeEncoder
from tests.noise import PATIENCE_S, turns

DIALER = PodDialer()
NOTHING = PromptChain(np.zeros(0, np.int32), (), b"")


class Mailbox(RequestMailbox):
    """A mailbox that receives a sequence's events by itself.

    Attributes:
        received: all events, those that were taken included.
    """

    def __init__(self):
        super().__init__()
        self.received = []

    def receive(self, event):
        self.received.append(event)
        self.put(event)


def submit(max_tokens: int = 16) -> pb.Submit:
    return pb.Submit(
        request_id="req-1",
        prompt_token_ids=np.arange(5, dtype="<i4").tobytes(),
        sampling=pb.SamplingParams(top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens),
        timeout_s=10.0,
    )


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions lie in other tasks
            await asyncio.sleep(0.005)


async def take_all(mailbox, choices=1):
    """Events until this many choices have ended."""
    events = []
    async with asyncio.timeout(PATIENCE_S):
        while sum(event.is_last for event in events) < choices:
            events += await mailbox.take()
    return events


def in_loop(test):
    """Runs a test in the event loop of gRPC's asyncio side."""

    def run(loop_thread):
        loop_thread.run(test())

    run.__doc__ = test.__doc__
    return run


def encode_request(key=b"key"):
    return EncodeRequest(image_key=key, grid=Grid(t=1, h=2, w=2))


class UnconnectedPod(Pod):
    """A pod without a connection."""

    def __init__(self, address, *_):
        self.address, self.num_in_flight, self.healthy = address, 0, True
        self.unlisted = False


def test_equal_keys_get_one_pod_and_different_ones_spread():
    some = [UnconnectedPod(f"10.0.0.{i}:1", ServedModel(), DIALER) for i in range(4)]
    chosen = [pick(some, b"%d" % i) for i in range(2000)]
    assert [pick(some[::-1], b"%d" % i) for i in range(2000)] == chosen
    counts = collections.Counter(pod.address for pod in chosen)
    assert all(400 < count < 600 for count in counts.values())
    # One pod less moves only that pod's keys.
    moved = sum(pick(some[:3], b"%d" % i) is not pod for i, pod in enumerate(chosen))
    assert moved == counts[some[3].address]


def test_an_encoder_and_a_decoder_with_one_host_are_picked_together():
    encoders = [UnconnectedPod(f"10.0.0.{i}:50051", ServedModel(), DIALER) for i in range(4)]
    decoders = [UnconnectedPod(f"10.0.0.{i}:50052", ServedModel(), DIALER) for i in (2, 0, 3, 1)]
    for number in range(50):
        key = b"%d" % number
        hosts = {pick(pods, key).address.split(":")[0] for pods in (encoders, decoders)}
        assert len(hosts) == 1


def test_pods_of_one_host_share_its_keys():
    some = [UnconnectedPod(f"127.0.0.1:{port}", ServedModel(), DIALER) for port in range(4)]
    counts = collections.Counter(pick(some, b"%d" % i).address for i in range(2000))
    assert all(400 < count < 600 for count in counts.values())


def test_a_hot_key_overflows_to_other_pods():
    some = [UnconnectedPod(f"10.0.0.{i}:1", ServedModel(), DIALER) for i in range(4)]
    for _ in range(400):
        pick(some, b"hot").num_in_flight += 1
    loads = sorted(pod.num_in_flight for pod in some)
    assert loads[-1] < 150
    assert sum(loads) == 400


class Names(PodNames):
    """Names whose look-ups are answered by a function.

    Args:
        answer: function that returns the IP addresses of the next look-up, or raises its error.
    """

    def __init__(self, answer):
        self.answer = answer

    async def look_up(self, host, port):
        return self.answer()


def pool_of(kind, *addresses, answer=list, period_s=0.01):
    dialer = PodDialer(times=PodTimes(resolve_s=period_s), names=Names(answer))
    pool = Pool(addresses, ServedModel(), dialer)
    pool.pod = kind
    return pool


def addresses_of(pool):
    return {pod.address for pod in pool.pods}


async def test_names_are_resolved_into_pods():
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], OSError("no DNS"), ["10.0.0.3"]]
    closed, num_lookups = [], 0

    class Known(UnconnectedPod):
        connected = True

        async def check(self):
            return pods.PodState.SERVING

        async def close(self):
            closed.append(self.address)

    def answer():
        nonlocal num_lookups
        num_lookups += 1
        if isinstance(answers[0], OSError):
            raise answers[0]
        return answers[0]

    known = pool_of(Known, "dns:///encoder:50051", "fixed:1", answer=answer)
    await known.start()
    await until(lambda: addresses_of(known) == {"10.0.0.1:50051", "10.0.0.2:50051", "fixed:1"})
    del answers[0]
    both = {"10.0.0.2:50051", "10.0.0.3:50051", "fixed:1"}
    await until(lambda: addresses_of(known) == both)
    del answers[0]
    last = num_lookups + 2
    await until(lambda: num_lookups >= last)
    assert addresses_of(known) == both
    del answers[0]
    await until(lambda: addresses_of(known) == {"10.0.0.3:50051", "fixed:1"})
    await known.close()
    assert len(closed) == 4


async def test_a_pod_that_left_its_name_is_closed_when_it_has_nothing_to_do():
    """It terminates, or missed its readiness probes for a moment: its answers go on."""
    found, closed = ["10.0.0.1", "10.0.0.2"], []
    num_lookups = 0

    def look_up():
        nonlocal num_lookups
        num_lookups += 1
        return found

    class Known(UnconnectedPod):
        connected = True

        async def check(self):
            return pods.PodState.SERVING

        async def close(self):
            closed.append(self.address)

    def healthy():
        return {pod.address for pod in known.healthy()}

    known = pool_of(Known, "dns:///decoder:1", answer=look_up)
    await known.start()
    await until(lambda: known.pods)
    pod = next(pod for pod in known.pods if pod.address == "10.0.0.1:1")
    pod.num_in_flight = 1
    for _ in range(2):
        del found[0]
        await until(lambda: healthy() == {"10.0.0.2:1"})
        last = num_lookups + 3
        await until(lambda last=last: num_lookups >= last)
        assert not closed
        found.insert(0, "10.0.0.1")
        await until(lambda: healthy() == {"10.0.0.1:1", "10.0.0.2:1"})
    assert pod in known.pods
    del found[0]
    await until(lambda: healthy() == {"10.0.0.2:1"})
    pod.num_in_flight = 0
    await until(lambda: closed == ["10.0.0.1:1"])
    await known.close()


async def test_a_pod_that_is_being_removed_is_closed_with_the_rest():
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2"]]
    removing, closed = asyncio.Event(), set()

    class Slow(UnconnectedPod):
        connected = True

        async def check(self):
            return pods.PodState.SERVING

        async def close(self):
            if not removing.is_set():
                removing.set()
                await asyncio.sleep(2 * PATIENCE_S)
            closed.add(self.address)

    known = pool_of(Slow, "dns:encoder:50051", answer=lambda: answers.pop(0))
    await known.start()
    await removing.wait()
    await known.close()
    assert closed == {"10.0.0.1:50051", "10.0.0.2:50051"}


@in_loop
async def test_stream_carries_many_sequences():
    fake = FakeDecoder()
    pool = DecoderPool([await fake.start()], ServedModel(), DIALER)
    await pool.start()
    await until(pool.description)
    pod = pool.choose(NOTHING, b"", ())
    fake.reply = [1, 2, 3]
    mailboxes = [Mailbox() for _ in range(50)]
    for index, mailbox in enumerate(mailboxes):
        pod.submit(submit(max_tokens=2 + index % 3), index, mailbox, NOTHING)
    assert pod.num_in_flight == 50
    for index, mailbox in enumerate(mailboxes):
        events = await take_all(mailbox)
        assert {event.choice for event in events} == {index}
        ids = [i for event in events for i in event.token_ids]
        assert ids == [[1, 2], [1, 2, 3], [1, 2, 3, 0]][index % 3]
        assert events[-1].finish_reason == ("stop" if index % 3 == 2 else "length")
    assert pod.num_in_flight == 0
    await pool.close()
    await fake.stop()


@in_loop
async def test_cancel_ends_the_sequence_and_its_events():
    fake = FakeDecoder()
    fake.delay_s, fake.reply = 0.01, [1] * 1000
    pool = DecoderPool([await fake.start()], ServedModel(), DIALER)
    await pool.start()
    await until(pool.description)
    pod, mailbox = pool.choose(NOTHING, b"", ()), Mailbox()
    sequence_id = pod.submit(submit(max_tokens=900), 0, mailbox, NOTHING)
    await mailbox.take()
    pod.cancel(sequence_id)
    pod.cancel(sequence_id)
    await until(lambda: fake.cancelled == [sequence_id] and not fake.running)
    # The events of a later sequence come after all events of the cancelled one.
    following = Mailbox()
    pod.submit(submit(max_tokens=1), 1, following, NOTHING)
    await take_all(following)
    assert not any(event.is_last for event in mailbox.received)
    await pool.close()
    await fake.stop()


@in_loop
async def test_broken_stream_fails_its_sequences_and_comes_back():
    fake = FakeDecoder()
    address = await fake.start()
    pool = DecoderPool([address], ServedModel(), DIALER)
    await pool.start()
    await until(pool.description)
    pod = pool.choose(NOTHING, b"", ())
    fake.delay_s, fake.reply = 10, [1] * 10
    mailboxes = [Mailbox() for _ in range(3)]
    for mailbox in mailboxes:
        pod.submit(submit(), 0, mailbox, NOTHING)
    await until(lambda: len(fake.running) == 3)
    await fake.stop()
    for mailbox in mailboxes:
        events = await take_all(mailbox)
        assert type(events[-1].error) is ProcessLost
    with pytest.raises(Unavailable):
        pool.choose(NOTHING, b"", ())
    fake.reset()
    await fake.start(address)
    await until(pool.description)
    mailbox = Mailbox()
    pool.choose(NOTHING, b"", ()).submit(submit(), 0, mailbox, NOTHING)
    assert (await take_all(mailbox))[-1].finish_reason == "stop"
    await pool.close()
    await fake.stop()


@in_loop
async def test_sequences_of_a_decoder_that_falls_silent_are_lost_with_it():
    """As those of a stream that breaks: what it hangs of may be one of them."""
    fake = FakeDecoder()
    pod = DecoderPod(await fake.start(), ServedModel(), DIALER)
    await pod.connect()
    fake.delay_s, fake.reply = 10, [1] * 10
    mailbox = Mailbox()
    pod.submit(submit(), 0, mailbox, NOTHING)
    await until(lambda: fake.running)
    await pod.disconnect("it does not answer")
    error = (await take_all(mailbox))[-1].error
    assert type(error) is ProcessLost and "it does not answer" in error.message
    await pod.close()
    await fake.stop()


@in_loop
async def test_submission_on_a_broken_stream_fails_at_once():
    fake = FakeDecoder()
    pool = DecoderPool([await fake.start()], ServedModel(), DIALER)
    await pool.start()
    await until(pool.description)
    pod = pool.choose(NOTHING, b"", ())
    fake.die_after = 0  # the stream alone: the pod is healthy again in a moment
    mailbox = Mailbox()
    pod.submit(submit(), 0, mailbox, NOTHING)
    await take_all(mailbox)
    assert not pod.connected
    pod.submit(submit(), 0, mailbox, NOTHING)
    assert type((await take_all(mailbox))[-1].error) is Unavailable  # it was never sent
    assert pod.num_in_flight == 0
    await pool.close()
    await fake.stop()


@in_loop
async def test_failures_keep_their_code_and_the_encoder_to_avoid():
    fake = FakeDecoder()
    pool = DecoderPool([await fake.start()], ServedModel(), DIALER)
    await pool.start()
    await until(pool.description)
    for code in ("overloaded", "deadline_exceeded", "embedding_unavailable", "never heard of"):
        fake.fail_after, fake.fail_encoder_address = (0, code), "enc:1"
        mailbox = Mailbox()
        pool.choose(NOTHING, b"", ()).submit(submit(), 0, mailbox, NOTHING)
        end = (await take_all(mailbox))[-1].error
        assert isinstance(end, TriptychError)
        assert end.code == (code if " " not in code else "internal_error")
        if isinstance(end, EmbeddingLost):
            assert end.encoder_address == "enc:1"
    await pool.close()
    await fake.stop()


@in_loop
async def test_silent_pod_loses_its_calls_to_others():
    """Like a stopped process: the connection stays open without answers."""
    fake = FakeEncoder()
    dialer = PodDialer(times=PodTimes(check_s=0.05, check_timeout_s=5.0))
    pool = EncoderPool([await fake.start()], ServedModel(), dialer)
    try:
        await pool.start()
        await until(pool.description)

        async def never(*_):
            await asyncio.sleep(2 * PATIENCE_S)

        fake.before = never
        pod = for_file(pool.available(pool.description(), ()), b"k", 1)
        call = asyncio.create_task(pod.encode(encode_request(b"k" * 32), 2 * PATIENCE_S))
        await until(lambda: fake.requests)
        fake.health.silent = True
        # From now on: before, a check that a busy machine delays would lose the pod.
        dialer.times = PodTimes(check_s=0.05, check_timeout_s=0.05)
        with pytest.raises(ProcessLost):
            async with asyncio.timeout(PATIENCE_S):
                await call
        await until(lambda: pool.description() is None and fake.num_cancelled == 1)
    finally:
        await pool.close()
        await fake.stop()


@in_loop
async def test_encoders_of_another_kind_are_not_mixed():
    fakes = [FakeEncoder(), FakeEncoder(), FakeEncoder(key_prefix=b"z" * 32)]
    pool = EncoderPool([await fake.start() for fake in fakes], ServedModel(), DIALER)
    await pool.start()
    await until(lambda: len(pool.healthy()) == 3)
    description = pool.description()
    assert description.key_prefix == fakes[0].description.key_prefix
    pods = pool.available(description, ())
    chosen = {for_file(pods, b"%d" % i, 1).address for i in range(50)}
    assert chosen == {fakes[0].address, fakes[1].address}
    (left,) = pool.available(description, {fakes[0].address})
    assert left.address == fakes[1].address
    with pytest.raises(Unavailable):
        pool.available(description, chosen)
    await pool.close()
    for fake in fakes:
        await fake.stop()


@in_loop
async def test_only_an_encoder_that_had_the_call_is_lost_with_it():
    """Whether the connection breaks or the health check finds out first."""
    fake = FakeEncoder()
    pod = EncoderPod(await fake.start(), ServedModel(), DIALER)

    async def asked(end):
        fake.reset()
        fake.before = lambda _: asyncio.sleep(PATIENCE_S)
        call = asyncio.create_task(pod.encode(encode_request(), PATIENCE_S))
        while not fake.requests:  # noqa: ASYNC110 - a list of a fake
            await asyncio.sleep(0.001)
        await end
        return (await asyncio.gather(call, return_exceptions=True))[0]

    assert type(await asked(pod.disconnect("it does not answer"))) is ProcessLost
    await pod.connect()
    assert type(await asked(fake.stop())) is ProcessLost
    with pytest.raises(Unavailable) as unsent:
        await pod.encode(encode_request(), PATIENCE_S)
    assert type(unsent.value) is Unavailable
    await pod.close()


@in_loop
async def test_a_message_with_a_file_is_serialized_once():
    """Its bytes are the call's, its announced size, and the work that is under way."""
    pod = EncoderPod("127.0.0.1:1", ServedModel(), DIALER)
    answer, sent, num_serialized = asyncio.get_running_loop().create_future(), [], 0

    class Message:
        def SerializeToString(self):
            nonlocal num_serialized
            num_serialized += 1
            return b"x" * 1000

    def method(data, *, timeout, metadata):
        sent.append((data, dict(metadata)))
        return answer

    asked = asyncio.ensure_future(pod.call(method, Message(), PATIENCE_S))
    await turns()
    assert pod.work.seconds == pod.work.cost(0, 1000) > 0
    answer.set_result("done")
    assert await asked == "done" and num_serialized == 1 and pod.work.seconds == 0
    ((data, metadata),) = sent
    assert len(data) == 1000 and "1000" in metadata.values()
    await pod.close()


@in_loop
async def test_an_encoder_that_fails_a_health_check_has_a_last_word():
    """A front whose engine has ended says so, and stops: the check may overtake that."""
    fake = FakeEncoder()
    pod = EncoderPod(await fake.start(), ServedModel(), DIALER)
    may_answer = asyncio.Event()

    async def end(_):
        await may_answer.wait()
        raise EngineLost("its engine has ended")

    fake.before = end
    call = asyncio.create_task(pod.encode(encode_request(), PATIENCE_S))
    while not fake.requests:  # noqa: ASYNC110 - a list of a fake
        await asyncio.sleep(0.001)
    await pod.disconnect("it does not answer")
    await turns()
    assert not call.done()
    may_answer.set()
    with pytest.raises(EngineLost):
        await call
    await pod.close()
    await fake.stop()


@in_loop
async def test_an_error_after_the_caller_was_cancelled_is_not_reported_as_unretrieved():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    pod = EncoderPod("127.0.0.1:1", ServedModel(), DIALER)

    async def cancel_as_it_fails():
        answer = asyncio.get_running_loop().create_future()
        pod._encode = lambda request, **_: answer
        asked = asyncio.ensure_future(pod.encode(encode_request(), PATIENCE_S))
        await turns()
        answer.set_exception(Unavailable("gone"))
        await asyncio.sleep(0)  # it has failed, and the caller has not run yet
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        pod._encode = None

    await cancel_as_it_fails()
    assert pod.num_in_flight == 0
    gc.collect()  # unretrieved exceptions are reported on deallocation
    await asyncio.sleep(0)
    asyncio.get_running_loop().set_exception_handler(None)
    assert not reported
    await pod.close()


async def test_mailbox_hands_out_all_at_once_and_in_order():
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    for item in range(3):
        mailbox.put(item)
    assert await taking == [0, 1, 2]
    mailbox.put(3)
    assert await mailbox.take() == [3]
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    mailbox.put(4)
    assert await mailbox.take() == [4]


def test_pod_is_abstract_where_it_must_be():
    for name in ("connected", "connect", "disconnect"):
        assert name in DecoderPod.__dict__
