"""Masks within bounded strings are those that llguidance alone would fill."""

import asyncio
import json
import random

import numpy as np
import pytest

from services.common.grammar.plain_strings import has_plain_bounds
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.rows import PROBE_WORDS
from tests.tiny_tokenizer import added_ids, tokenizer_json

END = added_ids()["<|im_end|>"]
VOCAB_SIZE = 1000  # not a multiple of 32, and more than the tokenizer has
SHORT = {"type": "string", "maxLength": 3}
LONG = {"type": "string", "minLength": 2, "maxLength": 90}
PLAIN = [
    SHORT,
    LONG,
    {"type": ["string", "null"], "maxLength": 7},
    {"anyOf": [SHORT, {"type": "null"}], "description": "perhaps"},
    {"type": "array", "items": SHORT, "minItems": 2},
    {"type": "array", "prefixItems": [SHORT, {"enum": ["red", "reddish"]}], "minItems": 2},
    {"type": "object", "additionalProperties": SHORT, "properties": {"maxLength": LONG}},
    {"$ref": "#/$defs/name", "$defs": {"name": {"type": "string", "maxLength": 12}}},
]
NOT_PLAIN = [
    {"type": "string"},
    {"type": "string", "maxLength": 3, "pattern": "^[a-c]*$"},
    {"type": "string", "maxLength": 30, "format": "date"},
    {"anyOf": [SHORT, {"enum": ["reddish"]}]},
    {"anyOf": [SHORT, {"type": "null"}], "maxLength": 2},
    {"anyOf": [{"type": "object", "properties": {"a": SHORT}}, {"type": "object"}]},
    {"allOf": [SHORT, LONG]},
    {"type": "object", "patternProperties": {"^a": SHORT}},
    {"type": "object", "propertyNames": SHORT},
    {"$ref": "#/examples/0", "examples": [{"type": "string", "pattern": "^a*$", "maxLength": 2}]},
    {"enum": ["\ue123"], "maxLength": 1},
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tokenizer_json())
    return Grammars(directory, VOCAB_SIZE, (END,))


@pytest.mark.parametrize("schema", NOT_PLAIN, ids=json.dumps)
def test_other_schemas_have_one_matcher(schema):
    assert not has_plain_bounds(json.dumps(schema))


@pytest.mark.parametrize("schema", PLAIN, ids=json.dumps)
def test_masks_are_llguidances(grammars, schema):
    text = json.dumps(schema)
    assert has_plain_bounds(text)
    form = Grammar(GrammarSource("json_schema", text), stop_ids=(END,))
    num_in_strings = 0
    for seed in range(30):
        matcher = asyncio.run(grammars.matcher(TokenConstraints(form)))
        alone = matcher.grammar.state.deep_copy()
        chooser = random.Random(seed)
        for _ in range(60):
            filled = np.zeros(grammars.num_words + PROBE_WORDS, np.int32)
            expected = np.zeros_like(filled)
            assert matcher.fill(filled)
            mask = filled[:-PROBE_WORDS]
            alone.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
            assert (mask == expected[:-PROBE_WORDS]).all()
            assert not expected[-PROBE_WORDS:].any()
            num_in_strings += matcher.grammar._in_string
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_id = int(chooser.choice(allowed))
            if token_id == END:
                break
            matcher.consume([token_id])
            assert alone.consume_token(token_id)
    assert num_in_strings > 20


def test_a_second_matcher_that_fails_is_left(grammars):
    form = Grammar(GrammarSource("json_schema", json.dumps(SHORT)), stop_ids=(END,))
    matcher = asyncio.run(grammars.matcher(TokenConstraints(form)))
    opening = grammars.vocabulary.result().full.tokenize_str('"')
    matcher.consume(opening)
    alone = matcher.grammar.state.deep_copy()
    second = matcher.grammar.strings.state
    filled = np.zeros(grammars.num_words + PROBE_WORDS, np.int32)
    assert matcher.fill(filled) and matcher.grammar._in_string
    second.consume_tokens([END, END])  # as if it had reached a limit
    assert second.is_error()
    expected = np.frombuffer(alone.compute_bitmask(), np.int32)
    assert matcher.fill(filled)
    assert (filled[:-PROBE_WORDS] == expected[: grammars.num_words]).all()
    assert matcher.fill(filled) and not matcher.grammar._in_string
