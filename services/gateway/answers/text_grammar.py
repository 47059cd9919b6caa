"""The grammar of parameters' values in calls that write strings bare and all else as JSON.

`tool_grammar` writes each parameter of a call of this form with it. The strings that a schema takes
are a terminal: JSON Schema's keywords are unions, intersections and complements of regular
expressions. Objects, arrays and numbers with limits are the library's `%json`. A string that would
be read as another type is left out where the schema takes that type, too. No string holds the
closing tag.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from services.common.plain_strings import TEXT_PROBE
from services.common.schema_formats import STANDARD_FORMATS, strip_unknown_formats
from services.gateway.answers.argument_values import (
    PYTHON_WORDS,
    TYPES,
    Parameters,
    Schema,
    listed,
    listed_values,
    named,
    steps_of,
    types_of_value,
)
from services.gateway.answers.patterns import escaped, full_match
from services.gateway.answers.text_formats import TEXT_FORMATS

CLOSER = "</parameter>"
# Keywords of the standards that the library does not enforce.
UNSUPPORTED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames",
    "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_TEXT = "TEXT"  # the terminal of any text
_BLANKS = r"[ \t\r\n]*"
_INTEGER = "-?(?:0|[1-9][0-9]*)"
# What is written for a type without limits, of which any value is valid.
_SCALARS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
_STARTS = {"object": r"\{", "array": r"\[", "number": "[0-9-]", "integer": "[0-9-]"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_ALL = {"const", "enum", "allOf", *UNSUPPORTED}
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_NESTED = {
    "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
}  # fmt: skip
_ASSERTIONS = {
    "type", "anyOf", "oneOf", "$ref", *_OF_NUMBERS, *_OF_ALL, *_OF_STRINGS, *_OF_NESTED
}  # fmt: skip
_IN_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_NAMED = ("properties", "patternProperties")
_IN_ONE = ("items", "additionalProperties", "additionalItems")


class TextGrammar:
    """Terminals and rules of one function's parameters.

    Args:
        parameters: of the function.
        style: of the JSON, for the library.
        add: gives a rule or a terminal a name, of the given first letter.
        refuse: called with a path and what is there and cannot be enforced; it raises, or the
            grammar takes more than the schema.
    """

    def __init__(
        self,
        parameters: Parameters,
        style: Mapping[str, object],
        add: Callable[[str, str], str],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._parameters = parameters
        self._style = style
        self._add = add
        self._refuse = refuse
        self._terminals: dict[int, str | None] = {}  # by the schema's id
        self._running: set[int] = set()
        self._plain: dict[int, frozenset[str]] = {}  # likewise

    def parameter(self, opener: str, schema: object, path: str) -> str | None:
        """A parameter from its opening tag to its closing one, as a rule; None: it has no value.

        Args:
            opener: the opening tag and a line break, as a terminal.
            schema: of the value.
            path: of the schema, for refusals.
        """
        types = self._parameters.types(schema)
        if not types:
            return None
        if not isinstance(schema, Mapping | bool):
            self._refuse(path, "what is not a schema")
        schema = cast(Schema, schema) if isinstance(schema, Mapping) else {}
        text = self._text(schema, path) if "string" in types else None
        any_text = self._is_any_text(schema, types)
        if text == _TEXT and not self._asserts(schema):
            values, nested = _TEXT, frozenset[str]()
        elif self._is_list(schema):
            values, nested = self._listed(schema, types, text), frozenset[str]()
        else:
            values, nested = self._typed(schema, types, text, path)
            any_text |= text == _TEXT and not nested
        tail, written = json.dumps(f"\n{CLOSER}\n"), list[str]()
        if values:
            whole = _unclosed("" if any_text else escaped(TEXT_PROBE))
            if values != _TEXT:
                whole = f"(({values}) & {whole})"
            written.append(self._add("T", f"{opener} {whole} {tail}"))
        if nested:
            head = self._add("T", opener)
            written.append(f"{head} {self._json(schema, nested, path)} {tail}")
        return self._add("r", " | ".join(written)) if written else None

    def _typed(
        self, schema: Schema, types: frozenset[str], text: str | None, path: str
    ) -> tuple[str, frozenset[str]]:
        """What is one terminal, and the types that are JSON of many."""
        others = types - {"string"}
        scalars = self._plain_scalars(schema) & others
        if "number" in others - scalars:
            scalars -= {"integer"}  # one lexeme for both
        nested = others - scalars
        alternatives: list[str] = []
        if text is not None:
            if words := nested & {"null", "boolean"}:
                self._refuse(path, f"{' and '.join(sorted(words))} of some values beside strings")
                nested, scalars = nested - words, scalars | words
            taken = [f"(?:{_SCALARS[kind]}){_BLANKS}" for kind in sorted(scalars)]
            taken += sorted({f"{_STARTS[kind]}(?s:.*)" for kind in nested})
            if taken:
                rest = f"{text} & ~/{_BLANKS}(?:{'|'.join(taken)})/"
                starts = [_STARTS[kind] for kind in nested]
                own = sorted(
                    t
                    for t in self._parameters.texts(schema)
                    if not any(re.match(_BLANKS + start, t) for start in starts)
                )
                text = f"({rest}) | ({text} & ({_any_of(own)}))" if own else rest
            alternatives.append(f"({text})")
        if scalars:
            written = "|".join(_SCALARS[kind] for kind in sorted(scalars))
            alternatives.append(regex(written))
        return " | ".join(alternatives), nested

    def _listed(self, schema: Schema, types: frozenset[str], text: str | None) -> str:
        """The values of an enumeration."""
        own = self._parameters.texts(schema)
        others = [
            json.dumps(value, ensure_ascii=False)
            for branch in self._chain(schema)
            for value in listed_values(branch) or ()
            if not isinstance(value, str) and types & types_of_value(value)
        ]
        others += [word for word, value in PYTHON_WORDS.items() if value in others]
        found = [f"({text})"] if text is not None else []
        if others := [text for text in others if text not in own]:
            found.append(_any_of(others))
        return " | ".join(found)

    def _is_list(self, schema: Schema) -> bool:
        """Whether all values are in `enum` or `const`, with nothing beside them but the type."""
        chain = self._chain(schema)
        if sum(listed_values(found) is not None for found in chain) != 1:
            return False
        keywords = {keyword for found in chain for keyword in found.keys() & _ASSERTIONS}
        return keywords <= {"enum", "const", "type", "$ref"} and not ({"enum", "const"} <= keywords)

    def _chain(self, schema: Schema) -> list[Schema]:
        """A schema and what it refers to."""
        found: list[Schema] = []
        current: object = schema
        while isinstance(current, Mapping) and all(current is not seen for seen in found):
            found.append(cast(Schema, current))
            reference = found[-1].get("$ref")
            current = self._parameters.target(reference) if isinstance(reference, str) else None
        return found

    def _is_any_text(self, schema: Schema, types: frozenset[str]) -> bool:
        """Whether the values are all texts, of all characters, of some length."""
        keywords = {keyword for found in self._chain(schema) for keyword in found}
        asserted = keywords & _ASSERTIONS
        lengths = {"type", "$ref", "minLength", "maxLength"}
        return asserted <= {"$ref"} or (types == frozenset(("string",)) and asserted <= lengths)

    def _asserts(self, schema: Schema) -> bool:
        return any(found.keys() & (_ASSERTIONS - {"$ref"}) for found in self._chain(schema))

    # Strings

    def _text(self, schema: object, path: str) -> str | None:
        """The terminal of a schema's strings; None: it has none."""
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            if schema is not True:
                self._refuse(path, "what is not a schema")
            return _TEXT
        schema = cast(Schema, schema)
        key = id(schema)
        if key in self._running:
            self._refuse(path, "a reference to itself")
            return _TEXT
        if key not in self._terminals:
            self._running.add(key)
            self._terminals[key] = self._intersection(schema, path)
            self._running.remove(key)
        return self._terminals[key]

    def _intersection(self, schema: Schema, path: str) -> str | None:
        if len(self._running) > 64:
            self._refuse(path, "nesting so deep")
            return _TEXT
        parts: list[str] = []
        for keyword, value in schema.items():
            part = self._strings_by(keyword, value, schema, f"{path}.{keyword}")
            if part is None:
                return None
            if part != _TEXT:
                parts.append(f"({part})")
        if not parts:
            return _TEXT
        return self._add("T", " & ".join(parts))

    def _strings_by(self, keyword: str, value: Any, schema: Schema, path: str) -> str | None:  # noqa: ANN401
        """The strings that one keyword leaves, as an expression; None: no string."""
        if keyword == "type":
            names = cast("list[object]", value) if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name in TYPES for name in names):
                self._refuse(path, f"type {value!s:.100}")
                return _TEXT
            return _TEXT if "string" in names else None
        if keyword == "const":
            return self._listed_strings([value], path)
        if keyword == "enum":
            if isinstance(value, list):
                return self._listed_strings(cast("list[object]", value), path)
            self._refuse(path, "what is not a list")
        if keyword in ("minLength", "maxLength"):
            return self._bounded(keyword, value, path)
        if keyword == "pattern":
            return self._matching(value, path)
        if keyword == "format" and isinstance(value, str):
            if value in STANDARD_FORMATS and value not in TEXT_FORMATS:
                self._refuse(path, f"format {value}")
            return regex(TEXT_FORMATS[value]) if value in TEXT_FORMATS else _TEXT
        if keyword in _IN_MANY[:3] and listed(schema, keyword):
            found = [
                self._text(branch, f"{path}[{index}]")
                for index, branch in enumerate(listed(schema, keyword))
            ]
            return self._combined(keyword, found)
        if keyword == "$ref" and isinstance(value, str):
            if (target := self._parameters.target(value)) is None:
                self._refuse(path, f"a reference to {value:.100}")
                return _TEXT
            return self._text(target, "".join(f".{step}" for step in steps_of(value)))
        if keyword in ("if", "$dynamicRef", "$recursiveRef", "not"):
            self._refuse(path, keyword)
        return _TEXT

    def _combined(self, keyword: str, found: list[str | None]) -> str | None:
        """The strings of several schemas, by `anyOf`, `oneOf` or `allOf`."""
        if keyword == "anyOf" and _TEXT in found:
            return _TEXT
        parts = [f"({part})" for part in found if part is not None]
        if keyword == "allOf":
            return " & ".join(parts) if len(parts) == len(found) else None
        if keyword == "oneOf" and len(parts) > 1:
            once, twice = parts[0], list[str]()
            for part in parts[1:]:
                twice.append(f"({once} & {part})")
                once = self._add("T", f"{once} | {part}")
            return f"{once} & ~{self._add('T', ' | '.join(twice))}"
        return " | ".join(parts) or None

    def _listed_strings(self, values: list[object], path: str) -> str | None:
        texts = [value for value in values if isinstance(value, str)]
        for index, value in enumerate(values):
            if isinstance(value, str) and CLOSER in value:
                self._refuse(f"{path}[{index}]", CLOSER)
        return _any_of(texts) if texts else None

    def _bounded(self, keyword: str, value: object, path: str) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._refuse(path, "what is not a length")
            return _TEXT
        return f"/(?s:.{{{value},}})/" if keyword == "minLength" else f"/(?s:.{{0,{value}}})/"

    def _matching(self, value: object, path: str) -> str:
        try:
            if not isinstance(value, str):
                raise ValueError("what is not a pattern")
            return regex(full_match(value))
        except ValueError as error:
            self._refuse(path, f"a pattern with {error}")
            return _TEXT

    # JSON

    def _plain_scalars(self, schema: object) -> frozenset[str]:
        """Scalar types of which any value is valid; perhaps not all such types."""
        if not isinstance(schema, Mapping):
            return frozenset(() if schema is False else _SCALARS)
        schema = cast(Schema, schema)
        key = id(schema)
        if key not in self._plain:
            self._plain[key] = frozenset()  # of what refers to itself
            if not schema.keys() & _OF_ALL:
                claims = self._plain_claims(schema)
                self._plain[key] = self._parameters.types(schema).intersection(_SCALARS, *claims)
        return self._plain[key]

    def _plain_claims(self, schema: Schema) -> Iterator[frozenset[str]]:
        if schema.keys() & _OF_NUMBERS:
            yield frozenset(("null", "boolean"))
        for keyword in ("anyOf", "oneOf"):
            if branches := listed(schema, keyword):
                found = frozenset[str]().union(*map(self._plain_scalars, branches))
                if keyword == "oneOf":
                    types = list(map(self._parameters.types, branches))
                    found = frozenset(k for k in found if sum(k in t for t in types) == 1)
                yield found
        if isinstance(reference := schema.get("$ref"), str):
            yield self._plain_scalars(self._parameters.target(reference))

    def _json(self, schema: Schema, types: frozenset[str], path: str) -> str:
        """A value of those types, in the library's grammar."""
        self._refuse_unsupported(schema, path)
        kinds = sorted(types - {"integer"} if "number" in types else types)
        left: dict[str, int] = {}  # references still to be written
        found: dict[str, Any] = {**_copied(schema, left), "type": kinds}
        for keyword in ("anyOf", "oneOf"):
            if branches := listed(schema, keyword):
                fitting = [b for b in branches if types & self._parameters.types(b)]
                found[keyword] = _copied(fitting, left)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(left):
            reference = list(left)[len(definitions)]
            target = self._parameters.target(reference)
            if target is None:
                self._refuse(path, f"a reference to {reference:.100}")
            definitions[f"d{len(definitions)}"] = _copied(True if target is None else target, left)
        return self._add("r", written_json({**found, "$defs": definitions}, self._style))

    def _refuse_unsupported(self, schema: object, path: str) -> None:
        if (found := unsupported(self._parameters, schema, path)) is not None:
            self._refuse(*found)


def _copied(schema: object, references: dict[str, int]) -> Any:  # noqa: ANN401 - any JSON
    """A copy whose references are to `$defs`, by their place in `references`, to which they go."""
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
        elif keyword not in ("$defs", "definitions", "$id", "default", "examples"):
            copy[keyword] = _copied(value, references)
    return copy


def unsupported(parameters: Parameters, schema: object, path: str) -> tuple[str, str] | None:
    """Path and name of a keyword that the library does not enforce, in a schema or what it uses."""
    seen: set[int] = set()
    left = [(schema, path)]
    while left:
        current, path = left.pop()
        if not isinstance(current, Mapping) or id(cast(Schema, current)) in seen:
            continue
        current = cast(Schema, current)
        seen.add(id(current))
        for keyword in UNSUPPORTED:
            if keyword in current:
                return f"{path}.{keyword}", keyword
        for keyword in _IN_MANY:
            numbered = enumerate(listed(current, keyword))
            left += [(branch, f"{path}.{keyword}[{index}]") for index, branch in numbered]
        for keyword in _IN_NAMED:
            branches = named(current, keyword).items()
            left += [(branch, f"{path}.{keyword}.{name}") for name, branch in branches]
        left += [(current.get(keyword), f"{path}.{keyword}") for keyword in _IN_ONE]
        if isinstance(reference := current.get("$ref"), str):
            steps = steps_of(reference)
            left.append((parameters.target(reference), "".join(f".{step}" for step in steps)))
    return None


def written_json(schema: object, style: Mapping[str, object]) -> str:
    """A value of the schema, in Lark."""
    if isinstance(schema, dict):
        schema = {**strip_unknown_formats(cast("dict[str, Any]", schema)), "x-guidance": style}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _unclosed(without: str) -> str:
    """Texts that do not hold the closing tag.

    Not as a complement: for each state within one, the library would have to search for a text that
    can still come, through all lengths that a string may have.

    Args:
        without: other characters that they do not hold, as in a class.
    """
    inner = ""
    for character in reversed(CLOSER[1:]):
        following = f"{escaped(character)}{inner}|" if inner else ""
        inner = f"(?:{following}[^<{escaped(character)}{without}][^<{without}]*)?"
    return f"/[^<{without}]*(?:<{inner})*/"


def _any_of(texts: list[str]) -> str:
    return regex("|".join(map(escaped, texts)))


def regex(text: str) -> str:
    """A regular expression in Lark, where two slashes begin a comment."""
    return f"/(?:{text})/"
