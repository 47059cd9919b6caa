"""Bounds on the texts of grammars: what is just within them passes, what is beyond is refused."""

import time
from contextlib import suppress

import pytest

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_bounds import check_grammar

LINE = 'start: "a"\n'
GBNF = "root ::= a"
TEXTS = {
    "characters of a schema": ("json_schema", " " * 2**18, " " * (2**18 + 1), "262144 characters"),
    "characters of an expression": ("regex", "x" * 2**18, "x" * (2**18 + 1), "262144 characters"),
    "characters of a choice": ("choice", "x" * 2**18, "x" * (2**18 + 1), "262144 characters"),
    "characters of Lark": (
        "grammar", LINE + "#" * (2**18 - len(LINE)), LINE + "#" * 2**18, "262144 characters",
    ),
    "characters of GBNF": (
        "grammar", GBNF + "#" * (2**16 - len(GBNF)), GBNF + "#" * 2**16, "65536 characters of GBNF",
    ),
    "blanks": ("grammar", LINE + "\n" * 255, LINE + "\n" * 256, "256 blanks in a row"),
    "blanks within": ("grammar", f"a:{' ' * 256}b", f"a:{' ' * 257}b", "256 blanks in a row"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_each_bound_is_where_it_is_said_to_be(name):
    kind, within, beyond, words = TEXTS[name]
    check_grammar(kind, within)
    with pytest.raises(InvalidGrammar, match=f"it has more than {words}"):
        check_grammar(kind, beyond)


def test_only_grammars_have_few_blanks():
    for kind in ("json_schema", "regex", "choice"):
        check_grammar(kind, "\n" * 1000)


@pytest.mark.parametrize("part", [" ", "\n", " " * 256 + "a", "::=", "a ", "-"])
def test_hostile_texts_take_linear_time(part):
    text, started = (part * 2**18)[: 2**18], time.process_time()
    with suppress(InvalidGrammar):
        check_grammar("grammar", text)
    assert time.process_time() - started < 1
