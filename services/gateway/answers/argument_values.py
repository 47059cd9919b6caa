"""Arguments of tool calls by their functions' JSON schemas: which types one may have, text as JSON.

For forms of calls that write values as bare text. Schemas are strangers' input: what is no schema
says nothing.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

Schema = Mapping[str, Any]
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them back


def to_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as a JSON value of one of the types; else as a JSON string."""
    token = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(token, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or ("string" in types and not types & _types_of_value(value)):
        return json.dumps(text, ensure_ascii=False)
    return token


def ends_in_string(text: str) -> bool:
    """Whether JSON text that begins so is inside a string."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    is_inside, is_escaped = False, False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = is_inside
        elif character == '"':
            is_inside = not is_inside
    return is_inside


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _types_of_value(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    return {"object" if isinstance(value, dict) else "array"}


_MAX_DEPTH = 8  # of references and alternatives


def types_of(parameters: Schema, name: str) -> frozenset[str]:
    """The JSON types that a function's parameter may have; empty: the schema does not say."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(_types(cast(Schema, properties).get(name), parameters, _MAX_DEPTH))


def resolve(schema: object, root: Schema) -> Schema:
    """A schema in place of a reference to it; what is no schema is an empty one."""
    beside: dict[str, Any] = {}  # keywords beside the references
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return beside
        found = cast(Schema, schema)
        beside = {**found, **beside}
        reference = beside.pop("$ref", None)
        if not isinstance(reference, str):
            return beside
        target: Any = root
        for step in reference.split("/")[1:]:
            target = cast(Schema, target).get(step) if isinstance(target, Mapping) else None
        schema = cast(object, target)
    return beside


def _types(schema: object, root: Schema, depth: int) -> set[str]:
    if not depth:
        return set()
    schema = resolve(schema, root)
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in cast("list[object]", given) if isinstance(kind, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = cast("list[object]", schema.get("enum") or [schema.get("const")])
        kinds = (_types_of_value(v) if not isinstance(v, str) else {"string"} for v in values)
        return set[str]().union(*kinds)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            found = [_types(branch, root, depth - 1) for branch in cast("list[object]", branches)]
            # A branch that does not say may be anything.
            return set[str]().union(*found) if key == "allOf" or all(found) else set()
    return set()
