"""Whole characters, stop strings, and the same text however tokens are grouped."""

import random

import pytest

from services.gateway.answers.detokenizer import Detokenizer, StopMatcher
from tests.tiny_tokenizer import added_ids, vocab_size

TEXTS = ["hello world", "中文 naïve über", "🙂👩‍👩‍👧 mixed é 中", "a\ufffdb", "line\nline\r\n"]


def run(tokenizer, ids, sizes, **options):
    """All text, fed in groups of the given sizes."""
    detokenizer = Detokenizer(tokenizer, **options)
    pieces, index = [], 0
    while index < len(ids) and detokenizer.matched_stop is None:
        size = next(sizes)
        pieces.append(detokenizer.feed(ids[index : index + size]))
        index += size
    pieces.append(detokenizer.finish())
    return "".join(pieces), detokenizer, pieces


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
    found, detokenizer, pieces = run(tokenizer, ids, ones())
    assert found == text
    assert detokenizer.num_tokens == len(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_equals_the_tokenizers_own_decoding(tokenizer):
    rng = random.Random(1)
    for seed in range(100):
        ids = [rng.randrange(vocab_size() - 40) for _ in range(30)] + tokenizer.encode_text(" end")
        expected = tokenizer._plain.decode(ids, skip_special_tokens=False)
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
        found, detokenizer, _ = run(
            tokenizer, tokenizer.encode_text(text), sizes, stops=[stop], include_stop=include
        )
        assert found == text[:cut]
        assert detokenizer.matched_stop == stop


def test_grouping_changes_neither_text_nor_count(tokenizer):
    rng = random.Random(5)
    for seed in range(200):
        ids = tokenizer.encode_text("".join(rng.choices("ab中🙂 ", k=25)))
        stops = ["".join(rng.choices("ab中🙂 ", k=rng.randint(1, 4))) for _ in range(3)]
        first = run(tokenizer, ids, ones(), stops=stops)
        for sizes in (randoms(seed), iter([1000])):
            other = run(tokenizer, ids, sizes, stops=stops)
            assert other[0] == first[0]
            assert other[1].num_tokens == first[1].num_tokens
            assert other[1].matched_stop == first[1].matched_stop


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
    found, detokenizer, _ = run(tokenizer, ids, ones(), stops=["."], min_tokens=4)
    assert found == "a.b.c"
    assert detokenizer.num_tokens == 6


def test_cost_does_not_grow_with_the_text(tokenizer):
    detokenizer = Detokenizer(tokenizer, stops=["\n\n"])
    ids = tokenizer.encode_text("hello world ") * 5000
    for start in range(0, len(ids), 10):
        detokenizer.feed(ids[start : start + 10])
        assert len(detokenizer._matcher._held) < 2
