"""Formats of JSON schemas that no standard knows: annotations, which forbid nothing.

llguidance refuses them; `grammar` takes them out and compiles the rest. Standard formats that it
cannot enforce stay, so that the schema is refused by their name.
"""

import json
from typing import Any

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
        return json.dumps(_stripped(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _stripped(part: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(part, list):
        return [_stripped(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        name: value if name in _LITERALS else _stripped(value)
        for name, value in part.items()
        if not (name == "format" and isinstance(value, str) and value not in STANDARD_FORMATS)
    }
