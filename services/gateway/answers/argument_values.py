"""Arguments of tool calls by their functions' JSON schemas: which types one may have, text as JSON.

For forms of calls that write values as bare text; `bare_values` writes the grammar of what is read
here. Schemas are strangers' input: what is no schema says nothing, and no schema takes more than
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
    type(None): ("null",), bool: ("boolean",), int: ("integer", "number"), str: ("string",),
    list: ("array",), dict: ("object",),
}  # fmt: skip
_MAX_DEPTH = 64  # of references and alternatives
_MAX_SEARCHED = 20_000  # values of a schema, for anchors: some 10 ms, at each call
_LITERALS = frozenset(("const", "enum", "default", "examples"))


@dataclass(frozen=True, slots=True)
class ParameterType:
    """What a parameter's value may be.

    Attributes:
        types: JSON's; "number" includes "integer".
        texts: strings that the schema lists.
    """

    types: frozenset[str] = TYPES
    texts: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """Whether any text is a string."""
        return self.types == frozenset(("string",))

    @property
    def may_be_nested(self) -> bool:
        """Whether the value may hold strings of its own."""
        return not self.types.isdisjoint(("array", "object"))


def to_json(text: str, parameter: ParameterType) -> str:
    """A parameter's text as a JSON value of one of its types; else as a JSON string."""
    token = text.strip(SPACE)
    token = PYTHON_WORDS.get(token, token)
    if text not in parameter.texts:
        try:
            value = parse_json(token)
        except (ValueError, RecursionError):
            if "string" not in parameter.types and (mended := nested_of(token)):
                return mended
        else:
            types = parameter.types
            fits = "string" not in types or not types.isdisjoint(types_of_value(value))
            if fits and not isinstance(value, str):
                return readable(token, value)
    return json.dumps(text, ensure_ascii=False)


class StringScan:
    """Whether a value that arrives is inside a string of JSON. Each character is read once.

    Attributes:
        at: how many characters have been read.
    """

    at = 0
    _is_inside = _is_escaped = False

    def ends_in_string(self, text: str, end: int) -> bool:
        """Whether the value up to `end`, which never goes back, ends inside a string, in which no
        line ends. After a no there is no further question.
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
    """JSON's types of a value."""
    if isinstance(value, float):
        return frozenset(("integer", "number") if value.is_integer() else ("number",))
    return frozenset(_TYPES_OF[type(value)])


class Parameters:
    """A function's parameters, references resolved.

    Attributes:
        given: the schema of the arguments.
        root: the same without a reference of its own.
    """

    def __init__(self, root: Schema) -> None:
        self.root = self._without_reference(root)
        self.given = root
        self._types: dict[int, frozenset[str]] = {}
        self._standard: dict[int, object] = {}  # by the schema's id

    def schema_of(self, name: str) -> object:
        """What a parameter has to be; one that the schema does not name may be additional."""
        properties = named(self.root, "properties")
        if name in properties:
            return properties[name]
        # Names are not matched against patterns: what is of one may be any value.
        return True if named(self.root, "patternProperties") else self.additional

    @property
    def additional(self) -> object:
        """What a parameter of another name has to be."""
        beside = self.root.get("unevaluatedProperties", True)
        return self.root.get("additionalProperties", beside)

    def type_of(self, name: str) -> ParameterType:
        """What a parameter's value may be."""
        schema = self.schema_of(name)
        types = self.types(schema) or TYPES
        return ParameterType(types, frozenset(self.texts(schema) if "string" in types else ()))

    def types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """The types that values of a schema may have, or more; empty: there is no such value."""
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
            self._types[key] = TYPES  # of what refers to itself
            found = TYPES.intersection(*self._claims(cast(Schema, schema), depth))
            self._types[key] = found
        return found

    def texts(self, schema: object) -> set[str]:
        """Strings that a schema, or an alternative of it, lists."""
        found: set[str] = set()
        for branch in self.branches(schema):
            found.update(value for value in listed_values(branch) or () if isinstance(value, str))
        return found

    def branches(self, schema: object) -> Iterable[Schema]:
        """A schema, what it refers to, and their alternatives, each once."""
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
        """The schema with standard keywords. It is kept, so that no other object gets the id of a
        schema within it.
        """
        found = self._standard.get(id(schema))
        if found is None:
            found = self._standard[id(schema)] = standard_keywords(schema)
        return found

    def target(self, reference: str) -> object:
        """What a reference within the document stands for; None: nothing."""
        uri, _, fragment = reference.partition("#")
        if uri not in ("", own_id(self.given)):
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchored.get(unquote(fragment))
        target: object = self.given
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
        """Schemas by their anchors. One that several have means none of them, and so does each in a
        document that takes long to look through.
        """
        found: dict[str, object] = {}
        left: list[object] = [self.given]
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
        """The root in place of its reference."""
        self.given = root
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
    """The URI by which a schema may refer to itself; empty: it has none."""
    found = cast(Schema, schema).get("$id") if isinstance(schema, Mapping) else None
    return found.removesuffix("#") if isinstance(found, str) else ""


def steps_of(reference: str) -> list[str]:
    """The keys of a JSON pointer in a fragment."""
    steps = unquote(reference.partition("#")[2]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def listed(schema: Schema, key: str) -> list[object]:
    """A keyword's list; empty if there is none."""
    found = schema.get(key)
    return cast("list[object]", found) if isinstance(found, list) else []


def named(schema: Schema, key: str) -> Schema:
    """A keyword's schemas by name; empty if there are none."""
    found = schema.get(key)
    return cast(Schema, found) if isinstance(found, Mapping) else {}


def listed_values(schema: Schema) -> list[object] | None:
    """The values of `const` or `enum`; None: it has neither."""
    if "const" in schema:
        return [schema["const"]]
    return listed(schema, "enum") if isinstance(schema.get("enum"), list) else None
