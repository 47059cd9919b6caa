"""What a request may cost: two decoders and two encoders, whichever message comes first.

`Attempts` runs with pods that die in every order of their messages, each delayed by some passes of
the event loop.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.common.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidImage,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.geometry import Run, Unit
from services.common.pb import decoder_pb2 as pb
from services.common.pb.encoder_pb2 import EncodeRequest, EncodeResponse
from services.gateway.answers.answer import AnswerFormat
from services.gateway.clients.encoder_work import EncoderWork
from services.gateway.clients.token_event import EmbeddingLost, EventReceiver, TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.media.images import Image
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.request.attempts import MAX_ATTEMPTS, Attempts
from services.gateway.request.completion import Completion
from tests.cases import cases
from tests.slots import slot_of

pytestmark = pytest.mark.thorough

NUM_RUNS = cases(100, 1000)
NUM_PODS = 6
ANSWER = [5, 6, 7, 8]
METRICS = GatewayMetrics()
# How an encoder dies of an image, as the gateway's client of it says.
DEATHS: dict[str, Callable[[], TriptychError]] = {
    "engine": lambda: EngineLost("the engine ended while it worked on the image"),
    "container or silence": lambda: ProcessLost("the encoder was lost during the call"),
    "timeout": lambda: DeadlineExceeded("the encoder did not answer in time"),
}


async def passes(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@dataclass
class World:
    """All pods that one request meets.

    Attributes:
        dies_of: image key, number of its call -> the error of a death; None: it is encoded.
        encode_delay, fetch_delay: passes of the event loop until the gateway's call fails, and
            until the decoder says so.
        scripts: of each submission in turn: tokens to send, and then the error; None: to the end.
        called: (encoder, image key) of each call; `after_a_loss`: encoders that were called then.
    """

    random: random.Random
    dies_of: Callable[[bytes, int], TriptychError | None] = lambda key, number: None
    encode_delay: tuple[int, int] = (0, 3)
    fetch_delay: tuple[int, int] = (0, 3)
    scripts: list[Any] = field(default_factory=list)
    called: list[tuple[str, bytes]] = field(default_factory=list)
    after_a_loss: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)  # encoders, once for each death
    num_decoders_lost: int = 0
    submitted: list[tuple[str, list[int]]] = field(default_factory=list)
    attempts: Any = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    outcomes: dict[tuple[str, bytes], "asyncio.Future[bool]"] = field(default_factory=dict)

    def outcome(self, address: str, key: bytes) -> "asyncio.Future[bool]":
        """Whether the encoder has the embedding, once that is known."""
        return self.outcomes.setdefault((address, key), asyncio.get_running_loop().create_future())

    def delay(self, bounds: tuple[int, int]) -> int:
        return self.random.randint(*bounds)


class Encoder:
    def __init__(self, world: World, address: str) -> None:
        self.world, self.address = world, address
        self.work, self.num_in_flight = EncoderWork(), 0

    def has_sent(self, _: bytes) -> bool:
        return False

    async def encode(self, request: EncodeRequest, *_: float) -> EncodeResponse:
        world, key = self.world, request.image_key
        if world.attempts._losses.num_lost["encoder"]:
            world.after_a_loss.add(self.address)
        number = sum(called == key for _, called in world.called)
        world.called.append((self.address, key))
        await asyncio.sleep(0)  # so that a call that is cancelled at once reaches no encoder
        error = world.dies_of(key, number)
        if error is None:
            await passes(world.delay(world.encode_delay))
            world.outcome(self.address, key).set_result(True)
            return EncodeResponse(source=EncodeResponse.SOURCE_COMPUTED, num_tokens=1)
        if not isinstance(error, Overloaded):
            world.lost.append(self.address)
        world.outcome(self.address, key).set_result(False)
        await passes(world.delay(world.encode_delay))
        raise error


class Encoders:
    def __init__(self, world: World) -> None:
        self.pods = [Encoder(world, f"encoder-{i}") for i in range(NUM_PODS)]

    def description(self, adapter: bytes = b"") -> object:
        return SimpleNamespace(key_prefix=b"prefix")

    def available(self, _: object, exclude: set[str]) -> list[Encoder]:
        pods = [pod for pod in self.pods if pod.address not in exclude]
        if not pods:
            raise Unavailable("none")
        return pods


class Decoder:
    def __init__(self, world: World, session: str) -> None:
        self.world, self.session, self.address = world, session, session
        self.description = pb.DescribeDecoderResponse()
        self._ids = count(1)
        self._running: dict[int, asyncio.Task[None]] = {}

    def submit(self, submit: pb.Submit, choice: int, receiver: EventReceiver, _: object) -> int:
        generated = np.frombuffer(submit.generated_token_ids, "<i4").tolist()
        world = self.world
        world.submitted.append((self.session, generated))
        script = world.scripts.pop(0) if world.scripts else (len(ANSWER), None)
        sequence_id = next(self._ids)
        images = [(image.encoder_address, image.image_key) for image in submit.images]

        def send(**fields: Any) -> None:
            receiver.receive(TokenEvent(choice, **fields))

        run = self._run(images, len(generated), script, send)
        self._running[sequence_id] = task = asyncio.create_task(run)
        world.tasks.add(task)
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        self._running.pop(sequence_id).cancel()

    async def _run(
        self,
        images: Sequence[tuple[str, bytes]],
        begin: int,
        script: tuple[int, TriptychError | None],
        send: Callable[..., None],
    ) -> None:
        num_tokens, error = script
        if error is None or num_tokens:
            fetches = [asyncio.create_task(self._fetch(*image)) for image in images]
            try:
                for fetch in asyncio.as_completed(fetches):
                    if lost := await fetch:
                        send(error=EmbeddingLost("the image was not encoded", lost))
                        return
            finally:
                for fetch in fetches:
                    fetch.cancel()
        end = len(ANSWER) if error is None else min(len(ANSWER) - 1, begin + num_tokens)
        for place in range(begin, end):
            await passes(self.world.delay((0, 2)))
            is_last = place == len(ANSWER) - 1
            send(token_ids=(ANSWER[place],), finish_reason="stop" if is_last else None)
        if error is not None:
            await passes(self.world.delay((0, 4)))
            self.world.num_decoders_lost += isinstance(error, ProcessLost)
            send(error=error)

    async def _fetch(self, address: str, key: bytes) -> str:
        """The address if the embedding is lost."""
        has_it = await asyncio.shield(self.world.outcome(address, key))
        await passes(self.world.delay(self.world.fetch_delay))
        return "" if has_it else address


class Decoders:
    def __init__(self, world: World) -> None:
        self.pods = [Decoder(world, f"decoder-{i}") for i in range(NUM_PODS)]

    def choose(self, _: object, key: bytes, exclude: set[str], __: int = 0) -> Decoder:
        for pod in self.pods:
            if pod.session not in exclude:
                return pod
        raise Unavailable("none")


async def ask(world: World, num_images: int = 1, **options: float) -> list[int] | TriptychError:
    """The tokens that the client gets, or the error."""
    unit = Unit((1, 2, 2))
    images = [Image(f"image {i}", bytes([i]), [unit]) for i in range(num_images)]
    request = Completion(
        "id",
        ChatRequest([]),
        Prompt(np.zeros(8, np.int32), None, 0, [Run(i, 1, unit, i) for i in range(num_images)]),
        images,
        pb.SamplingParams(max_tokens=8),
        slot_of(),
        AnswerFormat(),
        cache_salt=b"",
        deadline=1e12,
        timings=Timings(),
        encode_sources=[None] * num_images,
    )
    encoders: Any = Encoders(world)
    decoders: Any = Decoders(world)
    world.attempts = attempts = Attempts(request, encoders, decoders, METRICS, 60.0, **options)
    tokens: list[int] = []
    try:
        async with asyncio.timeout(30), aclosing(attempts.events()) as batches:
            async for events in batches:
                tokens += [token for event in events for token in event.token_ids]
    except TriptychError as error:
        return error
    finally:
        for task in world.tasks:
            task.cancel()
    return tokens


def simulate(run: Callable[[int], Any]) -> None:
    async def all_runs() -> None:
        for seed in range(NUM_RUNS):
            await run(seed)

    asyncio.run(all_runs())


ORDERS = {
    "the event first": ((4, 20), (0, 2)),
    "the call first": ((0, 2), (4, 20)),
    "both at once": ((0, 3), (0, 3)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("death", DEATHS)
def test_an_image_of_which_encoders_die_costs_two(death: str, order: str) -> None:
    encode_delay, fetch_delay = ORDERS[order]

    async def run(seed: int) -> None:
        world = World(random.Random(seed), lambda *_: DEATHS[death](), encode_delay, fetch_delay)
        found = await ask(world)
        assert len(set(world.lost)) == len(world.called) == 2, seed
        # Only an engine's front knows what was in work.
        wanted = InvalidImage if death == "engine" else Unavailable
        assert type(found) is wanted, (seed, found)
        if death == "engine":
            assert found.param == "image 0"
        else:
            assert found.retry_after_s

    simulate(run)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("death", DEATHS)
def test_an_image_that_lost_one_encoder_is_encoded_by_another(death: str, order: str) -> None:
    encode_delay, fetch_delay = ORDERS[order]

    async def run(seed: int) -> None:
        world = World(
            random.Random(seed), lambda _, n: None if n else DEATHS[death](),
            encode_delay, fetch_delay,
        )  # fmt: skip
        assert await ask(world) == ANSWER, seed
        assert len(world.called) == 2

    simulate(run)


@pytest.mark.parametrize("order", ORDERS)
def test_images_of_one_request_cost_one_encoder_more_after_the_first(order: str) -> None:
    """Which of them is at fault is unknown. Those that were in work elsewhere stay there."""
    encode_delay, fetch_delay = ORDERS[order]
    num_refused = 0

    async def run(seed: int) -> None:
        nonlocal num_refused
        rng = random.Random(seed)
        num_images = rng.randint(2, 5)
        bad = {i for i in range(num_images) if rng.random() < 0.5}
        death = rng.choice(list(DEATHS.values()))
        keys: dict[bytes, int] = {}

        def dies_of(key: bytes, number: int) -> TriptychError | None:
            index = keys.setdefault(key, world.attempts._encodes.keys.index(key))
            return death() if index in bad else None

        world = World(rng, dies_of, encode_delay, fetch_delay)
        found = await ask(world, num_images)
        assert len(world.after_a_loss) <= 1, seed
        for key in {key for _, key in world.called}:
            assert len({a for a, called in world.called if called == key}) <= 2, seed
        if not bad:
            assert found == ANSWER
        else:
            assert isinstance(found, Unavailable | InvalidImage), (seed, found)
            if isinstance(found, InvalidImage):
                assert found.param in {f"image {i}" for i in bad}
                num_refused += 1

    simulate(run)
    assert num_refused > NUM_RUNS // 20


@pytest.mark.parametrize("order", ORDERS)
def test_full_encoders_are_not_counted(order: str) -> None:
    encode_delay, fetch_delay = ORDERS[order]

    async def run(seed: int) -> None:
        world = World(
            random.Random(seed),
            lambda _, n: Overloaded("full", retry_after_s=7) if n < 4 else None,
            encode_delay, fetch_delay,
        )  # fmt: skip
        assert await ask(world) == ANSWER, seed
        assert len(world.called) == MAX_ATTEMPTS

    simulate(run)


def test_encoders_that_are_silent_to_both_count_as_lost() -> None:
    world = World(random.Random(0), lambda *_: ProcessLost("x"), (10**9, 10**9))
    found = asyncio.run(ask(world, outcome_timeout_s=0.001))
    assert type(found) is Unavailable
    assert len(world.called) == 2


@pytest.mark.parametrize("when", ["before the first token", "after it", "mixed"])
def test_a_request_of_which_decoders_die_costs_two(when: str) -> None:
    places = {"before the first token": [0], "after it": [1, 2], "mixed": [0, 1, 2]}[when]

    async def run(seed: int) -> None:
        rng = random.Random(seed)
        error = rng.choice([EngineLost, ProcessLost])
        world = World(rng, scripts=[(rng.choice(places), error("x")) for _ in range(9)])
        found = await ask(world, num_images=seed % 2)
        assert type(found) is Unavailable and found.retry_after_s, (seed, found)
        assert len({session for session, _ in world.submitted}) == len(world.submitted) == 2
        assert all(generated == ANSWER[: len(generated)] for _, generated in world.submitted)

    simulate(run)


def test_decoders_that_only_refuse_are_not_counted() -> None:
    for refusals in product([Overloaded("full"), Unavailable("it shuts down")], repeat=3):
        for lost, tokens in product(range(4), (0, 1)):
            script: list[Any] = [(tokens, error) for error in refusals]
            script.insert(lost, (tokens, ProcessLost("x")))
            world = World(random.Random(lost), scripts=script)
            assert asyncio.run(ask(world)) == ANSWER
            assert len(world.submitted) == MAX_ATTEMPTS


def test_whatever_dies_of_a_request_no_more_than_two_of_a_kind_are_lost() -> None:
    results: set[type] = set()

    async def run(seed: int) -> None:
        rng = random.Random(seed)
        share = rng.random()

        def dies_of(*_: object) -> TriptychError | None:
            kinds = [*DEATHS.values(), lambda: Overloaded("full")]
            return rng.choice(kinds)() if rng.random() < share else None

        endings = [ProcessLost("x"), EngineLost("x"), Overloaded("full"), Unavailable("x"), None]
        scripts = [(rng.randint(0, 3), rng.choice(endings)) for _ in range(9)]
        world = World(rng, dies_of, (0, 9), (0, 9), scripts)
        found = await ask(world)
        assert len(world.lost) <= 2, seed
        assert world.num_decoders_lost <= 2, seed
        assert found == ANSWER or isinstance(found, Unavailable | InvalidImage), (seed, found)
        results.add(type(found))

    simulate(run)
    assert results == {list, Overloaded, Unavailable, InvalidImage}
