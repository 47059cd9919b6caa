"""Reasoning apart from content: whole and in pieces, from wherever the prompt leaves off."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.answers.reasoning import ReasoningSplitter, answer_start
from services.gateway.forms.parts import Reasoning, Text, join
from tests.noise import least


def split(start, chunks):
    splitter = ReasoningSplitter(start)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
    return join(pieces + splitter.finish())


CASES = [
    ("optional", "<think>\nwhy\n</think>\n\nbecause\n", [Reasoning("why"), Text("because\n")]),
    ("open", "why\nnot\n\n</think>\n\nyes", [Reasoning("why\nnot"), Text("yes")]),
    ("optional", "plain </think> text", [Text("plain </think> text")]),
    ("optional", "\n <think>a</think>b", [Reasoning("a"), Text("b")]),
    ("optional", "<thin", [Text("<thin")]),
    ("optional", "\n\nx", [Text("\n\nx")]),
    ("open", "cut in the mid\n</thi", [Reasoning("cut in the mid\n</thi")]),
    ("open", "\n</think>\n\n", []),
    ("open", "a</think>b</think>c", [Reasoning("a"), Text("b</think>c")]),
    ("closed", "<think>x</think>", [Text("<think>x</think>")]),
]


@pytest.mark.parametrize(("start", "text", "expected"), CASES)
def test_split(start, text, expected):
    assert split(start, [text]) == expected
    assert split(start, list(text)) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["open", "optional", "closed"]),
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "<", "/think>", "a", " "]), max_size=12),
    st.integers(0, 1 << 30),
)
def test_any_text_gives_the_same_parts_in_any_pieces(start, pieces, seed):
    text, rng = "".join(pieces), random.Random(seed)
    places = sorted(rng.choices(range(len(text) + 1), k=4))
    cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(start, cut) == split(start, list(text)) == split(start, [text])


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["open", "optional"]),
    st.lists(st.sampled_from(["<c>", "{", "\n", "<think>", "</think>", "a", " "]), max_size=12),
)
def test_calls_are_found_in_any_pieces(start, pieces):
    def read(chunks):
        splitter, parts, call = ReasoningSplitter(start, "<c>", "{"), [], ""
        for chunk in chunks:
            if call:
                call += chunk
            else:
                parts += splitter.feed(chunk)
                call = splitter.take_call()
        return join(parts + splitter.finish()), call

    text = "".join(pieces)
    assert read(pieces) == read(list(text)) == read([text])


def test_line_breaks_that_do_not_end_cost_little():
    def read() -> float:
        splitter = ReasoningSplitter("open")
        start = time.process_time()
        parts = splitter.feed("x")
        for _ in range(4000):
            parts += splitter.feed("\n" * 16)
        taken = time.process_time() - start
        assert join(parts + splitter.finish()) == [Reasoning("x" + "\n" * 64_000)]
        return taken

    assert least(read, 4) <= 4  # seconds; looked at one by one, ten


@pytest.mark.parametrize(
    ("start", "before", "piece"),
    [
        ("optional", "", " " * 64),
        ("open", "thought", "\n" * 64),
        ("open", "thought<tool_call>", " " * 64),
    ],
)
def test_long_blanks_that_do_not_end_cost_little(start, before, piece):
    def read():
        splitter = ReasoningSplitter(start, "<tool_call>", "{")
        begun = time.process_time()
        for text in [before, *(piece for _ in range(8000))]:
            splitter.feed(text)
        splitter.finish()
        return time.process_time() - begun

    assert least(read, 0.25) <= 0.25  # seconds; read again with each token, 1 to 20


def test_a_call_within_the_block_is_given_back():
    """With all that follows it; a tag that is only mentioned stays reasoning."""
    text = 'a <tool_call> b\n<tool_call>\n {"name"'
    for chunks in ([text], list(text)):
        splitter, pieces, call = ReasoningSplitter("open", "<tool_call>", "{"), [], ""
        for chunk in chunks:
            if call:
                call += chunk
            else:
                pieces += splitter.feed(chunk)
                call = splitter.take_call()
        assert join(pieces) == [Reasoning("a <tool_call> b")]
        assert call == '<tool_call>\n {"name"' and splitter.thinking
    assert splitter.feed("</think>\n\nDone.") == [Text("Done.")]
    assert split("open", ["why <tool_call> yes"]) == [Reasoning("why <tool_call> yes")]


def test_nothing_but_tags_and_line_breaks_is_lost():
    assert split("open", ["a\n\nb\n", "</think>", "\n", "c\n\nd"]) == [
        Reasoning("a\n\nb"), Text("c\n\nd"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("assistant\n", "optional"),  # Qwen3
        ("assistant\n<think>\n", "open"),  # Qwen3.5, the Thinking models
        ("assistant\n<think>\n\n</think>\n\n", "closed"),  # thinking switched off
        ("\n\n", "optional"),
        ("assistant\nThe answer", "closed"),  # continued
        ("assistant\n<think>\nFirst, ", "open"),
        ("assistant\n<think>\nw\n</think>\n\nThe", "closed"),
    ],
)
def test_where_an_answer_begins(tail, expected):
    assert answer_start(tail) == expected
