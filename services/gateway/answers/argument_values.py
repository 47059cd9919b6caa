"""Conversion of bare text into JSON values, by the JSON schemas of functions.

Some formats of calls write the values of parameters as bare text. This file finds the types that a
parameter may have and converts its text; `bare_values` writes the grammar of the same texts.
Schemas come from clients: a malformed schema allows every value, and no schema takes more than
linear time.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from urllib.parse import unquote

from services.gateway.answers.call_object import SPACE
from services.gateway.answers.json_arguments import PYTHON_WORDS, nested_of, parse_json, readable
from services.gateway.answers.schema_dialects import standard_keywords

Schema = Mapping[str, Any]
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_TYPES_OF: Mapping[type, Sequence[str]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
_MAX_DEPTH = 64  # nested references and alternatives
# Number of a schema's values that are searched for anchors, which takes about 10 ms for each call.
_MAX_SEARCHED = 20_000
_LITERALS = frozenset(("const", "enum", "default", "examples"))


@dataclass(frozen=True, slots=True)
class ParameterType:
    """Types and listed strings of a parameter.

    Attributes:
        types: JSON types that the value may have. "number" includes "integer".
        texts: strings that the schema lists in `const` or `enum`.
    """

    types: frozenset[str] = TYPES
    texts: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """True if the value is a string, so that its text is not parsed."""
        return self.types == frozenset(("string",))

    @property
    def may_be_nested(self) -> bool:
        """True if the value may be an array or object, which can contain strings."""
        return not self.types.isdisjoint(("array", "object"))


def to_json(text: str, parameter: ParameterType) -> str:
    """Returns a parameter's text as JSON of one of its types, or else as a JSON string."""
    token = text.strip(SPACE)
    token = PYTHON_WORDS.get(token, token)
    if text not in parameter.texts:
        try:
            value = parse_json(token)
        except (ValueError, RecursionError):
            if "string" not in parameter.types and (repaired := nested_of(token)):
                return repaired
        else:
            types = parameter.types
            fits = "string" not in types or not types.isdisjoint(types_of_value(value))
            if fits and not isinstance(value, str):
                return readable(token, value)
    return json.dumps(text, ensure_ascii=False)


class StringScan:
    """Scanner that finds out whether a streamed JSON value ends inside a string.

    Each character is read once.

    Attributes:
        at: number of characters that have been read.
    """

    at = 0
    _is_inside = _is_escaped = False

    def ends_in_string(self, text: str, end: int) -> bool:
        """Returns whether the value up to `end` ends inside a string without a line break.

        After a result of False the scanner is not used again.

        Args:
            text: text of the value so far.
            end: index in the text. It never decreases from call to call.
        """
        if not self.at and not text[:end].lstrip(SPACE).startswith(("{", "[")):
            return False
        for character in text[self.at : end]:
            if self._is_inside and character == "\n":
                return False
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = self._is_inside
            elif character == '"':
                self._is_inside = not self._is_inside
        self.at = end
        return self._is_inside


def types_of_value(value: object) -> frozenset[str]:
    """Returns the JSON types of a value. An integral number is an "integer" and a "number"."""
    if isinstance(value, float):
        return frozenset(("integer", "number") if value.is_integer() else ("number",))
    return frozenset(_TYPES_OF[type(value)])


class Parameters:
    """Parameters of a function, with the references of their schemas resolved.

    Attributes:
        document: the whole schema of the arguments, in which references are looked up.
        root: the same schema with its own top-level reference resolved.
    """

    def __init__(self, root: Schema) -> None:
        self.root = self._without_reference(root)
        self.document = root
        self._types: dict[int, frozenset[str]] = {}
        self._standard: dict[int, object] = {}  # by the `id` of the schema

    def schema_of(self, name: str) -> object:
        """Returns the schema of a parameter, also of one that is not in `properties`."""
        properties = named(self.root, "properties")
        if name in properties:
            return properties[name]
        # Names are not matched against patterns, so such a parameter may have any value.
        return True if named(self.root, "patternProperties") else self.additional

    @property
    def additional(self) -> object:
        """Schema of the parameters that are not in `properties`."""
        beside = self.root.get("unevaluatedProperties", True)
        return self.root.get("additionalProperties", beside)

    def type_of(self, name: str) -> ParameterType:
        """Returns the type of a parameter."""
        schema = self.schema_of(name)
        types = self.types(schema) or TYPES
        return ParameterType(types, frozenset(self.texts(schema) if "string" in types else ()))

    def types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Returns the types that values of a schema may have.

        The result may contain types that are not possible. It is empty if no value fits the schema.

        Args:
            schema: schema, which may be any JSON value.
            depth: number of references and alternatives that were followed so far.
        """
        if schema is False:
            return frozenset()
        if depth > _MAX_DEPTH:
            return TYPES
        key = id(schema)
        schema = self._read(schema)
        if not isinstance(schema, Mapping):
            return TYPES
        found = self._types.get(key)
        if found is None:
            self._types[key] = TYPES  # holds for a schema that refers to itself
            found = TYPES.intersection(*self._claims(cast(Schema, schema), depth))
            self._types[key] = found
        return found

    def texts(self, schema: object) -> set[str]:
        """Returns the strings that a schema or an alternative of the schema lists."""
        found: set[str] = set()
        for branch in self.branches(schema):
            found.update(value for value in listed_values(branch) or () if isinstance(value, str))
        return found

    def branches(self, schema: object) -> Iterable[Schema]:
        """Yields a schema, the schemas that it refers to, and their alternatives, each once."""
        seen: set[int] = set()
        left = [schema]
        while left:
            current = left.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            current = self._read(current)
            if not isinstance(current, Mapping):
                continue
            current = cast(Schema, current)
            yield current
            left += [*listed(current, "anyOf"), *listed(current, "oneOf")]
            if isinstance(reference := current.get("$ref"), str):
                left.append(self.target(reference))

    def _read(self, schema: object) -> object:
        """Returns the schema with standard keywords.

        The result is stored, so that no other object can get the `id` of a schema within it.
        """
        found = self._standard.get(id(schema))
        if found is None:
            found = self._standard[id(schema)] = standard_keywords(schema)
        return found

    def target(self, reference: str) -> object:
        """Returns the schema to which a reference points.

        Returns None if the reference points to another document or to nothing.
        """
        uri, _, fragment = reference.partition("#")
        if uri not in ("", own_id(self.document)):
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchored.get(unquote(fragment))
        target: object = self.document
        for step in steps_of(reference):
            if isinstance(target, Mapping):
                target = cast("Mapping[str, object]", target).get(step)
            elif isinstance(target, list) and step.isascii() and step.isdigit():
                items = cast("list[object]", target)
                target = items[int(step)] if len(step) < 6 and int(step) < len(items) else None
            else:
                return None
        return target

    @cached_property
    def _anchored(self) -> Mapping[str, object]:
        """Schemas by their anchors.

        The value of an anchor that occurs more than once is None. The mapping is empty if the
        document is too large to be searched.
        """
        found: dict[str, object] = {}
        left: list[object] = [self.document]
        for _ in range(_MAX_SEARCHED):
            if not left:
                return found
            current = left.pop()
            if isinstance(current, list):
                left += cast("list[object]", current)
            elif isinstance(current, Mapping):
                schema = cast(Schema, current)
                left += [value for key, value in schema.items() if key not in _LITERALS]
                name = schema.get("$anchor")
                if isinstance(name, str):
                    found[name] = None if name in found else schema
        return {}

    def _claims(self, schema: Schema, depth: int) -> Iterable[frozenset[str]]:
        given = schema.get("type")
        names = cast("list[object]", given) if isinstance(given, list) else [given]
        if all(isinstance(name, str) and name in TYPES for name in names):
            more = ("integer",) if "number" in names else ()
            yield frozenset((*cast("list[str]", names), *more))
        if (values := listed_values(schema)) is not None:
            yield frozenset[str]().union(*map(types_of_value, values))
        for key in ("anyOf", "oneOf"):
            if branches := listed(schema, key):
                found = (self.types(branch, depth + 1) for branch in branches)
                yield frozenset[str]().union(*found)
        yield from (self.types(branch, depth + 1) for branch in listed(schema, "allOf"))
        if isinstance(reference := schema.get("$ref"), str):
            yield self.types(self.target(reference), depth + 1)

    def _without_reference(self, root: Schema) -> Schema:
        """Returns the root schema with its own reference replaced by the target's keywords."""
        self.document = root
        found, beside = root, dict(root)
        for _ in range(_MAX_DEPTH):
            reference = beside.pop("$ref", None)
            target = self.target(reference) if isinstance(reference, str) else None
            if not isinstance(target, Mapping):
                break
            found = cast(Schema, target)
            beside = {**found, **beside}
        return root if found is root else beside


def own_id(schema: object) -> str:
    """Returns the URI by which a schema may refer to itself. Empty if it has none."""
    found = cast(Schema, schema).get("$id") if isinstance(schema, Mapping) else None
    return found.removesuffix("#") if isinstance(found, str) else ""


def steps_of(reference: str) -> list[str]:
    """Returns the keys of the JSON pointer in a reference's fragment."""
    steps = unquote(reference.partition("#")[2]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def listed(schema: Schema, key: str) -> list[object]:
    """Returns the list of a keyword, or an empty list if the keyword has none."""
    found = schema.get(key)
    return cast("list[object]", found) if isinstance(found, list) else []


def named(schema: Schema, key: str) -> Schema:
    """Returns the named schemas of a keyword, or an empty mapping if the keyword has none."""
    found = schema.get(key)
    return cast(Schema, found) if isinstance(found, Mapping) else {}


def listed_values(schema: Schema) -> list[object] | None:
    """Returns the values of `const` or `enum`, or None if the schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    return listed(schema, "enum") if isinstance(schema.get("enum"), list) else None
