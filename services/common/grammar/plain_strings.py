"""JSON schemas whose bounded strings are plain: of any text of some length.

Where the character `PROBE` may come n times in a row in such a string, any n characters may come
that are no controls, quotes, backslashes and angle brackets, and no more than n. So the decoder
fills masks fast (`bounded_strings`). It looks at schemas itself; of grammars that the gateway
writes around schemas, the gateway says it.
"""

import json
import re
from typing import Any, cast

PROBE = "\ue123"  # of a private use area, so no token is such text
_BOUND = "maxLength"
_ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
        "readOnly", "writeOnly",
    )
)  # fmt: skip
# Keywords whose values hold no schema, and under which a string is of any characters.
_PLAIN = frozenset(
    (
        "type", "required", "const", "enum", _BOUND, "minLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
        "minProperties", "maxProperties",
    )
)  # fmt: skip
_SCHEMA, _SCHEMAS, _NAMED = ("items", "additionalProperties"), ("prefixItems",), (
    "properties", "$defs", "definitions",
)  # fmt: skip
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")  # what it refers to is looked at
_NO_STRING = frozenset(("null", "boolean", "integer", "number"))


def has_plain_bounds(schema: str) -> bool:
    """Whether strings are bounded in the schema and, where several forms of a value are possible,
    no bounded string is beside another string. Then each plain text of the same length may come
    within a string, or none.
    """
    if _BOUND not in schema:
        return False
    try:
        value = json.loads(schema)
        return PROBE not in json.dumps(value, ensure_ascii=False) and is_plain(value)
    except (ValueError, RecursionError):
        return False


def is_plain(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether, where a string may come, any plain text of the same length may, or none."""
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
    """Whether a value of the schema is no string, list or object."""
    if not isinstance(schema, dict):
        return False
    kind = cast("dict[str, Any]", schema).get("type")
    return isinstance(kind, str) and kind in _NO_STRING and is_plain(schema)
