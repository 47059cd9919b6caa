"""Reduction of JSON schemas to the keywords that llguidance enforces.

The library refuses a whole grammar because of a single unsupported keyword. Such keywords
are found here, before the schemas of all functions become one grammar, so that one function's
schema does not prevent the use of the others. A keyword that is not supported is refused by its
place in the request, or left out if the client was promised nothing. Nothing is compiled: of a
pattern only the syntax is checked.
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
        "not",
        "if",
        "then",
        "else",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    )
)
_FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    )
)
# Values of unsupported keywords that forbid nothing. zod writes such `propertyNames` for records.
_IDLE = {
    "uniqueItems": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "propertyNames": {"type": "string"},
}
_IDLE_KEYWORDS = frozenset(("$dynamicAnchor", "$recursiveAnchor", "minContains", "maxContains"))
_LITERALS = frozenset(("const", "enum", "x-guidance"))
# Keywords that do not restrict values.
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    )
)
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_COUNTS = frozenset(
    ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
)
_NUMBERS = _COUNTS | LOWER_BOUNDS | UPPER_BOUNDS | {"multipleOf"}
_BESIDE_REFERENCES = frozenset(
    ("$ref", "$defs", "definitions", "$schema", "$id", "$anchor", "title", "description", "default")
)
# The parts of a pattern. No automaton has the parts of the first line. ECMA-262 and the library
# agree on the meaning of the other parts.
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
    "look": "look-around",
    "back": "a back reference",
    "boundary": "a word boundary",
    "set": "a set that is not closed",
}
_LIMITS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
# Keywords that may name further properties than those in `properties`.
_NAMING = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))


def held_to(schema: Any, place: SchemaPlace) -> Any:  # noqa: ANN401
    """Returns a copy of a schema without the keywords that cannot be enforced.

    A keyword that may not be supported stays if `place` is strict, so that the library decides, and
    is left out otherwise.

    Args:
        schema: standard schema of bounded nesting, see `schema_dialects`.
        place: place of the schema in the request.

    Raises:
        InvalidGrammar: the place is strict, and a keyword is not supported; or a reference leads to
            nothing.
    """
    found = _Reader(place, own_id(schema), Parameters(schema)).schema(schema, "")
    _check_references(found, place)
    return found


def _check_references(schema: object, place: SchemaPlace) -> None:
    """Refuses references to nothing, and references that lead back to themselves. The library
    would refuse them, too, but could not name the function and the place. References by anchors are
    left to the library, as are those within a part that has a URI of its own.
    """
    if not isinstance(schema, Mapping):
        return
    parameters, left = Parameters(cast("Schema", schema)), [(cast("object", schema), "")]
    ending: set[int] = set()
    while left:
        part, path = left.pop()
        if isinstance(part, list):
            items = enumerate(cast("list[object]", part))
            left += [(item, f"{path}[{index}]") for index, item in items]
        if not isinstance(part, Mapping):
            continue
        keywords = cast("Schema", part)
        if path and isinstance(keywords.get("$id"), str):
            continue
        reference = keywords.get("$ref")
        if isinstance(reference, str) and reference.partition("#")[2][:1] in ("", "/"):
            what = f"$ref {reference:.100}"
            if parameters.target(reference) is None:
                place.reject(f"{path}.$ref", f"{what} refers to nothing in the schema")
            if _leads_back(parameters, keywords, ending):
                place.reject(f"{path}.$ref", f"{what} leads back to itself without an end")
        for keyword, value in keywords.items():
            if keyword in _MAPS and isinstance(value, Mapping):
                members = cast("Schema", value).items()
                left += [(member, f"{path}.{keyword}.{name}") for name, member in members]
            elif keyword not in _LITERALS:
                left.append((value, f"{path}.{keyword}"))


def _leads_back(parameters: Parameters, part: object, ending: set[int]) -> bool:
    """Returns whether the references from a part lead to one of them again.

    Args:
        parameters: schema in which references are looked up.
        part: schema with a reference.
        ending: identities of schemas from which the references end. Schemas are added.
    """
    seen: set[int] = set()
    while isinstance(part, Mapping) and id(cast("object", part)) not in ending:
        reference = cast("Schema", part).get("$ref")
        if not isinstance(reference, str):
            break
        if id(cast("object", part)) in seen:
            return True
        seen.add(id(cast("object", part)))
        part = parameters.target(reference)
    ending |= seen
    return False


def pattern_fault(pattern: str) -> str:
    """Returns a noun phrase that names the fault of a pattern, or an empty text if none is known.

    A fault is malformed syntax, or a construct that no automaton can match.
    """
    depth = 0
    for match in _NO_AUTOMATON.finditer(pattern):
        if match.lastgroup in _WORDS:
            return _WORDS[match.lastgroup]
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        if depth < 0:
            return "a group that is not opened"
    return "a group that is not closed" if depth else ""


def _is_surely_supported(pattern: str) -> bool:
    """Returns whether a pattern consists only of parts that the library is known to support."""
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
    """Reader of the schemas of one function or answer."""

    _place: SchemaPlace
    _own_id: str
    _parameters: Parameters

    def schema(self, schema: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Returns a schema, or list of schemas, without the keywords that cannot be enforced."""
        if isinstance(schema, list):
            items = enumerate(cast("list[Any]", schema))
            return [self.schema(item, f"{path}[{index}]") for index, item in items]
        if not isinstance(schema, dict):
            # The value of an unknown keyword. The library refuses numbers beyond a double's range.
            is_number = isinstance(schema, int) and abs(schema) > sys.float_info.max
            return None if is_number else schema
        found: dict[str, Any] = {}
        given = cast("dict[str, Any]", schema)
        for keyword, value in given.items():
            place = f"{path}.{keyword}"
            if keyword in _ANNOTATIONS:
                continue
            if keyword in _NUMBERS and not _is_number(value):
                # Values elsewhere were corrected before (`schema_dialects`). This schema is the
                # value of an unknown keyword, which a reference may still name.
                self._place.refuse(place, f"{keyword} without a number")
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
        """Returns a noun phrase that names what cannot be enforced.

        The result is empty if the keyword can be enforced, and `idle` if it forbids nothing.
        """
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
        """Refuses a constant that the library would replace by another number in answers."""
        if keyword in ("const", "enum") and (number := inexact_value(value)) is not None:
            self._place.reject(path, f"{keyword} {number!r:.60} cannot be represented exactly")

    def _check_bounds(self, found: dict[str, Any], path: str) -> None:
        """Leaves out or refuses the bounds that the library does not represent exactly.

        A bound that is the limit of a type, such as that of 64-bit integers, is left out.
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
                    self._place.reject(place, f"{what} cannot be represented exactly")
                self._place.refuse(place, what)
            del found[keyword]

    def _check_values(self, found: dict[str, Any], path: str) -> None:
        """Refuses keywords that no value fits, since the library would not name their place."""
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
            found: reduced schema, which is changed.
            properties: properties of the original schema.
            path: path of the schema.
        """
        required = found.get("required")
        if not isinstance(required, list):
            return
        is_closed = found.get("additionalProperties") is False and not _NAMING & found.keys()
        names: list[Any] = []
        for index, name in enumerate(cast("list[Any]", required)):
            if not isinstance(name, str):
                self._place.refuse(f"{path}.required[{index}]", "a name that is not a string")
            elif name not in properties and is_closed:
                what = "a required property that is not in properties"
                self._place.refuse(f"{path}.required[{index}]", what)
            elif name in properties and not self._parameters.types(properties[name]):
                what = "a required property without a value"
                self._place.refuse(f"{path}.properties.{name}", what)
            else:
                names.append(name)
        found["required"] = names
        most = found.get("maxProperties")
        if isinstance(most, int) and most < len(names):
            self._place.refuse(f"{path}.maxProperties", "maxProperties below what is required")
            del found["maxProperties"]

    def _check_names(self, found: dict[str, Any], path: str) -> None:
        """Leaves out keywords of objects that the library does not support together."""
        patterns = found.get("patternProperties")
        if isinstance(patterns, dict):
            patterns = cast("dict[str, Any]", patterns)
            faults = {name: fault for name in patterns if (fault := self._pattern_fault(name))}
            for name, fault in faults.items():
                self._place.refuse(f"{path}.patternProperties.{name}", fault)
            if faults or (len(patterns) > 1 and not self._place.strict):
                # Only the library knows which patterns exclude each other.
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
