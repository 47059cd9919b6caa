"""Sequences of a mask process: rows, tokens twice, a lexer at its limit, a compiler that panics."""

import asyncio
import gc
import json
import os
import random
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from services.common.errors import InternalError, InvalidGrammar, Overloaded
from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks import compilations, compiler
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammar_memory import GrammarMemory
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.matcher import MatcherFailed
from services.decoder.masks.messages import CannotFollow, Follow, MaskTimes, ThreadStuck
from services.decoder.masks.rows import QUICK, SLOW, MaskRows, create_mask_memory, num_mask_words
from services.decoder.masks.sequences import SequenceMasks
from tests.noise import PATIENCE_S, turns
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

END = added_ids()["<|im_end|>"]


def schema(**keywords: object) -> Grammar:
    return Grammar(GrammarSource("json_schema", json.dumps(keywords)))


# An Earley parser keeps all ways in which a text may be cut into parts.
PARTS = " | ".join(" ".join(["s"] * number) for number in range(2, 10))
AMBIGUOUS = Grammar(GrammarSource("grammar", f'start: s\ns: {PARTS} | "a"\n'))
LONG = schema(type="string", minLength=5000)


class Inbox:
    """As both channels: what the front and the engine are sent."""

    def __init__(self):
        self.masks: asyncio.Queue[TokenMasks] = asyncio.Queue()
        self.failures: list[CannotFollow] = []
        self.taken: list[ThreadStuck] = []

    def send(self, *messages):
        for message in messages:
            match message:
                case TokenMasks():
                    self.masks.put_nowait(message)
                case CannotFollow():
                    self.failures.append(message)
                case ThreadStuck():
                    self.taken.append(message)


class FakeMemory(GrammarMemory):
    """A process of as many bytes as the test says, which may have 1,000.

    Attributes:
        size: size of a matcher's state.
        over: number of times that the memory says that sequences have to give way.
    """

    COMPILATION = 100

    def __init__(self):
        super().__init__(1000, first_measured_s=0.0, compilation_bytes=self.COMPILATION)
        self.bytes, self.size, self.over = 0, 0, 0

    @property
    def resident_bytes(self):
        return self.bytes

    def size_of(self, *states):
        return self.size

    @property
    def is_over(self):
        self.over -= 1
        return self.over >= 0


class Process:
    """What a process has."""

    def __init__(self, tmp_path, num_rows=8, memory=None):
        (tmp_path / "tokenizer.json").write_text(tokenizer_json())
        num_words = num_mask_words(vocab_size())
        descriptor = create_mask_memory(num_rows, num_words)
        self.rows = MaskRows(descriptor, num_rows, num_words)
        os.close(descriptor)
        self.memory = memory or FakeMemory()
        self.grammars = Grammars(tmp_path, vocab_size(), (END,), self.rows.marks, self.memory)
        self.inbox: Any = Inbox()
        self.failures = self.inbox.failures
        self.masks = SequenceMasks(
            self.grammars, self.rows, 3, self.inbox, self.inbox, MaskTimes([]), 0.05
        )
        self.tokenizer = self.grammars.vocabulary.result().full

    async def received(self) -> TokenMasks:
        return await asyncio.wait_for(self.inbox.masks.get(), PATIENCE_S)

    def add(self, number, grammar, generated=(), **fields):
        self.masks.add(Follow(number, TokenConstraints(grammar), list(generated), **fields))

    async def failure(self) -> CannotFollow:
        """The only one."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (failure,) = self.failures
        return failure

    def step(self, number, ids, count):
        self.masks.tokens_arrived(NewTokens([number], [ids], [count]))


@pytest.fixture
async def process(tmp_path):
    process = Process(tmp_path)
    yield process
    await process.masks.close()


async def test_tokens_that_come_twice_or_too_soon_are_ignored(process):
    """Of a sequence that another process had, the front and the engine both send tokens."""
    quote, a = (process.tokenizer.tokenize_str(text) for text in ('"', "a"))
    process.add(1, LONG, quote + a)
    process.step(1, a, 3)  # while its grammar is compiled
    first = await process.received()
    assert (first.link, first.sequence_ids, first.num_generated) == (3, [1], [3])
    for ids, count in ((a, 3), (a, 5), (a, 2)):
        process.step(1, ids, count)
    assert process.inbox.masks.empty()
    process.step(1, a, 4)
    assert (await process.received()).num_generated == [4]
    assert process.rows.marks.get() == []


async def test_a_row_has_another_sequence_only_when_nothing_writes_to_it(tmp_path):
    process = Process(tmp_path, num_rows=1)
    process.add(1, LONG)
    process.masks.remove(1)
    process.add(2, LONG)
    assert (await process.failure()).code == Overloaded.code
    await asyncio.gather(*process.masks._tasks, return_exceptions=True)
    process.add(3, LONG)
    assert (await process.received()).sequence_ids == [3]
    process.masks.remove(3)
    process.failures.clear()
    release = threading.Event()
    process.grammars.quick.submit(partial(release.wait, PATIENCE_S))
    process.add(4, LONG)
    await turns()
    process.masks.remove(4)  # while the thread is to fill its mask
    await turns()
    process.add(5, LONG)
    assert (await process.failure()).sequence_id == 5
    release.set()
    await asyncio.gather(*process.masks._tasks)
    assert process.rows.take() == 0 and process.rows.take() is None
    await process.masks.close()


async def test_a_sequence_that_is_removed_while_it_waits_takes_no_turn(process):
    release = threading.Event()
    process.grammars.quick.submit(partial(release.wait, PATIENCE_S))
    grammars = [schema(type="string", minLength=length) for length in range(4)]
    for number, grammar in enumerate(grammars, 1):
        process.add(number, grammar)
    await turns()
    for number in (2, 4):
        process.masks.remove(number)
    process.add(5, grammars[3])
    release.set()
    assert [(await process.received()).sequence_ids for _ in range(3)] == [[1], [3], [5]]
    compilations = [process.grammars._lexers[g.source].compilation for g in grammars]
    assert [c.has_begun for c in compilations] == [True, False, True, True]
    assert not process.failures and len(process.rows._free) == 5


async def test_tenants_take_turns_and_batches_come_behind_them(process):
    release = threading.Event()
    process.grammars.quick.submit(partial(release.wait, PATIENCE_S))
    tenants = ["a/batch"] * 3 + ["a"] * 3 + ["b"]
    for number, tenant in enumerate(tenants, 1):
        grammar = schema(type="string", minLength=number)
        process.add(number, grammar, tenant=tenant, background=tenant == "a/batch")
        if number == 1:
            await turns()  # the thread has the first grammar
    release.set()
    order = [(await process.received()).sequence_ids[0] for _ in tenants]
    assert order == [1, 4, 7, 5, 6, 2, 3]


class PanicException(BaseException):
    """As pyo3's."""


async def test_a_panic_fails_its_sequence_alone(process, monkeypatch):
    process.add(1, LONG)
    await process.received()

    def panics(*_):
        raise PanicException

    matcher = process.masks._sequences[1].matcher
    monkeypatch.setattr(type(matcher), "fill", panics)
    process.step(1, process.tokenizer.tokenize_str('"'), 1)
    monkeypatch.undo()
    assert (await process.received()).num_generated == [1]  # by a new matcher, for once
    monkeypatch.setattr(compilations, "compile_grammar", panics)
    process.add(2, schema(type="null"))
    await asyncio.gather(*process.masks._tasks)
    failure = await process.failure()
    assert failure.sequence_id == 2 and failure.code == InternalError.code


async def test_a_lexer_at_its_limit_ends_no_other_sequence(process, monkeypatch):
    """The states of a lexer are of all texts that its sequences have written."""
    limits = LLParserLimits(max_lexer_states=8000, verbose_errors=False)
    monkeypatch.setattr(compiler, "limits", lambda: limits)
    chooser = random.Random(0)
    ids: dict[int, list[int]] = {number: [] for number in range(3)}
    for number in ids:
        process.add(number, LONG)
    neighbour = await process.grammars.matcher(TokenConstraints(LONG))
    lexers = set()
    while min(map(len, ids.values())) < 60 and not process.failures:
        if len(ids[0]) == 20 and neighbour is not None:
            assert write_without_end(neighbour, process)
            neighbour = None
        sent = await process.received()
        for number, count, row in zip(
            sent.sequence_ids, sent.num_generated, sent.rows, strict=True
        ):
            assert count == len(ids[number])
            bits = np.unpackbits(process.rows.array[row].view(np.uint8), bitorder="little")
            token = chooser.choice(np.flatnonzero(bits[: vocab_size()]).tolist())
            ids[number].append(token)
            lexers.add(id(process.masks._sequences[number].matcher.grammar.lexer))
            process.step(number, [token], count + 1)
    assert not process.failures and len(lexers) == 2
    for found in ids.values():
        text = process.tokenizer.decode_bytes(found).decode(errors="ignore")
        assert text.startswith('"') and '"' not in text[1:].replace('\\"', "")


def write_without_end(matcher, process):
    """Whether it comes to a limit."""
    ids = process.tokenizer.tokenize_str('"')
    while len(matcher.generated) < 5000:
        if isinstance(process.grammars.fill(matcher, ids, process.rows.array[7]), MatcherFailed):
            return True
        ids = process.tokenizer.tokenize_str("a")
    return False


async def test_a_parser_at_its_limit_is_the_grammars_fault(process):
    wide = " | ".join(f'"{number}" t' for number in range(2100))
    text = f'start: "a" r\nr: {wide}\nt: "x" | "y" t'
    process.add(1, Grammar(GrammarSource("grammar", text)))
    assert (await process.received()).num_generated == [0]
    process.step(1, process.tokenizer.tokenize_str("a")[:1], 1)
    failure = await process.failure()
    assert failure.sequence_id == 1 and failure.code == InvalidGrammar.code
    assert "max is 2000" in failure.message


async def test_compiled_grammars_are_forgotten_when_the_memory_is_half_full(process):
    async def lexer_of(form):
        return (await process.grammars.matcher(TokenConstraints(form))).grammar.lexer

    forms = [schema(type="string", minLength=length) for length in range(8)]
    lexers = [await lexer_of(form) for form in forms]
    process.memory.bytes = 500
    process.masks.check_memory()
    assert [await lexer_of(form) for form in forms] == lexers
    kept, forgotten = lexers[0], weakref.ref(lexers[7])
    lexers.clear()
    process.memory.bytes = 501
    process.masks.check_memory()
    gc.collect()
    assert await lexer_of(forms[0]) is kept, "a sequence may have it"
    assert forgotten() is None


async def test_a_grammar_waits_for_memory(process):
    process.add(1, LONG)
    await process.received()
    process.memory.bytes = 751
    process.add(2, schema(type="integer"))
    process.add(3, LONG)
    assert (await process.received()).sequence_ids == [3], "its grammar is compiled"
    process.masks.check_memory()
    assert process.inbox.masks.empty() and not process.failures
    process.memory.bytes = 750
    assert (await process.received()).sequence_ids == [2]


async def test_sequences_give_way_the_largest_first_and_then_the_youngest(process):
    quote, a = (process.tokenizer.tokenize_str(text) for text in ('"', "a"))
    for number in range(1, 5):
        process.memory.size = process.memory.max_state_bytes * 3 // 4 * (number == 2)
        process.add(number, schema(type="string", minLength=number), quote)
        await process.received()
        process.step(number, a, 2)
        await process.received()
    process.memory.bytes, process.memory.over = 1001, 3
    process.add(5, LONG)  # which waits, and has no memory to give
    process.masks.check_memory()
    assert [f.sequence_id for f in process.failures] == [2, 4, 3]
    assert {f.code for f in process.failures} == {Overloaded.code}
    process.masks.check_memory()
    assert len(process.failures) == 3
    process.memory.bytes = 0
    assert (await process.received()).sequence_ids == [5]


async def test_a_state_that_is_too_large_fails_its_sequence(tmp_path):
    """Each row of a parser keeps what may be begun in it."""
    names = [f"x{number}" for number in range(400)]
    rules = [f'{name}: "a" "b{number}"' for number, name in enumerate(names)]
    text = "\n".join(["start: r*", f'r: "a" | {" | ".join(names)}', *rules])
    memory = GrammarMemory(first_measured_s=0.0)
    memory.max_state_bytes = 16 << 20
    process = Process(tmp_path, memory=memory)
    a, count = process.tokenizer.tokenize_str("a"), 0
    process.add(1, Grammar(GrammarSource("grammar", text)))
    while not process.failures:
        assert (await process.received()).num_generated == [count]
        count += 8
        process.step(1, 8 * a, count)
        await asyncio.sleep(0)
    failure = await process.failure()
    assert failure.code == InvalidGrammar.code and "memory" in failure.message
    assert count > 1000
    await process.masks.close()


@pytest.mark.nightly
async def test_masks_that_take_long_are_filled_in_a_thread(process):
    """The other sequence's masks do not wait for them, until the ambiguous one comes to a limit."""
    quote, a = (process.tokenizer.tokenize_str(text) for text in ('"', "a"))
    process.add(1, AMBIGUOUS)
    process.add(2, LONG, quote)
    counts, most, between = {1: 0, 2: 1}, 0, 0
    while not process.failures:
        try:
            async with asyncio.timeout(1.0):
                sent = await process.inbox.masks.get()
        except TimeoutError:
            continue
        for number in sent.sequence_ids:
            between = between + 1 if number == 2 else 0
            most = max(most, between)
            counts[number] += 1
            process.step(number, a, counts[number])
        await asyncio.sleep(0)
    failure = await process.failure()
    assert (failure.sequence_id, failure.code) == (1, InvalidGrammar.code)
    assert "too much work" in failure.message
    assert most > 20 and counts[2] > 5 * counts[1]


@pytest.mark.parametrize("by_client", [True, False])
async def test_masks_of_grammars_that_clients_write_are_filled_in_a_thread(process, by_client):
    source = GrammarSource("grammar", 'start: "a"*', by_client=by_client)
    a = process.tokenizer.tokenize_str("a")
    process.add(1, Grammar(source))
    assert (await process.received()).num_generated == [0]
    for count in range(1, 4):
        process.step(1, a, count)
        assert process.inbox.masks.empty() == by_client
        assert (await process.received()).num_generated == [count]
    assert not process.failures


async def test_what_waits_for_a_thread_that_is_taken_is_left_to_another_process(process):
    grammar, release = schema(type="null"), threading.Event()
    quote, a = (process.tokenizer.tokenize_str(text) for text in ('"', "a"))
    process.add(1, LONG, quote)
    await process.received()

    def work():
        while not release.is_set():
            pass

    process.masks.check_threads()
    assert not process.inbox.taken
    taking = process.grammars.quick.run(2, grammar.source, work)
    process.add(3, schema(type="integer"))
    process.add(4, schema(type="boolean"), is_slow=True)
    assert (await process.received()).sequence_ids == [4], "its thread is the slow one"
    async with asyncio.timeout(PATIENCE_S):
        while not process.inbox.taken:
            process.masks.check_threads()
            await asyncio.sleep(0.01)
    process.masks.check_threads()
    assert process.inbox.taken == [ThreadStuck(grammar.source, [3])]
    process.step(1, a, 2)
    assert (await process.received()).sequence_ids == [1]
    process.add(5, schema(type="number"))
    assert process.inbox.taken[1:] == [ThreadStuck(grammar.source, [5])]
    release.set()
    await taking
    assert not process.failures and process.inbox.masks.empty()
    free = {process.rows.take() for _ in range(6)}
    assert len(free) == 6 and process.rows.take() is None, "1 and 4 have the others"


async def test_threads_mark_the_sequence_in_work(process):
    started, release = threading.Event(), threading.Event()

    def work():
        started.set()
        release.wait(PATIENCE_S)

    await asyncio.wrap_future(process.grammars.vocabulary)
    for thread, slot in ((process.grammars.quick, QUICK), (process.grammars.slow, SLOW)):
        running = thread.run(7 + slot, None, work)
        await asyncio.to_thread(started.wait, PATIENCE_S)
        assert [number for number, _ in process.rows.marks.get()] == [thread.number] == [7 + slot]
        assert thread.used_s() < 1.0
        release.set()
        await running
        assert process.rows.marks.get() == [] and thread.used_s() == 0.0
        started.clear()
        release.clear()
