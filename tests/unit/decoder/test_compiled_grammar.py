"""Several lexers of one grammar: how many, whose, and what follows when one has broken."""

import asyncio
import json
import random

import numpy as np
import pytest
from llguidance import LLParserLimits

from services.common.errors import Overloaded
from services.decoder import grammar as grammar_module
from services.decoder.compiled_grammar import CompiledGrammar
from services.decoder.engine.messages import TokenMasks
from services.decoder.grammar import Demands, Grammar, Grammars
from services.decoder.mask_rows import MaskRows, open_rows
from services.decoder.matcher import MatcherFailed
from services.decoder.token_masks import SequenceMasks
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

END = added_ids()["<|im_end|>"]
LONG = Grammar("json_schema", json.dumps({"type": "string", "minLength": 5000}), (), (END,))


def new_grammars(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    return Grammars(tmp_path, vocab_size(), lambda seconds: None)


def futures():
    return asyncio.Future()


async def test_each_lexer_has_few_sequences_where_threads_allow():
    grammar = CompiledGrammar(futures, max_lexers=3)
    taken = [grammar.take() for _ in range(30)]
    numbers = [lexer.number for lexer in taken]
    assert numbers[:12] == [1] * 4 + [2] * 4 + [3] * 4
    assert {numbers.count(number) for number in set(numbers)} == {10}
    for lexer in taken:
        grammar.give_back(lexer)
    assert grammar.take() in taken  # one stays


async def test_a_second_lexer_that_cannot_be_made_is_not_missed():
    refuses = False

    def compile_one():
        if refuses:
            raise Overloaded("busy")
        return futures()

    grammar = CompiledGrammar(compile_one, max_lexers=3)
    first = grammar.take()
    refuses = True
    assert all(grammar.take() is first for _ in range(9))
    first.is_broken = True
    with pytest.raises(Overloaded):
        grammar.take()


async def test_copies_of_other_lexers_fill_the_same_masks(tmp_path):
    grammars = new_grammars(tmp_path)
    grammars._num_threads = 2
    matchers = [await grammars.matcher(Demands(LONG)) for _ in range(8)]
    assert [matcher.lexer_number for matcher in matchers] == [1] * 4 + [2] * 4
    rows = np.zeros((8, grammars.num_mask_words), np.int32)
    opening = grammars._vocabulary((END,)).full.tokenize_str('"')
    for ids in ([], opening):
        found = grammars.fill([(m, ids, row) for row, m in enumerate(matchers)], rows)
        assert found == [True] * 8
        assert (rows == rows[0]).all()
    for matcher in matchers:
        grammars.release(matcher)
    grammars.close()


class Engine:
    def __init__(self):
        self.masks: asyncio.Queue[TokenMasks] = asyncio.Queue()

    def send(self, *messages):
        for message in messages:
            if isinstance(message, TokenMasks):
                self.masks.put_nowait(message)


async def test_a_lexer_at_its_limit_ends_no_other_sequence(tmp_path, monkeypatch):
    """The states of a lexer are of all texts that its sequences have written."""
    limits = LLParserLimits(max_lexer_states=8000, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_limits", lambda: limits)
    grammars, engine, failures = new_grammars(tmp_path), Engine(), []
    rows = MaskRows(8, grammars.num_mask_words)
    opened = open_rows(rows.message)
    masks = SequenceMasks(
        grammars, rows, engine, lambda seconds: None, lambda *failure: failures.append(failure)
    )
    masks.rows_opened()
    demands, chooser = Demands(LONG), random.Random(0)
    ids: dict[int, list[int]] = {number: [] for number in range(3)}
    for number in ids:
        masks.add(number, demands, [])
    neighbour = await grammars.matcher(demands)
    lexers: set[int] = set()
    while min(map(len, ids.values())) < 60 and not failures:
        if len(ids[0]) == 20 and neighbour is not None:
            assert write_without_end(neighbour, grammars, rows.array)
            neighbour = None
        sent = await asyncio.wait_for(engine.masks.get(), 10)
        events = []
        for number, count, row in zip(
            sent.sequence_ids, sent.num_generated, sent.rows, strict=True
        ):
            assert count == len(ids[number])
            bits = np.unpackbits(opened[row].view(np.uint8), bitorder="little")[: vocab_size()]
            ids[number].append(chooser.choice(np.flatnonzero(bits).tolist()))
            events.append((number, ids[number][-1:]))
            lexers.add(masks._sequences[number].matcher.lexer_number)
        masks.tokens_arrived(events)
    assert not failures and len(lexers) == 2
    tokenizer = grammars._vocabulary((END,)).full
    for number, found in ids.items():
        text = tokenizer.decode_bytes(found).decode(errors="ignore")
        assert text.startswith('"') and '"' not in text[1:].replace('\\"', "")
        masks.remove(number)
    later = await grammars.matcher(demands)
    assert later.lexer_number in lexers
    assert grammars.fill([(later, [], 7)], rows.array) == [True]
    await masks.close()


def write_without_end(matcher, grammars, rows):
    """Whether it comes to a limit."""
    tokenizer = grammars._vocabulary((END,)).full
    ids = tokenizer.tokenize_str('"')
    while len(matcher.generated) < 5000:
        (found,) = grammars.fill([(matcher, ids, 7)], rows)
        if isinstance(found, MatcherFailed):
            return True
        ids = tokenizer.tokenize_str("a")
    return False
