"""The compile pool's lanes, verdicts and losses, with a process that is a fake."""

import asyncio

import pytest

from services.common.errors import InvalidGrammar, ProcessLost
from services.common.process.channel import ChannelClosed
from services.decoder.masks.compile_pool import CompilePool
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import LANES, Verdict
from services.decoder.masks.verdicts import Verdicts
from tests.noise import PATIENCE_S


class FakeChannel:
    """A lane of the process: what it was sent, and verdicts when the test says so."""

    def __init__(self):
        self.sent: list[str] = []
        self._answers: asyncio.Queue[Verdict | None] = asyncio.Queue()

    def send(self, source):
        self.sent.append(source.text)

    async def receive(self) -> Verdict:
        answer = await self._answers.get()
        if answer is None:
            raise ChannelClosed
        return answer

    def answer(self, verdict: Verdict | None) -> None:
        """A verdict; None: the process has ended."""
        self._answers.put_nowait(verdict)

    def close(self):
        pass

    async def asked(self, count: int) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.sent) < count:  # noqa: ASYNC110 - of a list
                await asyncio.sleep(0)
        return self.sent


class FakeProcess:
    """As `CompileProcess`."""

    has_ended = False

    def __init__(self):
        self.num_started = 0
        self.quick, self.slow, self.clients = FakeChannel(), FakeChannel(), FakeChannel()

    async def start(self):
        self.num_started += 1
        self.quick, self.slow, self.clients = FakeChannel(), FakeChannel(), FakeChannel()
        return [self.quick, self.slow, self.clients]

    async def close(self):
        pass


def source(text: str) -> GrammarSource:
    return GrammarSource("json_schema", text)


def ends(verdict: Verdict):
    return pytest.raises(InvalidGrammar, match=verdict.error)


GOOD = Verdict("", 0.003)
LATE = Verdict("takes more than 0.05 s", LANES[0].cpu_s, died=True, timed_out=True)
DEAD = Verdict("takes more than 0.5 s", LANES[1].cpu_s, died=True, timed_out=True)


@pytest.fixture
async def process():
    return FakeProcess()


class Costs(list[float]):
    """A histogram that lists what it observes."""

    def observe(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
async def costs():
    return Costs()


@pytest.fixture
async def pool(process, costs):
    pool = CompilePool(process, costs, Verdicts())
    yield pool
    await pool.close()


def check(pool, text, tenant=""):
    return asyncio.create_task(pool.check(source(text), tenant))


async def test_a_quick_grammar_is_compiled_once(pool, process, costs):
    first, second = check(pool, "a"), check(pool, "a", "another")
    await process.quick.asked(1)
    process.quick.answer(GOOD)
    assert await first is False and await second is False
    assert await check(pool, "a") is False
    assert process.quick.sent == ["a"] and costs == [GOOD.cpu_s]


async def test_what_takes_long_is_compiled_in_the_slow_lane(pool, process, costs):
    slow = check(pool, "slow")
    await process.quick.asked(1)
    process.quick.answer(LATE)
    await process.slow.asked(1)
    process.slow.answer(Verdict("", 0.3))
    assert await slow is True
    assert await check(pool, "slow") is True, "the verdict is kept"
    assert costs == [pytest.approx(LATE.cpu_s + 0.3)]


async def test_a_schema_waits_for_no_hostile_grammar_whoever_sends_it(pool, process):
    hostile = [check(pool, f"hostile {number}") for number in range(12)]
    for number in range(12):
        await process.quick.asked(number + 1)
        process.quick.answer(LATE)
    await process.slow.asked(1)  # which takes its time
    honest = check(pool, "honest")
    await process.quick.asked(13)
    process.quick.answer(GOOD)
    assert await honest is False
    for number in range(12):
        await process.slow.asked(number + 1)
        process.slow.answer(DEAD)
    for task in hostile:
        with ends(DEAD):
            await task


async def test_grammars_of_clients_have_a_lane_of_their_own(pool, process):
    grammars = [GrammarSource("grammar", f"start: {n}", by_client=True) for n in range(3)]
    asked = [asyncio.create_task(pool.check(grammar, "")) for grammar in grammars]
    await process.clients.asked(1)
    schema = check(pool, "schema")
    await process.quick.asked(1)
    process.quick.answer(GOOD)
    assert await schema is False
    for number, task in enumerate(asked, 1):
        await process.clients.asked(number)
        process.clients.answer(DEAD)
        with ends(DEAD):
            await task
    assert not process.slow.sent and len(process.quick.sent) == 1


async def test_in_the_slow_lane_tenants_take_turns_by_cpu_seconds(pool, process):
    tasks = [check(pool, f"dear {number}", "dear") for number in range(3)]
    tasks += [check(pool, "other", "other")]
    for number in range(4):
        await process.quick.asked(number + 1)
        process.quick.answer(LATE)
    assert process.quick.sent == ["dear 0", "other", "dear 1", "dear 2"]
    for number in range(4):
        await process.slow.asked(number + 1)
        process.slow.answer(DEAD)
    assert process.slow.sent[:2] == ["dear 0", "other"]
    for task in tasks:
        with ends(DEAD):
            await task


async def test_a_text_that_killed_two_forks_is_refused_without_a_third(pool, process):
    for number in range(2):
        task = check(pool, "deadly")
        await process.quick.asked(number + 1)
        process.quick.answer(LATE)
        await process.slow.asked(number + 1)
        process.slow.answer(DEAD)
        with ends(DEAD):
            await task
    with ends(DEAD):
        await check(pool, "deadly")
    assert len(process.quick.sent) == 2 and len(process.slow.sent) == 2


async def test_a_death_of_memory_in_the_quick_lane_is_final(pool, process):
    task = check(pool, "large")
    await process.quick.asked(1)
    dead = Verdict("takes more memory", 0.02, died=True)
    process.quick.answer(dead)
    with ends(dead):
        await task
    assert not process.slow.sent


async def test_what_nobody_waits_for_any_more_is_not_compiled(pool, process):
    first, gone, last = (check(pool, text) for text in ("first", "gone", "last"))
    await process.quick.asked(1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    process.quick.answer(GOOD)
    await process.quick.asked(2)
    process.quick.answer(GOOD)
    await first
    await last
    assert process.quick.sent == ["first", "last"]


async def test_a_grammar_in_work_at_two_ends_of_the_process_is_lost(pool, process):
    lost, waiting = check(pool, "lost"), check(pool, "waiting")
    for _ in range(2):
        ended = process.num_started
        await process.quick.asked(1)
        process.quick.answer(None)
        async with asyncio.timeout(PATIENCE_S):
            while process.num_started == ended:  # noqa: ASYNC110 - of a number
                await asyncio.sleep(0)
    with pytest.raises(ProcessLost):
        await lost
    await process.quick.asked(1)
    assert process.quick.sent == ["waiting"]
    process.quick.answer(GOOD)
    assert await waiting is False


async def test_the_job_of_the_other_lane_is_tried_again_and_charged_with_no_loss(pool, process):
    slow = check(pool, "slow")
    await process.quick.asked(1)
    process.quick.answer(LATE)
    await process.slow.asked(1)
    for _ in range(3):
        ended, quick = process.num_started, process.quick
        lost = check(pool, f"lost {ended}")
        await quick.asked(len(quick.sent) + 1)
        quick.answer(None)
        async with asyncio.timeout(PATIENCE_S):
            while process.num_started == ended:  # noqa: ASYNC110 - of a number
                await asyncio.sleep(0)
        await process.quick.asked(1)
        process.quick.answer(GOOD)
        assert await lost is False
        assert await process.slow.asked(1) == ["slow"]
    process.slow.answer(GOOD)
    assert await slow is True
