"""Masks behind drafts are those of a matcher that has read the drafts, and the sequence's own
matcher does not know of them.
"""

import json
import random

import numpy as np
import pytest

from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.matcher import Matcher
from services.decoder.masks.rows import PROBE_WORDS
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

END, THOUGHT = added_ids()["<|im_end|>"], added_ids()["</think>"]
WORDS = {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 20}}
SCHEMA = GrammarSource("json_schema", json.dumps(WORDS), plain_strings=True)
CONSTRAINTS = {
    "schema": TokenConstraints(Grammar(SCHEMA, (), (END,))),
    "minimum": TokenConstraints(Grammar(SCHEMA, (), (END,), min_tokens=9)),
    "after a thought": TokenConstraints(Grammar(SCHEMA, (THOUGHT,), (END,))),
    "regex": TokenConstraints(Grammar(GrammarSource("regex", "[ab]{3}-?c{1,20}"), (), (END,))),
    "allowed": TokenConstraints(allowed_ids=tuple(range(20, 40))),
    "bad words": TokenConstraints(bad_words=((30,), (31, 32), (33, 34, 35))),
}


@pytest.fixture
def grammars(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    found = Grammars(tmp_path, vocab_size(), (END,))
    yield found
    found.close()


def allowed(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row[:-PROBE_WORDS].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: vocab_size()]).tolist()


def filled(matcher: Matcher, num_words: int) -> np.ndarray:
    row = np.zeros(num_words, np.int32)
    if not matcher.fill(row):
        row[:] = -1
    return row


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(4))
async def test_masks_behind_drafts_are_those_of_a_fresh_matcher(grammars, name, seed):
    chooser, num_words = random.Random(seed), grammars.num_mask_words
    matcher = await grammars.matcher(CONSTRAINTS[name])
    generated: list[int] = []
    num_filled = num_refused = 0
    for _ in range(30):
        rows = np.zeros((6, num_words), np.int32)
        rows[0] = filled(matcher, num_words)
        path = await grammars.matcher(CONSTRAINTS[name])
        path.consume(list(generated))
        assert allowed(filled(path, num_words)) == allowed(rows[0]), "the matcher has read drafts"
        drafts, expected = [], []
        for place in range(5):
            choices = allowed(filled(path, num_words))
            forbidden = sorted(set(range(vocab_size())) - set(choices))
            wrong = forbidden and chooser.random() < 0.2
            draft = chooser.choice(forbidden if wrong else choices)
            drafts.append(draft)
            has_ended = CONSTRAINTS[name].grammar is not None and draft == END
            if draft not in choices or has_ended:
                drafts += [chooser.randrange(300) for _ in range(place + 1, 5)]
                num_refused += 1
                break
            path.consume([draft])
            expected.append(allowed(filled(path, num_words)))
        count = matcher.fill_drafts(drafts, rows)
        assert count == len(expected)
        assert [allowed(row) for row in rows[1 : 1 + count]] == expected
        num_filled += count
        tokens = [token for token in allowed(rows[0]) if token != END]
        if not tokens:
            break
        token = chooser.choice(tokens)
        generated.append(token)
        matcher.consume([token])
    assert num_filled > 0 and num_refused > 0


class PanicException(BaseException):
    """As pyo3's."""


async def test_a_grammar_that_crashes_behind_a_draft_costs_the_drafts_alone(grammars, monkeypatch):
    matcher = await grammars.matcher(CONSTRAINTS["regex"])
    rows = np.zeros((3, grammars.num_mask_words), np.int32)
    rows[0] = filled(matcher, grammars.num_mask_words)
    first, *_ = allowed(rows[0])
    assert grammars.fill_drafts(matcher, [first], rows) == 1

    def panics(*_):
        raise PanicException

    monkeypatch.setattr(type(matcher.grammar), "copy", panics)
    assert grammars.fill_drafts(matcher, [first], rows) == 0
    assert allowed(filled(matcher, grammars.num_mask_words)) == allowed(rows[0])
    matcher.consume([first])
