"""Which decoder a prompt goes to, and what the gateway remembers of each."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.sent_prompts import Coming, PromptChain, SentPrompts, choose

ROOM = 100_000


def chain(*tokens: int, salt: bytes = b"", images: list[pb.ImageRef] | None = None) -> PromptChain:
    """A prompt of 64 tokens of each of these numbers, and one more."""
    ids = np.append(np.repeat(np.array(tokens, np.int32), 64), 0).astype(np.int32)
    return PromptChain(ids, images or [], salt)


def image(key: bytes, offset: int, address: str = "a:1") -> pb.ImageRef:
    return pb.ImageRef(image_key=key, offset=offset, num_tokens=100, encoder_address=address)


@dataclass
class Pod:
    address: str
    num_in_flight: int = 0
    prompts: SentPrompts = field(default_factory=lambda: SentPrompts(ROOM))

    def answer(self, prompt: PromptChain, num_cached: int | None = None) -> None:
        """Is sent a prompt, starts and ends it."""
        cached = self.prompts.num_found(prompt) if num_cached is None else num_cached
        sent = self.prompts.send(prompt)
        self.prompts.started(sent, cached)
        self.prompts.ended(sent)


def test_a_beginning_is_found_as_far_as_it_was_sent() -> None:
    sent = Pod("a:1")
    sent.answer(chain(1, 2, 3))
    found = sent.prompts.num_found
    assert found(chain(1, 2, 3, 4)) == 192
    assert found(chain(1, 2, 3)) == 192
    assert found(chain(1, 2, 9)) == 128
    assert found(chain(2, 3)) == 0
    assert found(chain(1, 2, 3, salt=b"another tenant")) == 0
    # The last token is computed in any case.
    whole = PromptChain(np.repeat(np.array([1, 2, 3], np.int32), 64), [], b"")
    assert found(whole) == 128


def test_images_are_told_apart_by_key_and_place() -> None:
    sent = Pod("a:1")
    sent.answer(chain(1, 2, 3, images=[image(b"cat", 70)]))
    found = sent.prompts.num_found
    assert found(chain(1, 2, 3, images=[image(b"cat", 70)])) == 192
    assert found(chain(1, 2, 3, images=[image(b"dog", 70)])) == 64
    assert found(chain(1, 2, 3, images=[image(b"cat", 71)])) == 64
    assert found(chain(1, 2, 3)) == 64


def test_links_of_a_long_prompt_are_longer_behind() -> None:
    ids = np.arange(100_000, dtype=np.int32)
    links = PromptChain(ids, [], b"").links
    assert len(links) == 64 + (100_000 - 1 - 64 * 64) // 512
    assert links[63][1] == 4096 and links[64][1] == 4608
    sent = SentPrompts(1 << 30)
    sent.send(PromptChain(ids, [], b""))
    ids = ids.copy()
    ids[50_000] = 0
    assert 50_000 - 512 <= sent.num_found(PromptChain(ids, [], b"")) <= 50_000


def test_what_does_not_fit_is_forgotten_oldest_and_deepest_first() -> None:
    pod = Pod("a:1", prompts=SentPrompts(64 * 4))
    pod.answer(chain(1, 2, 3))
    pod.answer(chain(4, 5))
    assert pod.prompts.num_found(chain(1, 2, 3)) == 128
    assert pod.prompts.num_found(chain(4, 5)) == 128
    pod.answer(chain(1))  # used again
    pod.answer(chain(6))
    assert pod.prompts.num_found(chain(1, 2)) == 64
    assert pod.prompts.num_found(chain(4, 5)) == 128


def test_a_miss_says_that_older_prompts_are_gone_too() -> None:
    pod = Pod("a:1")
    for number in range(6):
        pod.answer(chain(number, 90))
    pod.answer(chain(3, 90), num_cached=0)
    found = [pod.prompts.num_found(chain(number, 90)) for number in range(6)]
    assert found == [0, 0, 0, 128, 128, 128]


def test_a_hit_on_half_of_it_forgets_nothing() -> None:
    """Models with recurrent states find the ends alone that they kept a state of."""
    pod = Pod("a:1")
    pod.answer(chain(1))
    pod.answer(chain(2, 3))
    pod.answer(chain(2, 3, 4), num_cached=64)
    assert pod.prompts.num_found(chain(1)) == 64


def test_a_miss_on_what_is_being_computed_forgets_nothing() -> None:
    pod = Pod("a:1")
    pod.answer(chain(9))
    first, second = pod.prompts.send(chain(1)), pod.prompts.send(chain(1))
    pod.prompts.started(first, 0)
    pod.prompts.started(second, 0)  # they ran side by side
    assert pod.prompts.num_found(chain(9)) == 64


def test_a_prompt_that_does_not_use_the_cache_forgets_nothing() -> None:
    pod = Pod("a:1")
    pod.answer(chain(9))
    sent = pod.prompts.send(chain(9), uses_cache=False)
    pod.prompts.started(sent, 0)
    assert pod.prompts.num_found(chain(9)) == 64


def test_work_comes_back_to_nothing() -> None:
    random.seed(7)
    prompts, running = SentPrompts(1000), []
    for _ in range(2000):
        if running and random.random() < 0.5:
            sent, started = running.pop(random.randrange(len(running)))
            if not started and random.random() < 0.7:
                prompts.started(sent, random.choice((0, 64, 128)))
                running.append((sent, True))
            else:
                prompts.ended(sent)
        else:
            numbers = [random.randrange(3) for _ in range(random.randrange(6))]
            running.append((prompts.send(chain(*numbers)), False))
        assert prompts.work() > 0 or not running
    for sent, _ in running:
        prompts.ended(sent)
    assert prompts.work() == pytest.approx(0)
    assert prompts._num_tokens == sum(size for _, size in prompts._links.values()) <= 1000


def test_a_conversation_stays_where_its_beginning_is() -> None:
    pods = [Pod(f"{name}:1") for name in "abcd"]
    first = chain(1, 2, 3)
    home = choose(pods, first, b"key")
    home.answer(first)
    assert all(choose(pods, chain(1, 2, 3, 4), b"%d" % key) is home for key in range(20))


def test_a_common_beginning_spreads_when_its_decoder_has_much_to_do() -> None:
    pods = [Pod(f"{name}:1") for name in "abcd"]
    system = list(range(30))  # 1,920 tokens
    pods[0].answer(chain(*system))
    shares = dict.fromkeys("abcd", 0)
    for number in range(100):  # none ends
        pod = choose(pods, chain(*system, 100 + number), b"%d" % number)
        pod.prompts.started(pod.prompts.send(chain(*system, 100 + number)), 0)
        pod.num_in_flight += 1
        shares[pod.address[0]] += 1
    assert max(shares.values()) <= 1.3 * 25


def test_a_common_beginning_spreads_sooner_the_more_prompts_share_it() -> None:
    """A gateway of several, which sees few of the prompts that run."""
    begun = tuple(range(32))  # 2,048 tokens
    first, second = Pod("a:1"), Pod("b:1")
    key = next(
        bytes([n]) for n in range(256) if choose([first, second], chain(n), bytes([n])) is first
    )
    first.answer(chain(*begun, 90))
    chosen: list[Pod] = []
    for number in range(100, 112):
        prompt = chain(*begun, number)
        chosen.append(choose([first, second], prompt, key))
        chosen[-1].prompts.started(chosen[-1].prompts.send(prompt), 0)
    assert chosen[0] is first
    assert 4 <= sum(pod is second for pod in chosen) <= 8
    # As many that share nothing do not move what one alone goes on with.
    first, second = Pod("a:1"), Pod("b:1")
    first.answer(chain(*begun, 90))
    for number in range(100, 103):
        first.prompts.send(chain(number))
    assert choose([first, second], chain(*begun, 90, 91), key) is first


def test_one_with_too_much_work_gets_no_more() -> None:
    pods = [Pod("a:1", num_in_flight=120), Pod("b:1", num_in_flight=40)]
    prompt = chain(*range(50))
    pods[0].answer(prompt)
    assert choose(pods, prompt, b"") is pods[1]


def test_an_image_prefers_the_decoder_of_its_encoders_host() -> None:
    pods = [Pod(f"{name}:1") for name in "abcd"]
    for host in "abcd":
        prompt = chain(1, 2, images=[image(b"cat", 70, f"{host}:9")])
        assert choose(pods, prompt, b"any").address == f"{host}:1"
    busy = chain(1, 2, images=[image(b"cat", 70, "a:9")])
    for _ in range(3):
        pods[0].prompts.send(chain(7, 8, 9))
    assert choose(pods, busy, b"any").address != "a:1"
    elsewhere = chain(1, 2, images=[image(b"cat", 70, "z:9")])
    assert choose(pods[1:], elsewhere, b"any") in pods[1:]


def test_tokens_whose_embeddings_are_still_to_come_are_work_for_those_that_wait_alone() -> None:
    pods = [Pod("a:1"), Pod("b:1")]
    clip, coming = chain(*range(100)), Coming(6000)
    clip.coming = coming
    waiting = pods[0].prompts.send(clip)
    pods[1].prompts.send(chain(*range(200, 220)))
    text, another = chain(300), chain(301)
    another.coming = Coming(40)
    assert all(choose(pods, text, b"%d" % key) is pods[0] for key in range(20))
    assert all(choose(pods, another, b"%d" % key) is pods[1] for key in range(20))
    coming.num_tokens = 500  # most of them have come
    assert all(choose(pods, text, b"%d" % key) is pods[1] for key in range(20))
    whole = pods[0].prompts.work(waits=True)
    assert whole - pods[0].prompts.work() == 500
    coming.num_tokens = 0
    assert pods[0].prompts.work() == whole
    # A prompt that ends before they come leaves nothing.
    coming.num_tokens = 6000
    pods[0].prompts.ended(waiting)
    assert pods[0].prompts.work() == pods[0].prompts.work(waits=True) == 0


def test_of_equal_decoders_equal_keys_get_the_same() -> None:
    pods = [Pod(f"{name}:1") for name in "abcd"]
    chosen = {key: choose(pods, chain(1), b"%d" % key).address for key in range(60)}
    assert len(set(chosen.values())) == 4
    for key, address in chosen.items():
        assert choose(list(reversed(pods)), chain(1), b"%d" % key).address == address
