"""Whole characters, stop strings, and the same text however tokens are grouped."""

import random

import pytest

from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.stop_matcher import StopMatcher
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.parts import Text
from tests.tiny_tokenizer import added_ids, vocab_size

TEXTS = ["hello world", "中文 naïve über", "🙂👩‍👩‍👧 mixed é 中", "a\ufffdb", "line\nline\r\n"]


def choice_of(tokenizer, **options):
    return Choice(0, ChatRequest([], **options), tokenizer, None)


def run(tokenizer, ids, sizes, **options):
    """All text, fed in groups of the given sizes; the choice, the pieces, and what stopped it."""
    choice = choice_of(tokenizer, **options)
    pieces, index, stop = [], 0, None
    while choice.finish_reason is None:
        size = next(sizes)
        group, index = ids[index : index + size], index + size
        update = choice.feed(
            TokenEvent(0, group, finish_reason="length" if index >= len(ids) else None)
        )
        pieces.append("".join(part.text for part in update.parts if isinstance(part, Text)))
        stop = update.stop_reason
    return "".join(pieces), choice, pieces, stop


def ones():
    while True:
        yield 1


def randoms(seed):
    rng = random.Random(seed)
    while True:
        yield rng.randint(1, 5)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_token_by_token(tokenizer, text):
    ids = tokenizer.encode_text(text)
    found, choice, pieces, _ = run(tokenizer, ids, ones())
    assert found == text
    assert choice.num_tokens == len(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_equals_the_tokenizers_own_decoding(tokenizer):
    rng = random.Random(1)
    for seed in range(100):
        ids = [rng.randrange(vocab_size() - 40) for _ in range(30)] + tokenizer.encode_text(" end")
        expected = tokenizer.reference.decode(ids, skip_special_tokens=False)
        assert run(tokenizer, ids, randoms(seed))[0] == expected


def test_character_cut_by_the_end_is_left_out(tokenizer):
    ids = tokenizer.encode_text("ab") + tokenizer.encode_text("🙂")[:-1]
    assert run(tokenizer, ids, ones())[0] == "ab"


def test_bytes_that_are_no_character_are_replaced(tokenizer):
    byte = tokenizer.encode_text("🙂")[:1]
    assert run(tokenizer, byte + tokenizer.encode_text("x"), ones())[0].endswith("\ufffdx")


def test_only_special_tokens_are_skipped(tokenizer):
    ids = [
        *tokenizer.encode_text("a"), added_ids()["<|im_end|>"], added_ids()["<think>"],
        *tokenizer.encode_text("b"), vocab_size() - 1,
    ]  # fmt: skip
    assert run(tokenizer, ids, ones())[0] == "a<think>b"
    found = run(tokenizer, ids, ones(), skip_special_tokens=False)[0]
    assert found == "a<|im_end|><think>b"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["o w", "world", "ld", "d", "hello", "h", "lo wor"])
def test_stop_string_ends_the_text(tokenizer, stop, include):
    text = "hello world, hello"
    cut = text.index(stop) + (len(stop) if include else 0)
    for sizes in (ones(), randoms(3), iter([100])):
        found, _, _, matched = run(
            tokenizer, tokenizer.encode_text(text), sizes, stop=[stop],
            include_stop_str_in_output=include,
        )  # fmt: skip
        assert found == text[:cut]
        assert matched == stop


def test_grouping_changes_neither_text_nor_count(tokenizer):
    rng = random.Random(5)
    for seed in range(200):
        ids = tokenizer.encode_text("".join(rng.choices("ab中🙂 ", k=25)))
        stops = ["".join(rng.choices("ab中🙂 ", k=rng.randint(1, 4))) for _ in range(3)]
        first = run(tokenizer, ids, ones(), stop=stops)
        for sizes in (randoms(seed), iter([1000])):
            other = run(tokenizer, ids, sizes, stop=stops)
            assert other[0] == first[0]
            assert other[1].num_tokens == first[1].num_tokens
            assert other[3] == first[3]


def test_nothing_of_a_stop_string_is_returned_early():
    matcher = StopMatcher(["END"])
    assert [matcher.feed(c) for c in "aENxE"] == ["a", "", "", "ENx", ""]
    assert matcher.flush() == "E"
    assert matcher.matched is None


def test_first_completed_stop_wins():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.feed("xabcd") == "xa"
    assert matcher.matched == "bc"


def test_no_stop_before_min_tokens(tokenizer):
    ids = tokenizer.encode_text("a.b.c.d")
    found, choice, _, _ = run(tokenizer, ids, ones(), stop=["."], min_tokens=4)
    assert found == "a.b.c"
    assert choice.num_tokens == 6


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "expected"),
    [
        (["bcd"], 2, "a"),  # begins before, ends behind, as in vLLM
        (["abcdef"], 5, ""),
        (["abcd"], 4, "abcdefgh"),
        (["bc", "abcde"], 3, ""),  # the shorter one was complete before
        (["zz", "h"], 8, "abcdefgh"),
    ],
)
def test_a_stop_string_counts_from_where_it_ends(tokenizer, size, stop, min_tokens, expected):
    ids = [tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    found, choice, _, _ = run(tokenizer, ids, iter([size] * 9), stop=stop, min_tokens=min_tokens)
    assert found == expected
    assert choice.finish_reason == ("length" if expected == "abcdefgh" else "stop")


def test_cost_does_not_grow_with_the_text(tokenizer):
    choice = choice_of(tokenizer, stop=["\n\n"])
    assert choice.stops.stops
    ids = tokenizer.encode_text("hello world ") * 5000
    for start in range(0, len(ids), 10):
        choice.feed(TokenEvent(0, ids[start : start + 10]))
        assert choice.stops.num_buffered < 2
