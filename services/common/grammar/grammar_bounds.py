"""Bounds on the texts of schemas and grammars, which the gateway and the decoder's front check.

Only work that happens outside of the compile process needs such bounds. Whether a grammar takes too
much CPU time, memory or stack is decided by compiling it, in a process with limits of all three
(`decoder/masks/compile_worker.py`).
"""

import re

from services.common.errors import InvalidGrammar

# The gateway and the decoder's front read, copy and hash texts of this length.
MAX_GRAMMAR_CHARS = 1 << 18
# A mask process translates GBNF to Lark in Python, beside the loop that fills the masks of other
# sequences: 0.3 s for this length. Time is quadratic in the length of blanks in a row.
MAX_GBNF_CHARS = 1 << 16
MAX_BLANKS = 256

_IS_GBNF = re.compile(r"(?m)^\s*+[\w\-]++[ \t]*+::=")
_BLANKS = re.compile(rf"(?<!\s)\s{{{MAX_BLANKS + 1}}}")


def check_grammar(kind: str, text: str) -> None:
    """Checks the length of a grammar, in linear time.

    Args:
        kind: `json_schema`, `regex`, `choice` or `grammar` (Lark or GBNF).
        text: text of the grammar.

    Raises:
        InvalidGrammar: the text exceeds a bound.
    """
    _refuse(len(text), MAX_GRAMMAR_CHARS, "characters")
    if kind != "grammar":
        return
    if _BLANKS.search(text):
        raise InvalidGrammar(f"it has more than {MAX_BLANKS} blanks in a row")
    if is_gbnf(text):
        _refuse(len(text), MAX_GBNF_CHARS, "characters of GBNF")


def is_gbnf(text: str) -> bool:
    """Returns whether a grammar is GBNF, whose rules have `::=`. Any other grammar is Lark."""
    return _IS_GBNF.search(text) is not None


def _refuse(count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidGrammar(f"it has more than {most} {what}")
