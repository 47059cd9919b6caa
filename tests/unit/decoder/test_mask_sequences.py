"""Sequences of a mask process: rows, tokens twice, a lexer at its limit, a compiler that panics."""

import asyncio
import json
import os
import random

import numpy as np
import pytest
from llguidance import LLParserLimits

from services.common.errors import InternalError, InvalidGrammar, Overloaded
from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks import compiler, grammars
from services.decoder.masks.grammar import Demands, Grammar, GrammarSource
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.matcher import MatcherFailed
from services.decoder.masks.rows import MaskRows, create_mask_memory
from services.decoder.masks.sequences import SequenceMasks
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

END = added_ids()["<|im_end|>"]


def schema(**keywords: object) -> Grammar:
    return Grammar(GrammarSource("json_schema", json.dumps(keywords)))


LONG = schema(type="string", minLength=5000)
WAIT_S = 20


class Inbox:
    def __init__(self):
        self.masks: asyncio.Queue[TokenMasks] = asyncio.Queue()

    def send(self, *messages):
        for message in messages:
            self.masks.put_nowait(message)


class Process:
    """What a process has."""

    def __init__(self, tmp_path, num_rows=8):
        (tmp_path / "tokenizer.json").write_text(tokenizer_json())
        self.grammars = Grammars(tmp_path, vocab_size(), (END,))
        memory = create_mask_memory(num_rows, self.grammars.num_mask_words)
        self.rows = MaskRows(memory, num_rows, self.grammars.num_mask_words)
        os.close(memory)
        self.inbox, self.failures = Inbox(), []
        self.masks = SequenceMasks(
            self.grammars, self.rows, 3, self.inbox, self.inbox, lambda seconds: None,
            lambda *failure: self.failures.append(failure),
        )  # fmt: skip
        self.tokenizer = self.grammars.vocabulary.result().full

    async def received(self) -> TokenMasks:
        return await asyncio.wait_for(self.inbox.masks.get(), WAIT_S)

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
    process.masks.add(1, Demands(LONG), quote + a)
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
    process.masks.add(1, Demands(LONG), [])
    process.masks.remove(1)
    process.masks.add(2, Demands(LONG), [])
    ((number, error),) = process.failures
    assert number == 2 and isinstance(error, Overloaded)
    await asyncio.gather(*process.masks._tasks)
    process.masks.add(3, Demands(LONG), [])
    assert (await process.received()).sequence_ids == [3]
    process.masks.remove(3)
    assert process.rows.take() == 0 and process.rows.take() is None
    await process.masks.close()


class PanicException(BaseException):
    """As pyo3's."""


async def test_a_panic_fails_its_sequence_alone(process, monkeypatch):
    process.masks.add(1, Demands(LONG), [])
    await process.received()

    def panics(*_):
        raise PanicException

    matcher = process.masks._sequences[1].matcher
    monkeypatch.setattr(type(matcher), "fill", panics)
    process.step(1, process.tokenizer.tokenize_str('"'), 1)
    monkeypatch.undo()
    assert (await process.received()).num_generated == [1]  # by a new matcher, for once
    monkeypatch.setattr(grammars, "compile_grammar", panics)
    process.masks.add(2, Demands(schema(type="null")), [])
    await asyncio.gather(*process.masks._tasks)
    ((number, error),) = process.failures
    assert number == 2 and isinstance(error, InternalError)


async def test_a_lexer_at_its_limit_ends_no_other_sequence(process, monkeypatch):
    """The states of a lexer are of all texts that its sequences have written."""
    limits = LLParserLimits(max_lexer_states=8000, verbose_errors=False)
    monkeypatch.setattr(compiler, "limits", lambda: limits)
    demands, chooser = Demands(LONG), random.Random(0)
    ids: dict[int, list[int]] = {number: [] for number in range(3)}
    for number in ids:
        process.masks.add(number, demands, [])
    neighbour = await process.grammars.matcher(demands)
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
    process.masks.add(1, Demands(Grammar(GrammarSource("grammar", text))), [])
    assert (await process.received()).num_generated == [0]
    process.step(1, process.tokenizer.tokenize_str("a")[:1], 1)
    async with asyncio.timeout(WAIT_S):
        while not process.failures:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ((number, error),) = process.failures
    assert number == 1 and isinstance(error, InvalidGrammar) and "max is 2000" in error.message


async def test_compiled_grammars_are_forgotten_when_the_process_is_too_large(process, monkeypatch):
    for length in range(8):
        form = schema(type="string", minLength=length)
        await process.grammars.matcher(Demands(form))
    assert len(process.grammars._cache) == 8
    monkeypatch.setattr(grammars, "CACHE_BYTES", -(1 << 40))
    process.grammars.trim()
    assert not process.grammars._cache
