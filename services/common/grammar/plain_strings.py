"""Recognizes JSON schemas whose bounded strings are plain, which means any text of some length.

If the character `PROBE` may occur n times in a row in such a string, any n characters may occur,
except control characters, quotes, backslashes and angle brackets, and not more than n. The decoder
uses that to fill token masks fast (`bounded_strings`). The decoder checks schemas itself. For a
grammar that contains schemas, the gateway checks them and tells the decoder.
"""

import json
import re
from typing import Any, cast

PROBE = "\ue123"  # a private use character, which no token contains
_BOUND = "maxLength"
_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly"),
    )
)
# Keywords whose values contain no schema, and which do not restrict the characters of a string.
_PLAIN = frozenset(
    (
        *("type", "required", "const", "enum", _BOUND, "minLength", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    )
)
# Keywords whose values are a schema, a list of schemas, and schemas by name.
_SCHEMA = ("items", "additionalProperties")
_SCHEMAS = ("prefixItems",)
_NAMED = ("properties", "$defs", "definitions")
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")  # the target is checked in its place
_NO_STRING = frozenset(("null", "boolean", "integer", "number"))


def has_plain_bounds(schema: str) -> bool:
    """Returns whether a schema has bounded strings, and all its bounded strings are plain.

    A bounded string is not plain if the value may also be another string: then plain texts of the
    same length need not all be allowed.

    Args:
        schema: the schema as JSON text.
    """
    if _BOUND not in schema:
        return False
    try:
        value = json.loads(schema)
        return PROBE not in json.dumps(value, ensure_ascii=False) and is_plain(value)
    except (ValueError, RecursionError):
        return False


def is_plain(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    """Returns whether all plain texts of the same length are allowed, or none, wherever the schema
    allows a string.
    """
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    schema, parts = cast("dict[str, Any]", schema), list[Any]()
    for name, value in schema.items():
        if name in _ANNOTATIONS or name in _PLAIN:
            continue
        if name == "$ref" and isinstance(value, str) and _REFERENCE.fullmatch(value):
            continue
        if name in _SCHEMA:
            parts.append(value)
        elif name in _SCHEMAS and isinstance(value, list):
            parts += cast("list[Any]", value)
        elif name in _NAMED and isinstance(value, dict):
            parts += cast("dict[str, Any]", value).values()
        elif name in ("anyOf", "oneOf") and isinstance(value, list):
            others = [item for item in cast("list[Any]", value) if not _is_scalar(item)]
            if len(others) > 1 or len(schema) > 1 + sum(key in _ANNOTATIONS for key in schema):
                return False
            parts += others
        else:
            return False
    return all(map(is_plain, parts))


def _is_scalar(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    """Returns whether no value of the schema is a string, list or object."""
    if not isinstance(schema, dict):
        return False
    kind = cast("dict[str, Any]", schema).get("type")
    return isinstance(kind, str) and kind in _NO_STRING and is_plain(schema)
