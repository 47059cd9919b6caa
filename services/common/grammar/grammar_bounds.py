"""Bounds on the schemas and grammars of requests, which are checked before they are compiled.

The gateway checks the grammar of a request, and the decoder checks it again. The compiler recurses
along references without a limit of its own, and a few keywords take it seconds. Each bound is
chosen so that the largest allowed grammar compiles in less than a second of one core, with 100
MiB of memory and a quarter of a stack of 8 MiB, as `benchmarks/grammar_bounds.py` measures. All
checks take time linear in the text, without recursion.
"""

import json
import math
import re
from typing import Any, NoReturn, cast

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_counts import Counts, Product, refuse, refuse_repeats, times_of
from services.common.grammar.reference_graph import components, deepest
from services.common.grammar.schema_bounds import MAX_CHAIN, check_schema

MAX_GRAMMAR_CHARS = 1 << 18
MAX_GBNF_CHARS = 1 << 16  # translating them to Lark in Python takes 0.3 s
MAX_RULES = 4000  # they take 0.1 s and 30 MiB
# Number of rules and groups along a path of references. A stack of 8 MiB ends beyond 2,600.
MAX_RULE_LEVELS = 1024
MAX_SCHEMAS = 1000  # schemas within a Lark grammar, which take 0.4 s and 60 MiB
# Intersections in a terminal and in the terminals that it refers to: 12 take 30 ms, 100 take
# minutes.
MAX_INTERSECTIONS = 8
MAX_BLANKS = 256  # consecutive blanks, for which the translation needs quadratic time

_NAME = r"!?[_?]?[a-z][_a-z0-9\-]*|_?[A-Z][_A-Z0-9\-]*"
_LARK = re.compile(
    rf"""(?P<skip>(?:(?:\#|//)[^\n]*+|[ \t]++)++)|(?P<line>(?:\r?\n)++)
    |(?P<json>%(?:json|regex|llguidance)\s*+)|(?P<lark>%lark\s*+\{{)|(?P<keyword>%[a-z]++)
    |(?P<string>"(?:\\.|[^"\\\n])*+"i?)|(?P<regexp>/(?:\\.|[^/\\])++/[imslux]*)
    |(?P<special><[^<>\s]++>)|(?P<name>{_NAME})
    |(?P<repeat>\{{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?\}}|~\s*+\d++(?:\s*+\.\.\s*+\d++)?)
    |(?P<other>[^"/])""",
    re.VERBOSE | re.DOTALL,
)
_GBNF = re.compile(
    r"""(?P<skip>(?:\#[^\r\n]*+|\s++)++)|(?P<string>"(?:\\.|[^"\\])*+")
    |(?P<regexp>\[(?:\\.|[^\]\\])*+\])|(?P<head>[\w\-]++(?=[ \t]*+::=))|(?P<name>[\w\-]++)
    |(?P<repeat>\{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?\})|(?P<other>[^"\[])""",
    re.VERBOSE | re.DOTALL,
)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_IS_GBNF = re.compile(r"(?m)^\s*+[\w\-]++[ \t]*+::=")


def check_grammar(kind: str, text: str) -> None:
    """Checks a grammar against the bounds.

    Args:
        kind: `json_schema`, `regex`, `choice` (a JSON list of strings) or `grammar` (Lark in
            llguidance's dialect, or GBNF).
        text: text of the grammar.

    Raises:
        InvalidGrammar: the grammar exceeds a bound, or is not of its kind.
    """
    refuse(len(text), MAX_GRAMMAR_CHARS, "characters")
    counts = Counts()
    if kind == "json_schema":
        check_schema(_parsed(text), counts)
    elif kind == "choice":
        choices = _parsed(text)
        if not isinstance(choices, list):
            raise InvalidGrammar("it is not a list of strings")
        choices = cast("list[Any]", choices)
        counts.add_literal(json.dumps(choices, ensure_ascii=False), len(choices))
    elif kind == "regex":
        counts.add_pattern(text)
    else:
        _check_rules(text, counts)


def _parsed(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise InvalidGrammar("it is nested too deeply") from None
    except ValueError:
        raise InvalidGrammar("it is not JSON") from None


def is_gbnf(text: str) -> bool:
    """Returns whether a grammar is GBNF, whose rules have `::=`. Any other grammar is Lark."""
    return _IS_GBNF.search(text) is not None


def _check_rules(text: str, counts: Counts) -> None:
    refuse(max(map(len, re.findall(r"\s+", text)), default=0), MAX_BLANKS, "blanks in a row")
    rules = _Rules(counts)
    if is_gbnf(text):
        refuse(len(text), MAX_GBNF_CHARS, "characters of GBNF")
        rules.read_gbnf(text)
    else:
        rules.read_lark(text)
    rules.check()


class _Rule:
    """The references and the own sizes of a rule or terminal.

    Attributes:
        names: names that the rule refers to.
        product: product of the rule's counted repeats.
        levels: number of nested groups.
        intersections: number of intersections (&).
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.product = Product()
        self.levels = 1
        self.intersections = 0
        self._depth = 1

    def read(self, character: str) -> None:
        """Reads a punctuation character."""
        if character in "([":
            self.product.open()
            self._depth += 1
            self.levels = max(self.levels, self._depth)
        elif character in ")]":
            self.product.close()
            self._depth -= 1
        elif character not in "*+?":
            self.product.item()
            self.intersections += character == "&"


class _Rules:
    """The rules of a grammar, by name."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._rules: dict[str, _Rule] = {}
        self._num_schemas = 0
        self._num_grammars = 0

    def read_lark(self, text: str) -> None:
        """Reads a Lark grammar. A rule begins a line, and a line that begins with `|` continues the
        rule before.
        """
        # `outer` has an entry for each open brace. Names in a grammar within the grammar have the
        # number of the inner grammar as their prefix.
        prefix, rule, outer = "", self._rule("%"), list[tuple[str, _Rule]]()
        is_start, index = True, 0
        while index < len(text):
            match = _LARK.match(text, index)
            if match is None:
                raise InvalidGrammar(f"it has a {text[index]} that is not closed")
            kind, part, index = match.lastgroup, match[0], match.end()
            if kind == "skip":
                continue
            if kind == "line":
                is_start = True
                continue
            begins, is_start = is_start and part not in "|}", False
            if begins:
                rule = self._rule(prefix + part.lstrip("!?") if kind == "name" else "%")
            if kind == "name" and not begins:
                self._refer(rule, prefix + part.lstrip("!?"))
            elif kind == "json":
                index = self._read_json(part, text, index)
                rule.product.item()
            elif kind == "lark":
                outer.append((prefix, rule))
                self._num_grammars += 1
                prefix, is_start = f"{self._num_grammars}.", True
                self._refer(rule, f"{prefix}start")
            elif part == "{":
                outer.append((prefix, rule))
            elif part == "}":
                prefix, rule = outer.pop() if outer else (prefix, rule)
            else:
                self._read(rule, kind, part)

    def read_gbnf(self, text: str) -> None:
        """Reads a GBNF grammar. A rule begins with its name and `::=`."""
        rule, index = self._rule("%"), 0
        while index < len(text):
            match = _GBNF.match(text, index)
            if match is None:
                raise InvalidGrammar(f"it has a {text[index]} that is not closed")
            kind, part, index = match.lastgroup, match[0], match.end()
            if kind == "head":
                rule = self._rule(part)
            elif kind == "name":
                self._refer(rule, part)
            elif kind != "skip":
                self._read(rule, kind, part)

    def check(self) -> None:
        """Checks the bounds on all rules together.

        Raises:
            InvalidGrammar: the rules exceed a bound.
        """
        rules = list(self._rules.values())
        nodes = {name: node for node, name in enumerate(self._rules)}
        edges = [[(nodes[name], 1) for name in rule.names if name in nodes] for rule in rules]
        levels, chain = deepest(edges, [rule.levels for rule in rules])
        refuse(chain, MAX_CHAIN, "references one behind the other")
        refuse(levels, MAX_RULE_LEVELS, "levels of nesting along its references")
        repeats, _ = deepest(edges, [math.log(rule.product.total()) for rule in rules])
        refuse_repeats(round(math.exp(min(repeats, 50))))
        found = [0] * len(rules)
        names = list(self._rules)
        for component in components(edges):
            for node in component:
                if names[node].rpartition(".")[2].isupper():
                    found[node] = rules[node].intersections + sum(found[n] for n, _ in edges[node])
                    refuse(found[node], MAX_INTERSECTIONS, "intersections (&) in one terminal")

    def _rule(self, name: str) -> _Rule:
        rule = self._rules.setdefault(name, _Rule())
        refuse(len(self._rules), MAX_RULES, "rules")
        return rule

    def _refer(self, rule: _Rule, name: str) -> None:
        rule.product.item()
        rule.names.append(name)

    def _read(self, rule: _Rule, kind: str | None, part: str) -> None:
        if kind == "repeat":
            self._counts.add_counted()
            rule.product.repeat(times_of(re.findall(r"\d+", part)[-1]))
        elif kind == "other":
            rule.read(part)
        else:
            rule.product.item()
            if kind == "string":
                self._counts.add_literal(part)
            elif kind == "regexp":
                self._counts.add_pattern(part)

    def _read_json(self, word: str, text: str, index: int) -> int:
        """Reads the JSON behind a keyword such as `%json`, and returns the index of its end."""
        try:
            value, end = _DECODER.raw_decode(text, index)
        except RecursionError:
            raise InvalidGrammar("its JSON is nested too deeply") from None
        except ValueError:
            raise InvalidGrammar(f"{word.strip()} is not followed by JSON") from None
        if word.startswith("%json"):
            self._num_schemas += 1
            refuse(self._num_schemas, MAX_SCHEMAS, "schemas in one grammar")
            check_schema(value, self._counts)
        else:
            self._counts.add_literal(text[index:end])
        return end
