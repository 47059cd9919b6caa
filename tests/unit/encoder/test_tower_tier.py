"""The order in which the tower computes the images of several tenants."""

import asyncio
from collections.abc import Awaitable

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.store import EmbeddingStore, Lookup, Tier
from services.common.errors import TriptychError
from services.common.geometry import Geometry, Unit
from services.encoder.engine.messages import (
    CancelImage,
    EncodeImage,
    EngineMessage,
    FrontMessage,
    ImageDone,
    MoveImage,
    PlaceImage,
    Source,
)
from services.encoder.front.admission import Admission, Share
from services.encoder.front.embeddings import Embeddings, Encoded
from services.encoder.front.engine_client import EngineClient
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.front.tower_tier import TowerTier
from services.encoder.metrics import EncoderMetrics
from tests.noise import PATIENCE_S

GEOMETRY = Geometry(0, 16, 2, 1, 1 << 30)
UNIT = Unit((1, 4, 4))
BATCH, OTHERS = Share("a/batch", background=True), Share("b")


class Engine:
    """The engine's end of the channel. It computes an image when a test says so: the image of the
    lowest rank among those that have their place.
    """

    def __init__(self) -> None:
        self.jobs: dict[int, EncodeImage] = {}
        self.ranks: dict[int, float] = {}
        self.placed: set[int] = set()
        self.completes_cancelled = False  # whether cancelled images are on the device already
        self.computed: list[str] = []  # tenants
        self._out: asyncio.Queue[EngineMessage] = asyncio.Queue()

    async def receive(self) -> EngineMessage:
        return await self._out.get()

    def send(self, *messages: FrontMessage) -> None:
        for message in messages:
            match message:
                case EncodeImage():
                    self.jobs[message.job_id] = message
                    self.ranks[message.job_id] = message.rank
                case PlaceImage():
                    self.placed.add(message.job_id)
                case MoveImage():
                    self.ranks[message.job_id] = message.rank
                case CancelImage() if not self.completes_cancelled:
                    self._end(ImageDone(message.job_id, error_code="cancelled"))
                case _:
                    pass

    async def compute(self, count: int = 1, *, error_code: str = "") -> None:
        """Ends images in the order of their ranks."""
        for _ in range(count):
            await settle()
            job_id = min(self.placed, key=lambda job_id: (self.ranks[job_id], job_id))
            self.computed.append(self.jobs[job_id].tenant)
            self._end(ImageDone(job_id, error_code=error_code))
        await settle()

    def _end(self, done: ImageDone) -> None:
        if self.jobs.pop(done.job_id, None) is not None:
            self.placed.discard(done.job_id)
            self._out.put_nowait(done)


class Redis(Tier[Work]):
    """Embeddings that another pod has stored. It answers once `answers` is set."""

    name = "redis"

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.answers = asyncio.Event()
        self.answers.set()

    async def find(self, lookup: Lookup[Work]) -> bool:
        await self.answers.wait()
        return lookup.key in self.keys


class Encoder:
    """The front's part of an encoder, with all of its own classes from the key to the channel."""

    def __init__(self) -> None:
        self.engine, self.redis, self.sources = Engine(), Redis(), SourceStore(1 << 20)
        self.admission = Admission(1 << 20)
        metrics, registry = EncoderMetrics(), CollectorRegistry()
        client = EngineClient(self.engine, metrics)
        self.tower = TowerTier(client, self.admission, metrics, self.sources)
        counters = [Counter(name, name, ["tier"], registry=registry) for name in ("hits", "misses")]
        self.store = EmbeddingStore(Arena(1 << 20), [self.redis, self.tower], *counters)
        self.embeddings = Embeddings(
            like=EmbeddingSpec("bfloat16", 1, 0, 8), geometry=GEOMETRY, store=self.store,
            sources=self.sources,
        )  # fmt: skip
        self.running = asyncio.create_task(client.run())

    def encode(self, key: str, share: Share) -> "asyncio.Task[Encoded]":
        work = Work(Source(key.encode()), UNIT, share)
        return asyncio.create_task(self.embeddings.encode(key.encode(), work))

    def encode_all(self, name: str, share: Share, count: int) -> "list[asyncio.Task[Encoded]]":
        return [self.encode(f"{name} {number}", share) for number in range(count)]

    async def close(self) -> None:
        await self.store.close()
        self.running.cancel()
        await asyncio.wait((self.running,))
        await self.store.unmap()


@pytest.fixture
async def encoder():
    made = Encoder()
    yield made
    await made.close()


async def settle() -> None:
    """Lets all tasks go on until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def soon(awaited: Awaitable[Encoded]) -> Encoded:
    async with asyncio.timeout(PATIENCE_S):
        return await awaited


async def position(encoder: Encoder, share: Share, *, others: int) -> int:
    """Returns how many images have been computed once a new image of a tenant has been, while this
    number of images of another tenant wait.
    """
    before = len(encoder.engine.computed)
    encoder.encode_all("others", OTHERS, others)
    await settle()
    new = encoder.encode("new", share)
    await settle()
    while not new.done():
        await encoder.engine.compute()
    assert encoder.engine.computed[-1] == share.tenant
    return len(encoder.engine.computed) - before


async def test_images_that_redis_has_do_not_delay_a_tenants_next_image(encoder: Encoder) -> None:
    for number in range(50):
        key = f"stored {number}"
        encoder.redis.keys.add(key.encode())
        assert (await soon(encoder.encode(key, Share("a")))).origin.value == "redis"
    assert await position(encoder, Share("a"), others=100) <= 2


@pytest.mark.parametrize("asks_redis", [True, False])
async def test_images_whose_callers_left_do_not_delay_a_tenants_next_image(
    encoder: Encoder, asks_redis: bool
) -> None:
    if asks_redis:
        encoder.redis.answers.clear()
    callers = encoder.encode_all("left", Share("a"), 50)
    await settle()
    assert len(encoder.engine.placed) == (0 if asks_redis else 50)
    for caller in callers:
        caller.cancel()
    await settle()
    encoder.redis.answers.set()
    assert await position(encoder, Share("a"), others=100) <= 2


async def test_an_image_that_its_caller_has_left_moves_nobody_behind_other_images(
    encoder: Encoder,
) -> None:
    """The virtual time does not pass the images that wait before the cancelled one."""
    callers = encoder.encode_all("others first", OTHERS, 50)
    await settle()
    callers[-1].cancel()
    await settle()
    assert await position(encoder, Share("a"), others=0) <= 2


async def test_images_that_cannot_be_encoded_delay_no_other_images(encoder: Encoder) -> None:
    bad = encoder.encode_all("bad", Share("a"), 50)
    await encoder.engine.compute(50, error_code="invalid_request")
    assert all(isinstance(caller.exception(), TriptychError) for caller in bad)
    encoder.engine.computed.clear()
    assert await position(encoder, Share("a"), others=100) <= 2


async def test_an_image_that_is_computed_although_its_caller_left_is_charged(
    encoder: Encoder,
) -> None:
    """A tenant that leaves while its images are on the device would have the device to itself."""
    encoder.engine.completes_cancelled = True
    others = encoder.encode_all("others", OTHERS, 20)
    for number in range(10):
        caller = encoder.encode(f"left {number}", Share("a"))
        await settle()
        caller.cancel()
        await settle()
        while encoder.engine.computed.count("a") <= number:
            await encoder.engine.compute()
    assert sum(other.done() for other in others) >= 8


async def test_an_image_that_a_request_joins_is_no_longer_in_the_background(
    encoder: Encoder,
) -> None:
    """The request would wait behind all images of all tenants, also those that come later."""
    line = encoder.encode("new", BATCH)
    other = encoder.encode("other", BATCH)
    assert await position_of_joined(encoder) <= 2
    assert (await soon(line)).origin.value == "computed" and not other.done()
    stored = encoder.sources.get(b"new")
    assert stored is not None and stored.share == Share("a")  # for another encode


async def test_a_request_may_join_while_redis_is_asked(encoder: Encoder) -> None:
    encoder.redis.answers.clear()
    encoder.encode("new", BATCH)
    joined = encoder.encode("new", Share("a"))
    await settle()
    encoder.redis.answers.set()
    await settle()
    assert await position_of_joined(encoder) <= 2
    assert (await soon(joined)).origin.value == "joined"


async def test_an_image_of_a_request_stays_in_the_foreground(encoder: Encoder) -> None:
    request = encoder.encode("new", Share("a"))
    await settle()
    encoder.encode("new", BATCH)
    assert await position_of_joined(encoder) <= 2
    await soon(request)
    await soon(encoder.encode("new", BATCH))  # from memory
    stored = encoder.sources.get(b"new")
    assert stored is not None and stored.share == Share("a")


async def test_a_joined_image_goes_on_when_either_caller_leaves(encoder: Encoder) -> None:
    for number, leaves_first in enumerate((True, False)):
        callers = [encoder.encode(f"joined {number}", share) for share in (BATCH, Share("a"))]
        await settle()
        callers[0 if leaves_first else 1].cancel()
        await settle()
        await encoder.engine.compute()
        assert (await soon(callers[1 if leaves_first else 0])).origin.value in (
            "joined",
            "computed",
        )
    assert encoder.admission.num_patches == 0


async def test_images_that_requests_join_are_charged_to_them(encoder: Encoder) -> None:
    """A tenant does not overtake others by sending its images as lines of a batch first."""
    encoder.encode_all("same", BATCH, 20)
    await settle()
    encoder.encode_all("same", Share("a"), 20)
    others = encoder.encode_all("others", OTHERS, 20)
    await encoder.engine.compute(20)
    assert 9 <= sum(other.done() for other in others) <= 11


async def test_a_joined_image_on_the_device_moves_nobody_behind_other_images(
    encoder: Encoder,
) -> None:
    encoder.encode("early", BATCH)
    await settle()
    backlog = encoder.encode_all("backlog", Share("a"), 50)
    await settle()
    joined = encoder.encode("early", Share("a"))
    await settle()
    (job_id,) = (number for number, job in encoder.engine.jobs.items() if job.tenant == "a/batch")
    encoder.engine.ranks[job_id] = -1.0  # the device had begun it before it was moved
    await encoder.engine.compute()
    assert joined.done() and not any(caller.done() for caller in backlog)
    assert await position(encoder, OTHERS, others=0) <= 2


async def position_of_joined(encoder: Encoder) -> int:
    """Returns how many images have been computed once the image "new", which waits, has been, while
    another tenant's images keep coming.
    """
    await settle()
    encoder.encode_all("others", OTHERS, 50)
    await settle()
    new = encoder.encode("new", Share("a"))
    await settle()
    for number in range(50):
        await encoder.engine.compute()
        if new.done():
            return number + 1
        encoder.encode(f"further {number}", OTHERS)
    raise AssertionError("the image was not computed")


async def test_images_that_requests_join_do_not_delay_the_next_line_of_a_batch(
    encoder: Encoder,
) -> None:
    other_batch = Share("b/batch", background=True)
    encoder.encode_all("same", BATCH, 20)
    await settle()
    encoder.encode_all("same", Share("a"), 20)
    await settle()
    encoder.encode_all("lines", other_batch, 20)
    line = encoder.encode("line", BATCH)
    await encoder.engine.compute(22)  # the joined images first
    assert line.done()
