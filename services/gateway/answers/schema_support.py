"""What of a JSON schema an answer can be held to: the rest is left out, or refused by its place.

The decoder's library refuses a whole grammar for one keyword that it does not enforce. So that one
function's schema never takes the others along, what it would refuse is found here, before schemas
become one grammar. Nothing is compiled: a pattern is read for its syntax alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.common.grammar.schema_formats import STANDARD_FORMATS
from services.gateway.answers.argument_values import TYPES, own_id

# Keywords of the standards that the library does not enforce.
UNSUPPORTED = frozenset(
    (
        "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
        "propertyNames", "contains", "minContains", "maxContains", "uniqueItems",
        "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor",
        "$recursiveRef", "$recursiveAnchor",
    )
)  # fmt: skip
_FORMATS = frozenset(
    (
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
    )
)  # fmt: skip
# What forbids nothing; zod writes names of records so.
_IDLE = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True,
         "propertyNames": {"type": "string"}}  # fmt: skip
_IDLE_KEYWORDS = frozenset(("$dynamicAnchor", "$recursiveAnchor", "minContains", "maxContains"))
_LITERALS = frozenset(("const", "enum", "default", "examples", "example", "x-guidance"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_COUNTS = frozenset(
    ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
)
_BESIDE_REFERENCES = frozenset(
    ("$ref", "$defs", "definitions", "$schema", "$id", "$anchor", "title", "description", "default")
)
# A pattern's parts. Those of the first line no automaton has; the other named ones are understood
# alike by ECMA-262 and the library.
_PART = re.compile(
    r"""(?P<look>\(\?<?[=!])|(?P<back>\\[1-9k])|(?P<boundary>\\[bB])
    |(?P<open>\((?:\?:|\?<[A-Za-z_]\w*>|(?!\?)))|(?P<close>\))|(?P<bar>\|)
    |(?P<set>\[\^?(?:[^\[\]\\&~^-]|\\[dDwWsStnrfv]|\\[^\w\s<>]|-(?=\])|(?<=[\[^])-
        |[A-Za-z0-9]-[A-Za-z0-9])+\])
    |(?P<quantifier>(?:[*+?]|\{\d{1,6}(?:,\d{0,6})?\})\??)
    |(?P<character>\\(?:[dDwWsStnrfv]|x[0-9A-Fa-f]{2}|u(?![dD][89A-Fa-f])[0-9A-Fa-f]{4}
        |[!"\#$%&'()*+,\-./:;=?@\[\\\]^`{|}~])|[^\\\[\](){}*+?^$|])
    |(?P<start>(?<!.)\^)|(?P<end>\$\Z)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_RANGE = re.compile(r"([A-Za-z0-9])-([A-Za-z0-9])")
_NO_AUTOMATON = re.compile(
    r"\\(?:(?P<back>[1-9k])|(?P<boundary>[bB])|.)|\[\^?\]?(?:\\.|[^\]\\])*+\]"
    r"|(?P<look>\(\?<?[=!])|(?P<open>\()|(?P<close>\))|(?P<set>\[)",
    re.DOTALL,
)
_WORDS = {
    "look": "look-around", "back": "a back reference", "boundary": "a word boundary",
    "set": "a set that nothing closes",
}  # fmt: skip

Refuse = Callable[[str, str], None]


def held_to(schema: Any, refuse: Refuse, *, strict: bool) -> Any:  # noqa: ANN401
    """A copy of a schema without what cannot be enforced.

    Args:
        schema: parsed JSON, of bounded nesting.
        refuse: called with a path and what is there and cannot be enforced; it may raise.
        strict: what may or may not be supported stays, for the library to refuse; otherwise it is
            left out.
    """
    return _Reader(refuse, strict, own_id(schema)).schema(schema, "")


def pattern_fault(pattern: str) -> str:
    """What of a pattern is wrong or no automaton does; empty: nothing that is known here."""
    depth = 0
    for match in _NO_AUTOMATON.finditer(pattern):
        if match.lastgroup in _WORDS:
            return _WORDS[match.lastgroup]
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        if depth < 0:
            return "a group that nothing opens"
    return "a group that nothing closes" if depth else ""


def _is_surely_supported(pattern: str) -> bool:
    index, depth, last = 0, 0, "start"
    while index < len(pattern):
        match = _PART.match(pattern, index)
        if match is None or match.lastgroup in ("look", "back", "boundary"):
            return False
        kind = match.lastgroup or ""
        depth += (kind == "open") - (kind == "close")
        after_nothing = kind == "quantifier" and last in ("start", "open", "bar", "quantifier")
        if depth < 0 or after_nothing:
            return False
        if kind == "set" and any(low > high for low, high in _RANGE.findall(match[0])):
            return False
        last, index = kind, match.end()
    return depth == 0


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the schemas of one function or answer."""

    _refuse: Refuse
    _strict: bool
    _own_id: str

    def schema(self, schema: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """The schema, or list of schemas, without what cannot be enforced."""
        if isinstance(schema, list):
            items = enumerate(cast("list[Any]", schema))
            return [self.schema(item, f"{path}[{index}]") for index, item in items]
        if not isinstance(schema, dict):
            return schema
        found: dict[str, Any] = {}
        for keyword, value in cast("dict[str, Any]", schema).items():
            place = f"{path}.{keyword}"
            if keyword in _LITERALS:
                found[keyword] = value
            elif keyword in _MAPS and isinstance(value, dict):
                named = cast("dict[str, Any]", value).items()
                found[keyword] = {name: self.schema(v, f"{place}.{name}") for name, v in named}
            elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
                found[keyword] = int(value)
            elif not (fault := self._fault(keyword, value)):
                found[keyword] = self.schema(value, place)
            elif fault != "idle":
                self._refuse(place, fault)
        self._check_names(found, path)
        if not self._strict and "$ref" in found:
            found = {k: v for k, v in found.items() if k in _BESIDE_REFERENCES}
        return found

    def _fault(self, keyword: str, value: object) -> str:
        """What cannot be enforced; empty: nothing; `idle`: it forbids nothing."""
        if keyword in UNSUPPORTED:
            idle = keyword in _IDLE_KEYWORDS or _IDLE.get(keyword) == value
            return "idle" if idle else keyword
        if keyword == "type":
            names = cast("list[object]", value) if isinstance(value, list) else [value]
            known = all(isinstance(name, str) and name in TYPES for name in names)
            return "" if known else f"type {value!s:.100}"
        if not isinstance(value, str):
            return ""
        if keyword == "format" and value not in _FORMATS:
            return f"format {value}" if value in STANDARD_FORMATS else "idle"
        if keyword == "pattern":
            return self._pattern_fault(value)
        if keyword == "$ref" and value.partition("#")[0] not in ("", self._own_id):
            return "$ref to another document"
        if keyword == "$schema" and "json-schema.org" not in value:
            return "idle"
        return ""

    def _pattern_fault(self, pattern: str) -> str:
        if fault := pattern_fault(pattern):
            return f"a pattern with {fault}"
        known = self._strict or _is_surely_supported(pattern)
        return "" if known else "such a pattern"

    def _check_names(self, found: dict[str, Any], path: str) -> None:
        """Keywords of objects, whose support depends on each other."""
        patterns = found.get("patternProperties")
        if isinstance(patterns, dict):
            patterns = cast("dict[str, Any]", patterns)
            faults = {name: fault for name in patterns if (fault := self._pattern_fault(name))}
            for name, fault in faults.items():
                self._refuse(f"{path}.patternProperties.{name}", fault)
            if faults or (len(patterns) > 1 and not self._strict):
                # Which patterns exclude each other only the library knows.
                del found["patternProperties"]
                found["additionalProperties"] = True
        properties, required = found.get("properties"), found.get("required")
        if isinstance(properties, Mapping) and properties:
            names = cast("list[Any]", required) if isinstance(required, list) else []
            known = {name for name in names if isinstance(name, str)}
            if not cast("Mapping[str, Any]", properties).keys() <= known:
                for keyword in ("minProperties", "maxProperties"):
                    if keyword in found:
                        self._refuse(f"{path}.{keyword}", f"{keyword} beside optional properties")
                        del found[keyword]
