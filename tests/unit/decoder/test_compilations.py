"""The turns of tenants in the threads of a mask process."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from services.common.errors import InternalError, Overloaded
from services.decoder.masks.compilations import Compilation, Compilations, Waiter, _Outcome
from services.decoder.masks.grammar import GrammarSource
from tests.noise import PATIENCE_S, turns


class FakeThread:
    """Records which grammars it is given. The test ends each compilation.

    Attributes:
        given: text of each grammar, and number of the sequence.
        running: future of the grammar that is being compiled. None before the first one.
    """

    def __init__(self):
        self.given: list[tuple[str, int]] = []
        self.running: Any = None

    @property
    def texts(self):
        return [text for text, _ in self.given]

    def run(self, number, source, work):
        assert self.running is None or self.running.done(), "one grammar at a time"
        self.given.append((source.text, number))
        self.running = asyncio.get_running_loop().create_future()
        return self.running

    async def end(self, *costs, result: Any = "compiled"):
        """Ends one compilation for each of the CPU seconds."""
        for cost in costs:
            self.running.set_result(_Outcome(result, cost))
            await turns()


class FakeMemory:
    def __init__(self):
        self.has_room = True

    def has_room_beside(self, num_compiling):
        assert num_compiling == 0
        return self.has_room


class Bench:
    """Compilations of one thread."""

    def __init__(self, max_wait_s=PATIENCE_S):
        vocabulary: Any = Future()
        vocabulary.set_result("vocabulary")
        self.thread: Any = FakeThread()
        self.memory: Any = FakeMemory()
        self.compilations = Compilations(vocabulary, self.memory, max_wait_s)
        self.by_text: dict[str, Compilation] = {}
        self.num_sequences = 0

    def add(self, text, tenant, *, background=False):
        """Lets a new sequence wait for a grammar."""
        if text not in self.by_text:
            done = asyncio.get_running_loop().create_future()
            self.by_text[text] = Compilation(GrammarSource("regex", text), self.thread, done)
        self.num_sequences += 1
        waiter = Waiter(self.num_sequences, tenant, background)
        return asyncio.create_task(self.compilations.wait(self.by_text[text], waiter))

    async def backlog_of_a(self, count=6):
        """Adds sequences of tenant a. The first of their grammars is being compiled, and the last
        is `shared`.
        """
        tasks = [self.add(f"a{number}", "a") for number in range(count)]
        tasks.append(self.add("shared", "a"))
        await turns()
        return tasks


@pytest.fixture
async def bench():
    return Bench()


async def left(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tenant_is_not_behind_the_backlog_of_another(bench):
    backlog = await bench.backlog_of_a()
    mine = bench.add("b", "b")
    await turns()
    await bench.thread.end(0.01, 0.01)
    assert bench.thread.texts == ["a0", "b", "a1"] and await mine == "compiled"
    await bench.thread.end(*6 * [0.01])
    assert await asyncio.gather(*backlog) == 7 * ["compiled"]


async def test_turns_are_charged_by_cpu_seconds(bench):
    tasks = [bench.add(f"{tenant}{number}", tenant) for number in range(6) for tenant in "ab"]
    await turns()
    for _ in range(8):
        await bench.thread.end(0.5 if bench.thread.texts[-1].startswith("a") else 0.1)
    assert bench.thread.texts[:8] == ["a0", "b0", "b1", "b2", "b3", "b4", "a1", "b5"]
    await left(*tasks)


async def test_a_grammar_that_two_tenants_wait_for_is_compiled_once_at_the_first_place(bench):
    backlog = await bench.backlog_of_a()
    mine = bench.add("shared", "b")
    await turns()
    await bench.thread.end(0.01, 0.01)
    assert bench.thread.texts[:2] == ["a0", "shared"]
    assert await mine == "compiled" and await backlog[-1] == "compiled"
    await bench.thread.end(*5 * [0.01])
    assert len(bench.thread.texts) == 7
    assert await bench.add("shared", "c") == "compiled", "without another compilation"


async def test_a_grammar_that_is_being_compiled_needs_no_turn(bench):
    backlog = await bench.backlog_of_a()
    mine = bench.add("a0", "b")
    await turns()
    await bench.thread.end(0.01)
    assert await mine == "compiled" and bench.thread.texts == ["a0", "a1"]
    await left(*backlog)


async def test_batches_come_behind_requests(bench):
    lines = [bench.add(f"line {number}", "a/batch", background=True) for number in range(3)]
    await turns()
    mine = [bench.add("a", "a"), bench.add("b", "b"), bench.add("line 2", "b")]
    await turns()
    await bench.thread.end(*4 * [0.01])
    assert bench.thread.texts == ["line 0", "a", "b", "line 2", "line 1"]
    await asyncio.gather(*mine)
    await left(*lines)


async def test_sequences_that_leave_take_no_turn_and_may_come_back(bench):
    first, gone, other = bench.add("first", "a"), bench.add("gone", "a"), bench.add("other", "a")
    await turns()
    await left(gone, other)
    again = bench.add("gone", "b")
    await turns()
    await bench.thread.end(0.01, 0.01)
    assert bench.thread.given == [("first", 1), ("gone", 4)], "4 is the sequence that still waits"
    assert await first == await again == "compiled"


async def test_a_tenant_keeps_its_place_until_its_last_sequence_leaves(bench):
    backlog = await bench.backlog_of_a()
    mine, second = bench.add("shared", "b"), bench.add("shared", "b")
    await turns()
    await left(mine, backlog[-1])
    await bench.thread.end(0.01, 0.01)
    assert await second == "compiled" and bench.thread.texts[:2] == ["a0", "shared"]
    await left(*backlog)


async def test_a_compilation_that_has_begun_goes_on_without_its_sequence(bench):
    task = bench.add("a", "a")
    await turns()
    await left(task)
    again = bench.add("a", "a")
    await turns()
    await bench.thread.end(0.01)
    assert await again == "compiled" and bench.thread.texts == ["a"]


async def test_each_sequence_waits_for_its_own_turn_no_longer_than_allowed():
    bench = Bench(max_wait_s=1.0)
    running, early = bench.add("running", "a"), bench.add("shared", "a")
    await asyncio.sleep(0.5)
    late = bench.add("shared", "b")
    with pytest.raises(Overloaded):
        await early
    assert not running.done() and not late.done()
    await bench.thread.end(0.01, 0.01)
    assert await running == await late == "compiled", "a compilation may take longer"


async def test_an_error_reaches_all_sequences_and_the_next_grammar_is_compiled(bench):
    tasks = [bench.add("bad", tenant) for tenant in "ab"]
    good = bench.add("good", "a")
    await turns()
    await bench.thread.end(0.01, result=InternalError("bad"))
    for task in tasks:
        with pytest.raises(InternalError):
            await task
    await bench.thread.end(0.01)
    assert await good == "compiled"


async def test_grammars_keep_their_turns_while_they_wait_for_memory(bench):
    bench.memory.has_room = False
    line, mine = bench.add("line", "a/batch", background=True), bench.add("b", "b")
    await turns()
    gone = bench.add("gone", "c")
    await turns()
    await left(gone)
    assert not bench.thread.given
    bench.memory.has_room = True
    async with asyncio.timeout(PATIENCE_S):
        while not bench.thread.given:  # noqa: ASYNC110 - freed memory has no event
            await asyncio.sleep(0.01)
    await bench.thread.end(0.01, 0.01)
    assert bench.thread.texts == ["b", "line"]
    assert await line == await mine == "compiled"
