"""Formats of JSON schemas that no standard knows: annotations, which forbid nothing.

llguidance refuses them; the decoder takes them out and compiles the rest, and the gateway takes
them out of schemas that it puts into a grammar. Standard formats that it
cannot enforce stay, so that the schema is refused by their name.
"""

import json
from typing import Any, cast

# Of the drafts from 4 on.
STANDARD_FORMATS = frozenset(
    (
        "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4",
        "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time",
        "uri", "uri-reference", "uri-template", "uuid",
    )
)  # fmt: skip
# Values, which are no schemas.
_LITERALS = frozenset(("const", "enum", "default", "examples", "example"))


def without_unknown_formats(schema: str) -> str:
    """The same schema, which the same values validate against.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.dumps(strip_unknown_formats(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def strip_unknown_formats(part: Any) -> Any:  # noqa: ANN401 - any JSON
    """A schema as JSON values, without unknown formats."""
    if isinstance(part, list):
        return [strip_unknown_formats(item) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    return {
        name: value if name in _LITERALS else strip_unknown_formats(value)
        for name, value in cast("dict[str, Any]", part).items()
        if not (name == "format" and isinstance(value, str) and value not in STANDARD_FORMATS)
    }
