"""One clip over several encoders: what each is sent, and what is encoded again when one is lost."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from services.common.errors import EngineLost, Overloaded
from tests.contract.test_gateway_video import ask, asking, clip, video
from tests.fakes import FakeEncoder, once, raising
from tests.gateway_fixtures import image_url
from tests.gateway_stack import GatewayStack

KEY_FRAMES = range(120, 1800, 120)


@pytest.fixture(scope="module")
def _four(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("four"), num_encoders=4, num_decoders=1,
        log_level="ERROR",
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def four(_four) -> Iterator[GatewayStack]:
    """Four encoders, reset, to which a video has a key frame every four seconds."""
    _four.reset()
    for encoder in _four.encoders:
        encoder.key_frames = KEY_FRAMES
    yield _four
    _four.wait(lambda: _four.gateway.admission.num_running == 0)


def long(tag: str) -> dict:
    """A clip of a minute, of which 16 pairs of frames are sampled."""
    return {**video(clip(1800, 30.0, height=1080, width=1920, tag=tag)), "num_frames": 32}


def team(stack: GatewayStack) -> list[FakeEncoder]:
    """The encoders that were asked for units, in order of their first frames."""
    asked = [encoder for encoder in stack.encoders if encoder.requests]
    return sorted(asked, key=lambda encoder: min(r.frames.first for r in encoder.requests))


def wait_for_encodes(stack: GatewayStack, count: int) -> None:
    """Lets the decoder answer when the gateway knows that so many units are encoded, because an
    answer that ends cancels the calls that have not been answered.
    """

    def is_encoded() -> bool:
        pods = stack.gateway.service.encoders.pods
        num_known = sum(len(encoder.known) for encoder in stack.encoders)
        return num_known == count and not any(pod.num_in_flight for pod in pods)

    stack.decoder.before = once(is_encoded)


def times_encoded(stack: GatewayStack) -> Counter[bytes]:
    return Counter(r.image_key for encoder in stack.encoders for r in encoder.requests)


def test_a_long_clip_is_divided_at_key_frames(four):
    ask(four, long("a"))
    encoders = team(four)
    assert len(encoders) == 4
    # The file has travelled once to each.
    assert all(len(encoder.probes) == 1 for encoder in encoders)
    frames = [sorted(r.frames.first for r in encoder.requests) for encoder in encoders]
    flat = [first for each in frames for first in each]
    assert flat == sorted(flat) and len(flat) == 16
    # Between two ranges lies a key frame.
    for before, after in pairwise(encoders):
        last = max(r.frames.first for r in before.requests)
        assert last // 120 < min(r.frames.first for r in after.requests) // 120
    (submit,) = four.decoder.submits
    sent = {r.image_key: e.address for e in encoders for r in e.requests}
    assert {i.image_key: i.encoder_address for i in submit.images} == sent
    assert set(times_encoded(four).values()) == {1}


def test_units_that_are_known_stay_where_they_are(four):
    wait_for_encodes(four, 16)
    ask(four, long("b"))
    (divided,) = four.decoder.submits
    places = {i.image_key: i.encoder_address for i in divided.images}
    probes = [len(encoder.probes) for encoder in four.encoders]
    ask(four, long("b"))
    again = four.decoder.submits[1]
    assert {i.image_key: i.encoder_address for i in again.images} == places
    # Only the encoder that probes is sent the file again.
    now = [len(encoder.probes) for encoder in four.encoders]
    assert sum(now) - sum(probes) == 1


def test_a_short_clip_and_a_clip_without_key_frames_go_to_one(four):
    ask(four, {**video(clip(60, 30.0, height=1080, width=1920)), "num_frames": 8})
    assert len(team(four)) == 1
    four.reset()
    ask(four, long("c"))
    assert len(team(four)) == 1


def test_a_large_file_is_sent_to_a_second_encoder_while_the_first_probes(four):
    both = threading.Event()

    async def meet(_):
        if sum(len(encoder.probes) for encoder in four.encoders) == 2:
            both.set()
        await once(both.is_set)(_)

    for encoder in four.encoders:
        encoder.before_probe = meet
    ask(four, long("p" * (2 << 20) + " ahead"))
    assert len(team(four)) == 4
    assert all(len(encoder.probes) == 1 for encoder in four.encoders)
    assert set(times_encoded(four).values()) == {1}


def test_a_second_encoder_that_refuses_the_file_fails_no_clip(four):
    num_probes = 0

    async def refuse_second(_):
        nonlocal num_probes
        num_probes += 1
        if num_probes == 2:
            raise Overloaded("full of videos", retry_after_s=1)

    for encoder in four.encoders:
        encoder.before_probe = refuse_second
    four.decoder.before = once(lambda: len(times_encoded(four)) == 16)
    ask(four, long("p" * (2 << 20) + " declined"))
    assert len(times_encoded(four)) == 16


def test_a_clip_is_divided_only_if_there_is_memory_for_the_calls(four, monkeypatch):
    """The body of 1.4 MB counts four times, and the file of 1 MB twice for each further encoder."""
    padding = "p" * 1_000_000
    monkeypatch.setattr(four.gateway.admission.memory, "max_bytes", 10_000_000)
    ask(four, long(padding + " small"))
    assert len(team(four)) == 1
    pods = four.gateway.service.encoders.pods
    four.wait(lambda: not any(pod.num_in_flight for pod in pods))
    four.reset()
    for encoder in four.encoders:
        encoder.key_frames = KEY_FRAMES
    monkeypatch.undo()
    ask(four, long(padding + " large"))
    assert len(team(four)) == 4


def test_busy_encoders_take_no_range(four):
    released = threading.Event()
    for encoder in four.encoders:
        encoder.before = once(released.is_set)
    four.decoder.before = once(released.is_set)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, four, long("d"))
        four.wait(lambda: sum(times_encoded(four).values()) == 16)
        of_first = set(times_encoded(four))
        second = pool.submit(ask, four, long("e"))
        four.wait(lambda: sum(times_encoded(four).values()) == 32)
        released.set()
        assert first.result() and second.result()
    busy = [{r.image_key for r in encoder.requests} - of_first for encoder in four.encoders]
    assert sorted(map(len, busy)) == [0, 0, 0, 16]


@pytest.mark.parametrize("place", range(4))
def test_the_range_of_a_lost_encoder_is_taken_by_another(four, place):
    """Units that were encoded elsewhere, before or after the loss, are not encoded again."""
    released = threading.Event()

    async def half(request):
        if (request.frames.first // 116) % 2:
            await once(released.is_set)(request)

    for encoder in four.encoders:
        encoder.before = half
    four.decoder.before = once(released.is_set)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, four, long(f"lost{place}"))
        four.wait(lambda: sum(times_encoded(four).values()) == 16 and len(team(four)) == 4)
        lost = team(four)[place]
        other = [encoder for encoder in four.encoders if encoder is not lost]
        of_lost = {r.image_key for r in lost.requests}
        four.thread.run(lost.stop())
        four.wait(lambda: of_lost <= {r.image_key for e in other for r in e.requests})
        released.set()
        assert asked.result()
    again = {key for key, count in times_encoded(four).items() if count > 1}
    assert again == of_lost and max(times_encoded(four).values()) == 2
    # One encoder has taken the range, and no other file has travelled twice.
    assert sum(of_lost <= {r.image_key for r in e.requests} for e in other) == 1
    assert all(len(encoder.probes) == 1 for encoder in other)


def test_a_refused_file_stays_with_the_encoder_that_has_probed_it(four):
    """One further encoder refuses the file, before the two others answer."""
    released, num_probes = threading.Event(), 0

    async def refuse(_):
        nonlocal num_probes
        num_probes += 1
        if num_probes == 2:
            await once(lambda: num_probes == 4 and bool(four.decoder.submits))(_)
            raise Overloaded("full of videos", retry_after_s=1)
        if num_probes > 2:
            await once(released.is_set)(_)

    for encoder in four.encoders:
        encoder.before_probe = refuse
    four.decoder.before = once(lambda: len(times_encoded(four)) == 16)
    try:
        ask(four, long("refused"))
    finally:
        released.set()
    (home,) = team(four)
    assert len(home.requests) == 16 and num_probes == 4
    assert len(four.decoder.submits) == 2


def test_two_lost_engines_end_a_divided_clip(four):
    for encoder in four.encoders:
        encoder.before = raising(EngineLost("the engine ended"))
    four.decoder.before = once(lambda: False)
    answer = four.chat(messages=asking(long("f")))
    assert answer.status_code == 400 and "two encoders" in answer.text


def test_images_of_a_request_are_divided_by_patches(four):
    """Four large images and many small ones: the large ones lie on four encoders."""
    sizes = [(512, 512)] * 4 + [(64, 64)] * 12
    parts = [
        {"type": "image_url", "image_url": {"url": image_url(*size, (n, 0, 0))}}
        for n, size in enumerate(sizes)
    ]
    wait_for_encodes(four, 16)
    ask(four, *parts)
    patches = [sum(r.grid.h * r.grid.w for r in e.requests) for e in four.encoders]
    assert sum(patches) == 4 * 1024 + 12 * 256 and max(patches) <= sum(patches) / 4 + 256
    assert set(times_encoded(four).values()) == {1}
    placed = {i.image_key: i.encoder_address for i in four.decoder.submits[0].images}
    ask(four, *parts)
    assert {i.image_key: i.encoder_address for i in four.decoder.submits[1].images} == placed


def test_tokens_are_work_for_a_text_when_their_embeddings_are_encoded(four):
    encoded, answered = threading.Event(), threading.Event()
    for encoder in four.encoders:
        encoder.before = once(encoded.is_set)
    four.decoder.before = once(answered.is_set)
    (pod,) = four.gateway.service.decoders.pods

    def num_coming() -> int:
        return round(pod.prompts.work(waits=True) - pod.prompts.work())

    def num_tokens() -> int:
        return sum(image.num_tokens for submit in four.decoder.submits for image in submit.images)

    part = {"type": "image_url", "image_url": {"url": image_url(320, 320)}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, four, part, part)  # one embedding, two runs of tokens
        four.wait(lambda: num_tokens() and num_coming() == num_tokens())
        encoded.set()
        four.wait(lambda: pod.num_in_flight == 1 and num_coming() == 0)
        answered.set()
        assert asked.result()
