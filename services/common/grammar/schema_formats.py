"""Formats of JSON schemas that no standard knows: annotations, which forbid nothing.

llguidance refuses them; the decoder takes them out and compiles the rest, and the gateway takes
them out of schemas that it puts into a grammar. Standard formats that it
cannot enforce stay, so that the schema is refused by their name.
"""

import json
from typing import Any, cast

from services.common.grammar.schema_bounds import LITERALS, MAPS

# Of the drafts from 4 on.
STANDARD_FORMATS = frozenset(
    (
        "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4",
        "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time",
        "uri", "uri-reference", "uri-template", "uuid",
    )
)  # fmt: skip


def without_unknown_formats(schema: str) -> str:
    """The same schema, which the same values validate against.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.dumps(_stripped(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _stripped(part: Any, *, is_map: bool = False) -> Any:  # noqa: ANN401 - any JSON
    """A schema without unknown formats; `is_map`: its keys are names of schemas, not keywords."""
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
