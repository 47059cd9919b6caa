"""Writer of the grammar of parameters whose strings are bare text and whose other values are JSON.

`tool_grammar` uses it for each parameter of such a call. A string is either one of the strings that
the schema lists, or any text up to the closing tag: patterns, formats and lengths of bare strings
are not enforced. Numbers with limits, objects and arrays are llguidance's `%json`. Free text does
not include texts that `argument_values` would convert to another type.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from services.gateway.answers.argument_values import Parameters, Schema, listed, listed_values
from services.gateway.answers.grammar_rules import GrammarRules, json_text
from services.gateway.answers.schema_place import SchemaPlace

CLOSER = "</parameter>"
_BLANKS = r"[ \t\r\n]*"
_INTEGER = "-?(?:0|[1-9][0-9]*)"
# Regular expressions of the scalar types, for schemas that allow any value of a type.
_SCALARS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
_STARTS = {"object": r"\{", "array": r"\[", "number": r"0-9\x2D", "integer": r"0-9\x2D"}
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_LEFT_OUT = frozenset(("$defs", "definitions", "$id", "$anchor", "default", "examples"))
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_MAX_DEPTH = 64


@dataclass(slots=True)
class BareValues:
    """Writer of the values of one function's parameters.

    Attributes:
        parameters: parameters of the function.
        rules: rules of the grammar, to which rules and terminals are added.
        place: place of the schema in the request. If it is not strict, the grammar allows more than
            the schema where the schema cannot be enforced.
        style: llguidance's options for JSON values.
    """

    parameters: Parameters
    rules: GrammarRules
    place: SchemaPlace
    style: Mapping[str, object]
    # Results of `_texts` and `_plain_scalars`, by the `id` of the schema.
    _found: dict[int, set[str] | None] = field(default_factory=dict[int, set[str] | None])
    _plain: dict[int, frozenset[str]] = field(default_factory=dict[int, frozenset[str]])

    def parameter(self, opener: str, schema: object, path: str) -> str | None:
        """Returns the Lark text of a parameter from its opening tag to its closing tag.

        Returns None if no value fits the schema.

        Args:
            opener: Lark text of the opening tag and a line break.
            schema: schema of the parameter.
            path: path of the schema in the request, for errors.
        """
        types = self.parameters.types(schema)
        if not types:
            return None
        texts = self._texts(schema, path) if "string" in types else set[str]()
        others = types - {"string"}
        plain = self._plain_scalars(schema) & others
        if "number" in others - plain:
            plain -= {"integer"}  # integers are written by the rule for numbers
        nested = others - plain
        if texts is None:
            if words := nested & {"null", "boolean"}:
                self.place.refuse(
                    path, f"{' and '.join(sorted(words))} of some values beside strings"
                )
                nested -= words
            values = _any_text("".join(sorted({_STARTS[kind] for kind in nested})))
        else:
            written = [_SCALARS[kind] for kind in sorted(plain)]
            values = regex("|".join([*map(escaped, sorted(texts)), *written]))
            values = values if texts or plain else ""
        tail = json.dumps(f"\n{CLOSER}\n")
        found = [self.rules.terminal(f"{opener} {values} {tail}")] if values else []
        if nested:
            found.append(f"{self.rules.terminal(opener)} {self._json(schema, nested)} {tail}")
        return f"({' | '.join(found)})" if found else None

    def _texts(self, schema: object, path: str, depth: int = 0) -> set[str] | None:
        """Returns the strings that a schema lists, or None if the schema allows more strings."""
        if not isinstance(schema, Mapping):
            return set() if schema is False else None
        if depth > _MAX_DEPTH:
            self.place.refuse(path, f"a value behind more than {_MAX_DEPTH} references")
            return None
        schema = cast(Schema, schema)
        key = id(schema)
        if key not in self._found:
            self._found[key] = None  # holds for a schema that refers to itself
            found: set[str] | None = None
            for claim in self._claims(schema, path, depth):
                if claim is not None:
                    found = claim if found is None else found & claim
            if found is None:
                for keyword in _OF_STRINGS:
                    if schema.get(keyword):
                        self.place.refuse(
                            f"{path}.{keyword}", f"{keyword} of a string without quotes"
                        )
            self._found[key] = found
        return self._found[key]

    def _claims(self, schema: Schema, path: str, depth: int) -> Iterator[set[str] | None]:
        if "string" not in self.parameters.types(schema):
            yield set()
            return
        if (values := listed_values(schema)) is not None:
            found = {value for value in values if isinstance(value, str)}
            if unwritable := [text for text in found if CLOSER in text]:
                self.place.refuse(path, CLOSER)
            yield found.difference(unwritable)
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = [
                self._texts(branch, f"{path}.{keyword}[{index}]", depth + 1)
                for index, branch in enumerate(listed(schema, keyword))
            ]
            if keyword == "allOf":
                yield from branches
            elif branches:
                some = [branch for branch in branches if branch is not None]
                union = set[str]().union(*some)
                apart = len(union) == sum(map(len, some))
                if keyword == "oneOf" and (not apart or (union and len(some) < len(branches))):
                    self.place.refuse(f"{path}.oneOf", "oneOf of strings that are not apart")
                yield union if len(some) == len(branches) else None
        if isinstance(reference := schema.get("$ref"), str):
            yield self._texts(self.parameters.target(reference), path, depth + 1)

    def _plain_scalars(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Returns scalar types of which any value is valid. Some such types may be missing."""
        if not isinstance(schema, Mapping):
            return frozenset(() if schema is False else _SCALARS)
        if depth > _MAX_DEPTH:
            return frozenset()
        schema = cast(Schema, schema)
        key = id(schema)
        if key not in self._plain:
            self._plain[key] = frozenset()  # holds for a schema that refers to itself
            if not schema.keys() & {"const", "enum", "allOf"}:
                claims = self._plain_claims(schema, depth)
                self._plain[key] = self.parameters.types(schema).intersection(_SCALARS, *claims)
        return self._plain[key]

    def _plain_claims(self, schema: Schema, depth: int) -> Iterator[frozenset[str]]:
        if schema.keys() & _LIMITS:
            yield frozenset(("null", "boolean"))
        for keyword in ("anyOf", "oneOf"):
            if branches := listed(schema, keyword):
                found = frozenset[str]().union(
                    *(self._plain_scalars(branch, depth + 1) for branch in branches)
                )
                if keyword == "oneOf":
                    types = list(map(self.parameters.types, branches))
                    found = frozenset(k for k in found if sum(k in t for t in types) == 1)
                yield found
        if isinstance(reference := schema.get("$ref"), str):
            yield self._plain_scalars(self.parameters.target(reference), depth + 1)

    def _json(self, schema: object, types: frozenset[str]) -> str:
        """Returns the name of a rule for the JSON values of a schema that have certain types."""
        left: dict[str, int] = {}  # references, and the numbers of their definitions
        given = cast(Schema, schema if isinstance(schema, Mapping) else {})
        kinds = sorted(types - {"integer"} if "number" in types else types)
        found: dict[str, Any] = {**_copied(given, left), "type": kinds}
        for keyword in ("anyOf", "oneOf"):
            if branches := listed(given, keyword):
                fitting = [b for b in branches if types & self.parameters.types(b)]
                found[keyword] = _copied(fitting, left)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(left):
            target = self.parameters.target(list(left)[len(definitions)])
            definitions[f"d{len(definitions)}"] = _copied(True if target is None else target, left)
        whole = {**found, **({"$defs": definitions} if definitions else {})}
        return self.rules.rule(json_text(whole, self.style))


def _copied(schema: object, references: dict[str, int]) -> Any:  # noqa: ANN401 - any JSON
    """Returns a copy of a schema in which references point to numbered definitions in `$defs`.

    Args:
        schema: schema, or any part of one.
        references: number of the definition of each reference. New references are added.
    """
    if isinstance(schema, list):
        return [_copied(item, references) for item in cast("list[object]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for keyword, value in cast(Schema, schema).items():
        if keyword == "$ref" and isinstance(value, str):
            references.setdefault(value, len(references))
            copy[keyword] = f"#/$defs/d{references[value]}"
        elif keyword in ("const", "enum"):
            copy[keyword] = value
        elif keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            named = cast(Schema, value).items()
            copy[keyword] = {name: _copied(each, references) for name, each in named}
        elif keyword not in _LEFT_OUT:
            copy[keyword] = _copied(value, references)
    return copy


def _any_text(starts: str) -> str:
    """Returns the expression of texts that do not contain the closing tag.

    The expression is not the complement of another expression: for each state of a complement the
    library would have to search for a text that can still follow.

    Args:
        starts: characters, as in a character class, that must not be the first after whitespace.
    """
    inner = ""
    for character in reversed(CLOSER[1:]):
        following = f"{escaped(character)}{inner}|" if inner else ""
        inner = f"(?:{following}[^<{escaped(character)}][^<]*)?"
    whole = f"/[^<]*(?:<{inner})*/"
    if not starts:
        return whole
    return rf"({whole} & /{_BLANKS}(?:[^ \t\r\n{starts}](?s:.*))?/)"


def escaped(text: str) -> str:
    """Returns a regular expression that matches exactly this text."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "_ ") else f"\\x{{{ord(c):X}}}" for c in text
    )


def regex(text: str) -> str:
    """Returns a regular expression as a Lark text, in which `//` would begin a comment."""
    return f"/(?:{text})/"
