"""Describes what is large in a grammar, for the error if it takes too much to compile."""

import json
from collections import Counter
from typing import Any, cast

from services.common.grammar.schema_formats import LITERALS, MAPS
from services.decoder.masks.grammar import GrammarSource

_DECODER = json.JSONDecoder()
_NUM_NAMES = 3
_ALTERNATIVES = frozenset(("anyOf", "oneOf", "allOf"))
_COUNTED = frozenset(("minItems", "maxItems", "minLength", "maxLength"))


class _Schema:
    """The sizes of a schema. A part that is no schema, such as an unknown keyword's value, is
    counted like one.

    Attributes:
        counts: number of things of each kind, by their name in the plural.
        names: first names of properties, by which a client can tell the schema from others.
        multiple: largest `multipleOf`.
    """

    def __init__(self, schema: object) -> None:
        self.counts: Counter[str] = Counter()
        self.names: list[str] = []
        self.multiple: float = 0
        left = [schema]
        while left:
            part = left.pop()
            if isinstance(part, list):
                left += cast("list[object]", part)
            elif isinstance(part, dict):
                left += self._read(cast("dict[str, Any]", part))

    def _read(self, schema: dict[str, Any]) -> list[object]:
        """Counts the keywords of a schema, and returns its parts."""
        parts: list[object] = []
        for keyword, value in schema.items():
            size = len(cast("list[Any]", value)) if isinstance(value, list | dict | str) else 1
            if keyword == "properties" and isinstance(value, dict):
                self.counts["properties"] += size
                self.names += list(cast("dict[str, Any]", value))[:_NUM_NAMES]
            elif keyword == "patternProperties":
                self.counts["patternProperties"] += size
            elif keyword == "enum":
                self.counts["values of enumerations"] += size
            elif keyword in _ALTERNATIVES:
                self.counts["alternatives"] += size
            elif keyword == "$ref":
                self.counts["references"] += 1
            elif keyword == "pattern":
                self.counts["characters of patterns"] += size
            elif keyword in _COUNTED:
                self.counts["limits of lengths"] += 1
            elif keyword == "multipleOf" and isinstance(value, int | float):
                self.multiple = max(self.multiple, value)
            if keyword in MAPS and isinstance(value, dict):
                parts += cast("dict[str, Any]", value).values()
            elif keyword not in LITERALS:
                parts.append(value)
        return parts

    def __str__(self) -> str:
        sizes = [f"{count:,} {what}" for what, count in self.counts.most_common()]
        sizes += [f"multipleOf {self.multiple:g}"] if self.multiple else []
        return ", ".join(sizes) or "no keyword that is known to be costly"


def described(source: GrammarSource) -> str:
    """Describes the size of a grammar, as the rest of a sentence that begins with "it". Takes time
    linear in the text, and never fails.
    """
    size = f"has {len(source.text):,} characters"
    try:
        schemas = [_Schema(value) for value in _schemas_of(source)]
    except (ValueError, RecursionError):
        return size
    if source.kind == "grammar":
        size += f" and {source.text.count(chr(10)) + 1:,} lines"
    if not schemas:
        return size
    largest = max(schemas, key=lambda schema: schema.counts.total())
    if len(schemas) == 1:
        return f"{size}, with {largest}"
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in largest.names[:_NUM_NAMES])
    named = f" (properties {names:.100}, …)" if names else ""
    return f"{size} and {len(schemas):,} schemas, of which the largest{named} has {largest}"


def _schemas_of(source: GrammarSource) -> list[object]:
    """Returns the schemas of a grammar as parsed JSON.

    Raises:
        ValueError: a schema is not JSON.
        RecursionError: a schema is nested too deeply.
    """
    if source.kind == "json_schema":
        return [_DECODER.decode(source.text)]
    if source.kind != "grammar":
        return []
    found: list[object] = []
    index = source.text.find("%json")
    while index >= 0:
        begin = source.text.find("{", index)
        if begin < 0:
            break
        value, end = _DECODER.raw_decode(source.text, begin)
        found.append(value)
        index = source.text.find("%json", end)
    return found
