"""What of a JSON schema an answer can be held to: the rest is left out, or refused by its place.

The decoder's library refuses a whole grammar for one keyword that it does not enforce. So that one
function's schema never takes the others along, what it would refuse is found here, before schemas
become one grammar. Nothing is compiled: a pattern is read for its syntax alone.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.common.grammar.schema_formats import STANDARD_FORMATS
from services.gateway.answers.argument_values import (
    TYPES,
    Parameters,
    Schema,
    listed_values,
    named,
    own_id,
    types_of_value,
)
from services.gateway.answers.schema_numbers import (
    LOWER_BOUNDS,
    UPPER_BOUNDS,
    allows_all,
    allows_zero,
    inexact_value,
    is_exact_bound,
    is_exact_multiple,
    whole,
)
from services.gateway.answers.schema_place import SchemaPlace

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
_LITERALS = frozenset(("const", "enum", "x-guidance"))
# What says nothing of values.
_ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "$comment", "deprecated",
        "readOnly", "writeOnly",
    )
)  # fmt: skip
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
_LIMITS = (
    ("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)  # fmt: skip
# Keywords that may name further properties than those in `properties`.
_NAMING = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))


def held_to(schema: Any, place: SchemaPlace) -> Any:  # noqa: ANN401
    """A copy of a schema without what cannot be enforced. Where `place` is strict, what may or may
    not be supported stays, for the library to refuse; elsewhere it is left out.

    Args:
        schema: a standard schema, of bounded nesting.
    """
    return _Reader(place, own_id(schema), Parameters(schema)).schema(schema, "")


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

    _place: SchemaPlace
    _own_id: str
    _parameters: Parameters

    def schema(self, schema: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """The schema, or list of schemas, without what cannot be enforced."""
        if isinstance(schema, list):
            items = enumerate(cast("list[Any]", schema))
            return [self.schema(item, f"{path}[{index}]") for index, item in items]
        if not isinstance(schema, dict):
            # Of an unknown keyword; the library reads no number beyond a double.
            is_number = isinstance(schema, int) and abs(schema) > sys.float_info.max
            return None if is_number else schema
        found: dict[str, Any] = {}
        given = cast("dict[str, Any]", schema)
        for keyword, value in given.items():
            place = f"{path}.{keyword}"
            if keyword in _ANNOTATIONS:
                continue
            if keyword in _LITERALS:
                self._check_numbers(keyword, value, place)
                found[keyword] = whole(value)
            elif keyword in _MAPS and isinstance(value, dict):
                members = cast("dict[str, Any]", value).items()
                found[keyword] = {name: self.schema(v, f"{place}.{name}") for name, v in members}
            elif keyword in LOWER_BOUNDS or keyword in UPPER_BOUNDS:
                found[keyword] = value
            elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
                found[keyword] = int(value)
            elif not (fault := self._fault(keyword, value)):
                found[keyword] = self.schema(value, place)
            elif fault != "idle":
                self._place.refuse(place, fault)
        self._check_bounds(found, path)
        self._check_values(found, path)
        self._check_names(found, path)
        self._check_required(found, named(given, "properties"), path)
        if not self._place.strict and "$ref" in found:
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
        if keyword == "multipleOf":
            return "" if is_exact_multiple(cast("float", value)) else f"multipleOf {value!r:.60}"
        if not isinstance(value, str):
            return ""
        if keyword == "format" and value not in _FORMATS:
            return f"format {value}" if value in STANDARD_FORMATS else "idle"
        if keyword == "pattern":
            return self._pattern_fault(value)
        if keyword == "$ref" and value.partition("#")[0] not in ("", self._own_id):
            return "$ref to another document"
        return ""

    def _pattern_fault(self, pattern: str) -> str:
        if fault := pattern_fault(pattern):
            return f"a pattern with {fault}"
        known = self._place.strict or _is_surely_supported(pattern)
        return "" if known else "such a pattern"

    def _check_numbers(self, keyword: str, value: object, path: str) -> None:
        """Refuses a constant that would be another number in answers."""
        if keyword in ("const", "enum") and (number := inexact_value(value)) is not None:
            self._place.reject(path, f"{keyword} {number!r:.60} cannot be held exactly")

    def _check_bounds(self, found: dict[str, Any], path: str) -> None:
        """Leaves out the limits of a type, such as those of 64-bit integers, that are not held
        exactly, and refuses other such bounds.
        """
        types = found.get("type", "number")
        names = cast("list[str]", types) if isinstance(types, list) else [types]
        is_idle = not {"integer", "number"} & set(names)
        for keyword in (LOWER_BOUNDS | UPPER_BOUNDS) & found.keys():
            value, place = found[keyword], f"{path}.{keyword}"
            if is_exact_bound(keyword, value, found.get("type")):
                found[keyword] = whole(value)
                continue
            if not (is_idle or allows_all(keyword, value)):
                what = f"{keyword} {value!r:.60}"
                if not allows_zero(keyword, value):
                    self._place.reject(place, f"{what} cannot be held exactly")
                self._place.refuse(place, what)
            del found[keyword]

    def _check_values(self, found: dict[str, Any], path: str) -> None:
        """Keywords that no value fits: the library would refuse them without their place."""
        names = found.get("type")
        values = listed_values(found)
        if values and names is not None:
            kinds = set(cast("list[str]", names) if isinstance(names, list) else [names])
            if not any(kinds & types_of_value(value) for value in values):
                keyword = "const" if "const" in found else "enum"
                self._place.refuse(f"{path}.{keyword}", f"{keyword} without a value of its type")
                del found[keyword]
        for least, most in _LIMITS:
            if least in found and most in found and found[least] > found[most]:
                self._place.refuse(f"{path}.{least}", f"{least} above {most}")
                del found[least], found[most]

    def _check_required(self, found: dict[str, Any], properties: Schema, path: str) -> None:
        """Leaves out required properties that the schema forbids.

        Args:
            properties: those of the given schema.
        """
        required = found.get("required")
        if not isinstance(required, list):
            return
        is_closed = found.get("additionalProperties") is False and not _NAMING & found.keys()
        kept: list[Any] = []
        for index, name in enumerate(cast("list[Any]", required)):
            if name not in properties and is_closed:
                what = "a required property that is not in properties"
                self._place.refuse(f"{path}.required[{index}]", what)
            elif name in properties and not self._parameters.types(properties[name]):
                what = "a required property without a value"
                self._place.refuse(f"{path}.properties.{name}", what)
            else:
                kept.append(name)
        found["required"] = kept
        most = found.get("maxProperties")
        if isinstance(most, int) and most < len(kept):
            self._place.refuse(f"{path}.maxProperties", "maxProperties below what is required")
            del found["maxProperties"]

    def _check_names(self, found: dict[str, Any], path: str) -> None:
        """Keywords of objects, whose support depends on each other."""
        patterns = found.get("patternProperties")
        if isinstance(patterns, dict):
            patterns = cast("dict[str, Any]", patterns)
            faults = {name: fault for name in patterns if (fault := self._pattern_fault(name))}
            for name, fault in faults.items():
                self._place.refuse(f"{path}.patternProperties.{name}", fault)
            if faults or (len(patterns) > 1 and not self._place.strict):
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
                        self._place.refuse(
                            f"{path}.{keyword}", f"{keyword} beside optional properties"
                        )
                        del found[keyword]
