"""Removes formats from JSON schemas that no standard defines, and that are annotations therefore.

llguidance refuses unknown formats. The decoder removes such formats and compiles the rest of the
schema, and the gateway removes them from the schemas within its grammars. Standard formats that
llguidance cannot enforce stay, so that the schema is refused with the name of the format.
"""

import json
from typing import Any, cast

# Keywords whose values are no schemas, and keywords whose values are schemas by name.
LITERALS = frozenset(("const", "enum", "default", "examples", "example"))
MAPS = frozenset(
    (
        "properties",
        "patternProperties",
        "$defs",
        "definitions",
        "dependentSchemas",
        "dependencies",
    )
)
# Formats of JSON Schema's drafts from 4 on.
STANDARD_FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"),
        *("ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
        *("time", "uri", "uri-reference", "uri-template", "uuid"),
    )
)


def without_unknown_formats(schema: str) -> str:
    """Returns a schema without unknown formats. The same values are valid under both schemas.

    Raises:
        ValueError: the schema is not JSON, or is nested too deeply.
    """
    try:
        return json.dumps(_stripped(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _stripped(part: Any, *, is_map: bool = False) -> Any:  # noqa: ANN401 - any JSON
    """Returns a part of a schema without unknown formats.

    Args:
        part: the parsed JSON.
        is_map: True if the keys of the part are names of schemas instead of keywords.
    """
    if isinstance(part, list):
        return [_stripped(item) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    items = cast("dict[str, Any]", part).items()
    if is_map:
        return {name: _stripped(value) for name, value in items}
    return {
        name: value if name in LITERALS else _stripped(value, is_map=name in MAPS)
        for name, value in items
        if not (name == "format" and isinstance(value, str) and value not in STANDARD_FORMATS)
    }
