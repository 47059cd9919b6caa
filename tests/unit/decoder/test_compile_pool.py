"""The compile pool's lanes, verdicts and losses, with a process that is a fake."""

import asyncio

import pytest

from services.common.errors import InvalidGrammar, Overloaded, ProcessLost
from services.common.process.channel import ChannelClosed
from services.decoder.masks.compile_pool import CompilePool
from services.decoder.masks.compile_queue import MAX_WAITING_OF_TENANT
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import LANES, Verdict
from services.decoder.masks.verdicts import Verdicts
from tests.noise import PATIENCE_S, turns


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


async def answered(channel, verdicts):
    """Gives each verdict to the grammar in work, and waits until the next one is in work."""
    for verdict in verdicts:
        num_sent = len(channel.sent)
        channel.answer(verdict)
        await channel.asked(num_sent + 1)


async def backlog_of_a(pool, process, count=12):
    """Lets tenant a send grammars, the last of which is `shared`. The first is in work."""
    tasks = [check(pool, f"a{number}", "a") for number in range(count)]
    tasks.append(check(pool, "shared", "a"))
    await process.quick.asked(1)
    return tasks


async def left(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_grammar_in_the_backlog_of_another_tenant_has_the_callers_turn(pool, process):
    backlog = await backlog_of_a(pool, process)
    mine = check(pool, "shared", "b")
    await turns()
    await answered(process.quick, [GOOD] * 2)
    assert process.quick.sent[:2] == ["a0", "shared"]
    assert await mine is False and await backlog[-1] is False, "both have the verdict"
    await answered(process.quick, [GOOD] * 10)
    process.quick.answer(GOOD)
    await asyncio.gather(*backlog)
    assert process.quick.sent.count("shared") == 1 and len(process.quick.sent) == 13


async def test_a_request_waits_for_no_line_of_its_tenants_batch(pool, process):
    """The lines of batches have a queue name of their own."""
    lines = [check(pool, f"line {number}", "a/batch") for number in range(12)]
    lines.append(check(pool, "shared", "a/batch"))
    await process.quick.asked(1)
    mine = check(pool, "shared", "a")
    await turns()
    await answered(process.quick, [GOOD] * 2)
    assert await mine is False and process.quick.sent[:2] == ["line 0", "shared"]
    await left(*lines)


async def test_batches_come_behind_requests_in_each_lane(pool, process):
    lines = [
        asyncio.create_task(
            pool.check(GrammarSource("regex", f"line {number}"), "a/batch", background=True)
        )
        for number in range(3)
    ]
    await process.quick.asked(1)
    mine = [check(pool, f"b{number}", "b") for number in range(2)]
    await turns()
    await answered(process.quick, [LATE] * 4)
    assert process.quick.sent == ["line 0", "b0", "b1", "line 1", "line 2"]
    await process.slow.asked(1)
    await answered(process.slow, [GOOD] * 3)
    assert process.slow.sent == ["line 0", "b0", "b1", "line 1"]
    assert [await task for task in mine] == [True, True]
    await left(*lines)


async def test_a_tenant_that_leaves_takes_its_own_place_with_it(pool, process):
    backlog = await backlog_of_a(pool, process, 3)
    mine = check(pool, "shared", "b")
    await turns()
    await left(mine)
    await answered(process.quick, [GOOD] * 3)
    process.quick.answer(GOOD)
    await asyncio.gather(*backlog)
    assert process.quick.sent == ["a0", "a1", "a2", "shared"], "the place of a is still there"


async def test_a_tenant_keeps_its_place_until_its_last_request_leaves(pool, process):
    backlog = await backlog_of_a(pool, process, 3)
    mine, second = check(pool, "shared", "b"), check(pool, "shared", "b")
    await turns()
    await left(mine)
    await answered(process.quick, [GOOD] * 2)
    assert await second is False and process.quick.sent[:2] == ["a0", "shared"]
    await left(*backlog)


async def test_the_job_stays_for_the_other_when_its_first_tenant_leaves(pool, process):
    backlog = await backlog_of_a(pool, process, 3)
    mine = check(pool, "shared", "b")
    await turns()
    await left(backlog.pop())
    await answered(process.quick, [GOOD] * 2)
    assert await mine is False and process.quick.sent[:2] == ["a0", "shared"]
    await left(*backlog)


async def test_a_job_that_all_have_left_is_forgotten_and_counts_no_more(pool, process):
    first = check(pool, "first", "a")
    await process.quick.asked(1)
    tasks = [check(pool, f"{number}", "a") for number in range(MAX_WAITING_OF_TENANT)]
    tasks.append(check(pool, "0", "b"))
    await turns()
    with pytest.raises(Overloaded):
        await check(pool, "one more", "a")
    await left(*tasks)
    again = check(pool, "0", "a")
    await turns()
    await answered(process.quick, [GOOD])
    process.quick.answer(GOOD)
    assert await first is False and await again is False
    assert process.quick.sent == ["first", "0"]


async def test_a_grammar_of_another_tenant_counts_for_each_tenant_that_waits(pool, process):
    backlog = await backlog_of_a(pool, process)
    mine = [check(pool, f"b{number}", "b") for number in range(MAX_WAITING_OF_TENANT)]
    await turns()
    with pytest.raises(Overloaded):
        await check(pool, "shared", "b")
    running = check(pool, "a0", "b")  # needs no place
    await turns()
    process.quick.answer(GOOD)
    assert await running is False
    await left(*backlog, *mine)


async def test_a_request_that_waits_too_long_leaves_the_job_to_the_other_tenant(process, costs):
    pool = CompilePool(process, costs, Verdicts(), max_wait_s=1.0)
    await turns()
    first = check(pool, "first", "a")
    await process.quick.asked(1)
    early = check(pool, "shared", "a")
    await asyncio.sleep(0.5)
    late = check(pool, "shared", "b")
    for task in (first, early):
        with pytest.raises(Overloaded, match="too long"):
            await task
    await answered(process.quick, [GOOD])
    process.quick.answer(GOOD)
    assert await late is False and process.quick.sent == ["first", "shared"]
    await pool.close()


async def test_each_tenant_has_its_turn_in_the_slow_lane_too(pool, process):
    """The grammar was compiled in the turn of a, but b has the first turn behind it."""
    backlog = [check(pool, f"a{number}", "a") for number in range(3)]
    backlog.append(check(pool, "shared", "a"))
    for number in range(4):
        await process.quick.asked(number + 1)
        if number < 3:
            process.quick.answer(LATE)
    mine = check(pool, "shared", "b")  # while it is running
    await turns()
    process.quick.answer(LATE)
    await process.slow.asked(1)
    late = Verdict("", 0.3)
    later = check(pool, "a2", "c")  # while it waits in the slow lane
    await turns()
    await answered(process.slow, [late] * 3)
    assert process.slow.sent == ["a0", "shared", "a2", "a1"]
    assert await mine is True and await later is True
    await left(*backlog)


async def test_too_many_slow_grammars_of_one_tenant_fail_that_tenant_alone(pool, process):
    """The slow lane is full of grammars of a when one comes that b waits for, too."""
    count = MAX_WAITING_OF_TENANT + 1  # one of them is in work
    flood = [check(pool, f"a{number}", "a") for number in range(count - 1)]
    for number in range(count - 1):
        await process.quick.asked(number + 1)
        process.quick.answer(LATE)
    flood.append(check(pool, "last", "a"))
    await process.quick.asked(count)
    process.quick.answer(LATE)
    shared, mine = check(pool, "shared", "a"), check(pool, "shared", "b")
    await process.quick.asked(count + 1)
    process.quick.answer(LATE)
    with pytest.raises(Overloaded):
        await shared
    await answered(process.slow, [GOOD] * 2)
    assert process.slow.sent[:2] == ["a0", "shared"] and await mine is True
    await left(*flood)


async def test_a_lost_process_fails_the_requests_of_all_tenants(pool, process):
    tasks = [check(pool, "lost", tenant) for tenant in ("a", "b")]
    for _ in range(2):
        ended = process.num_started
        await process.quick.asked(1)
        process.quick.answer(None)
        async with asyncio.timeout(PATIENCE_S):
            while process.num_started == ended:  # noqa: ASYNC110 - of a number
                await asyncio.sleep(0)
    for task in tasks:
        with pytest.raises(ProcessLost):
            await task
