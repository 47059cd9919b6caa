"""tiktoken gives the reference's ids, or is not used."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.tokenizer.byte_pairs import BytePairs
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.cases import cases
from tests.tiny_tokenizer import tokenizer_json

pytestmark = pytest.mark.thorough

DEMONSTRATION = Path(__file__).parents[3] / "demo" / "model" / "tokenizer.json"
DEFINITIONS = {"tiny": tokenizer_json(), "demo": DEMONSTRATION.read_text(encoding="utf-8")}


@pytest.fixture(scope="module", params=sorted(DEFINITIONS))
def definition(request) -> dict:
    return json.loads(DEFINITIONS[request.param])


@pytest.fixture(scope="module")
def reference(definition) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**definition, "added_tokens": []}))


@pytest.fixture(scope="module")
def fast(definition) -> BytePairs:
    found = BytePairs.of(definition)
    assert found is not None
    return found


def test_each_character_of_unicode_in_several_places():
    """Characters are in planes 0 to 3 and at the beginning of plane 14. The other planes hold none,
    or private ones: all of a kind, of which every 61st stands for the rest.
    """
    fast, reference = _both("demo")
    numbers = [*range(0x40000), *range(0x40000, 0x110000, 61), *range(0xE0000, 0xE1000), 0x10FFFF]
    numbers = numbers[:: cases(7, 1)]
    characters = [chr(c) for c in numbers if not 0xD800 <= c <= 0xDFFF]
    chunks = [characters[i : i + 500] for i in range(0, len(characters), 500)]
    texts = ["".join(f"a{c}b {c}1.{c}e\u0301" for c in chunk) for chunk in chunks]
    expected = reference.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        assert fast.encode(text) == encoding.ids


# Pieces that the pattern splits, that NFC joins, or that merge in several ways.
PIECES = (
    "'s", "'LL", "'\u017f", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\u0085", "\x1c", "aaa",
    "ab", "abab", "the", " the", "picture", "0", "12", "½", "é", "e\u0301", "\u0323\u0307", "가",
    "\u1100\u1161", "中文", "😀", "👨\u200d👩\u200d👧", "<|im_start|>", "...", "!?\n", "\u0627",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=60).map("".join))
@settings(deadline=None, max_examples=cases(100, 400))
def test_any_text(text):
    for each in DEFINITIONS:
        fast, reference = _both(each)
        assert fast.encode(text) == reference.encode(text, add_special_tokens=False).ids


_made: dict[str, tuple[BytePairs, Tokenizer]] = {}


def _both(name: str) -> tuple[BytePairs, Tokenizer]:
    if name not in _made:
        definition = json.loads(DEFINITIONS[name])
        fast = BytePairs.of(definition)
        assert fast is not None
        plain = {**definition, "added_tokens": []}
        _made[name] = fast, Tokenizer.from_str(json.dumps(plain))
    return _made[name]


@pytest.mark.parametrize("blank", [" ", "\t", " \n", "\u3000", "\r"])
def test_a_long_run_of_white_space_goes_to_the_reference(definition, reference, fast, blank):
    tokenizer = ModelTokenizer(definition)
    cases = (
        (900, 1, True),
        (999, 1, True),
        (1_000, 1, False),
        (1_000, 499, False),
        (3_000, 7, False),
    )
    for length, before, is_fast in cases:
        text = "a" * before + (blank * length)[:length] + "b"
        assert (fast.encode(text) is not None) == is_fast
        assert tokenizer.encode_text(text) == reference.encode(text, add_special_tokens=False).ids


def test_a_run_that_would_overflow_the_stack_is_encoded():
    tokenizer = ModelTokenizer(json.loads(DEFINITIONS["demo"]))
    assert tokenizer.encode_text(" " * 1_500_000)


def changed(definition: dict, **fields) -> dict:
    return {**definition, "model": {**definition["model"], **fields}}


def test_a_definition_that_is_not_proven_equal_is_refused(definition):
    model = definition["model"]
    merges, vocab = model["merges"], model["vocab"]
    assert BytePairs.of(definition) is not None
    refused = {
        "merges in another order than ids": changed(
            definition, merges=[merges[1], merges[0], *merges[2:]]
        ),
        "a token that no pair makes": changed(definition, vocab={**vocab, "zqzq": len(vocab)}),
        "a pair listed twice": changed(definition, merges=[*merges, merges[-1]]),
        "bytes for what is unknown": changed(definition, byte_fallback=True),
        "chance": changed(definition, dropout=0.1),
        "another normalizer": {**definition, "normalizer": {"type": "NFKC"}},
        "a space before the text": with_prefix_space(definition),
        "no pattern": {**definition, "pre_tokenizer": None},
    }
    for why, each in refused.items():
        assert BytePairs.of(each) is None, why


def with_prefix_space(definition: dict) -> dict:
    made = copy.deepcopy(definition)
    made["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
    return made


def test_a_pair_that_merging_does_not_arrive_at_is_refused():
    """The case that the proof excludes: the two libraries differ on the token's own text."""
    definition = json.loads(tokenizer_json())
    vocab = {t: i for t, i in definition["model"]["vocab"].items() if len(t) == 1}
    first = len(vocab)
    # "xyz" is listed as x + yz, but x and y are merged before: xy, z is where merging ends.
    merges = ["x y", "y z", "x yz"]
    vocab |= {"xy": first, "yz": first + 1, "xyz": first + 2}
    made = changed(definition, vocab=vocab, merges=merges)
    assert BytePairs.of(made) is None
    listed = changed(definition, vocab=vocab, merges=["x y", "y z", "xy z"])
    assert BytePairs.of(listed) is not None


def test_a_refused_definition_is_still_tokenized(definition):
    model = definition["model"]
    made = changed(definition, vocab={**model["vocab"], "zqzq": len(model["vocab"])})
    reference = Tokenizer.from_str(json.dumps({**made, "added_tokens": []}))
    text = "The quick brown zqzq."
    ids = reference.encode(text, add_special_tokens=False).ids
    assert ModelTokenizer(made).encode_text(text) == ids
