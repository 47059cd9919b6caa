"""Bounds on JSON schemas: references, nesting, properties and what else takes a compiler long.

A schema is walked once, as a list of its objects and lists; references are edges among those that
something refers to. Where a reference might mean several places, it means all of them.
"""

import json
import math
from decimal import Decimal
from typing import Any, cast
from urllib.parse import unquote, urljoin

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_counts import Counts, refuse, refuse_repeats
from services.common.grammar.reference_graph import components, deepest

MAX_NESTING = 100  # the compiler's reader takes 127
MAX_CHAIN = 64  # references, one behind the other
# Objects and lists along a path through references. A stack of 8 MiB ends between 1,700 and 2,500.
MAX_LEVELS = 512
MAX_PROPERTIES = 1000  # of an object; optional ones take quadratic time: 0.1 s
MAX_ALL_PROPERTIES = 5000  # 0.3 s, 40 MiB
MAX_PATTERN_PROPERTIES = 64  # of an object: each is compared with each, 0.03 s
MAX_ALL_PATTERN_PROPERTIES = 512
# Of `multipleOf`, without zeros at the end: the least common multiple is an automaton's size.
MAX_MULTIPLE = 20_000
MAX_ALL_MULTIPLES = 50_000

# Keywords whose values are no schemas, and those whose values have schemas by name.
LITERALS = frozenset(("const", "enum", "default", "examples", "example"))
MAPS = frozenset(
    (
        "properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
        "dependencies",
    )
)  # fmt: skip
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_TRUE_OR_FALSE = -1  # what a reference leads to, a schema that leads nowhere else


def check_schema(schema: object, counts: Counts) -> None:
    """Checks a schema, as parsed JSON.

    Raises:
        InvalidGrammar: it is beyond a bound, or a reference leads nowhere.
    """
    Parts(schema).check(counts)


class Parts:
    """A schema's objects and lists, each with its place.

    Attributes:
        values: in the order of a walk; the schema itself is the first one.
    """

    def __init__(self, schema: object) -> None:
        self.values: list[Any] = [schema]
        self._parents = [0]
        self._depths = [0]
        self._is_schema = [True]  # its keys are keywords
        self._is_literal = [False]
        self._resources = [0]  # what fragments are of
        self._uris: dict[int, str] = {0: ""}  # of resources
        self._targets: dict[str, list[int]] = {}  # by URI, and anchors behind a `#`
        self._indices: dict[int, int] = {}
        self._walk()

    def _walk(self) -> None:
        index = 0
        while index < len(self.values):
            value = self.values[index]
            self._indices[id(value)] = index
            if self._is_schema[index] and isinstance(value, dict):
                self._name(index, cast("dict[str, Any]", value))
            refuse(self._depths[index], MAX_NESTING, "levels of nesting")
            named = isinstance(value, dict)
            items = cast("dict[str, Any]", value).items() if named else enumerate(value or ())
            for key, child in items:
                if isinstance(child, dict | list):
                    is_schema = self._is_schema[index] and named
                    self.values.append(child)
                    self._parents.append(index)
                    self._depths.append(self._depths[index] + 1)
                    self._is_schema.append(not (is_schema and key in MAPS))
                    self._is_literal.append(
                        self._is_literal[index] or (is_schema and key in LITERALS)
                    )
                    self._resources.append(self._resources[index])
            index += 1

    def _name(self, index: int, value: dict[str, Any]) -> None:
        for keyword in ("$id", "id"):
            uri = value.get(keyword)
            if isinstance(uri, str):
                full = _joined(self._uris[self._resources[index]], uri).removesuffix("#")
                self._resources[index] = index
                self._uris[index] = full
                self._targets.setdefault(full, []).append(index)
        for keyword in _ANCHORS:
            anchor = value.get(keyword)
            if isinstance(anchor, str):
                self._targets.setdefault(f"#{anchor}", []).append(index)

    def check(self, counts: Counts) -> None:
        """Raises InvalidGrammar where a bound is exceeded."""
        keywords = _Keywords(counts)
        least = [1.0] * len(self.values)  # items that the shortest text has
        for index, value in enumerate(self.values):
            least[index] = least[self._parents[index]]
            if self._is_schema[index] and not self._is_literal[index] and isinstance(value, dict):
                least[index] *= keywords.check(cast("dict[str, Any]", value))
                refuse_repeats(least[index])
        edges, heights = self.references()
        levels, chain = deepest(edges, heights)
        refuse(chain, MAX_CHAIN, "references one behind the other")
        refuse(levels, MAX_LEVELS, "levels of nesting along its references")
        if len(components(edges)) < len(edges) or any(
            node == target for node, found in enumerate(edges) for target, _ in found
        ):
            self._refuse_endless()

    def _refuse_endless(self) -> None:
        """Refuses a reference to a schema that only endless JSON fits."""
        finite = _Finite()
        for index, value in enumerate(self.values):
            if isinstance(value, dict):
                self._add_needs(finite, index, cast("dict[str, Any]", value))
        found = finite.solve()
        for index, value in enumerate(self.values):
            if isinstance(value, dict) and self._is_schema[index] and not self._is_literal[index]:
                value = cast("dict[str, Any]", value)
                for target in self._referred(index, value):
                    if target not in found:
                        raise InvalidGrammar(
                            f"$ref {value.get('$ref')!s:.100} leads back to itself without an end"
                        )

    def _add_needs(self, finite: "_Finite", index: int, schema: dict[str, Any]) -> None:
        """What has to have an end so that a value of the schema has one."""

        def members(keyword: str, count: int | None = None) -> list[int]:
            found = schema.get(keyword)
            items = cast("list[object]", found)[:count] if isinstance(found, list) else [found]
            return [self._indices[id(i)] for i in items if _is_object(i)]

        needs = self._referred(index, schema) + members("allOf")
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list):
                found = members(keyword)
                free = len(found) < len(cast("list[Any]", branches))  # one is `true`
                needs.append(finite.any_of([[node] for node in found] + [[]] * free))
        types = schema.get("type")
        types = cast("list[Any]", types) if isinstance(types, list) else [types]
        if not {"enum", "const"} & schema.keys() and all(t in ("object", "array") for t in types):
            forms: list[list[int]] = []
            if "object" in types:
                properties, required = schema.get("properties"), schema.get("required")
                named = cast("dict[str, Any]", properties if isinstance(properties, dict) else {})
                names = cast("list[Any]", required) if isinstance(required, list) else []
                values = [named.get(name) for name in names if isinstance(name, str)]
                forms.append([self._indices[id(v)] for v in values if _is_object(v)])
            if "array" in types:
                least = int(min(_number(schema, "minItems"), len(self.values)))
                first = members("prefixItems", least)
                forms.append(first + (members("items") if least > len(first) else []))
            needs.append(finite.any_of(forms))
        finite.all_of(index, needs)

    def references(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """The graph of what is referred to, for `deepest`; its first node is the schema."""
        found = [
            (index, target)
            for index, value in enumerate(self.values)
            if isinstance(value, dict)
            for target in self._referred(index, cast("dict[str, Any]", value))
        ]
        nodes = {index: node for node, index in enumerate(sorted({0, *(t for _, t in found)}))}
        owners = [0] * len(self.values)
        heights = [1] * len(nodes)
        edges: list[list[tuple[int, int]]] = [[] for _ in nodes]
        depths = [0] * len(self.values)
        for index, parent in enumerate(self._parents):
            owners[index], depths[index] = owners[parent], depths[parent] + 1
            if index in nodes:
                owners[index], depths[index] = nodes[index], 1
                if index:
                    edges[owners[parent]].append((nodes[index], 0))
            heights[owners[index]] = max(heights[owners[index]], depths[index])
        for index, target in found:
            edges[owners[index]].append((nodes[target], 1))
        return edges, heights

    def _referred(self, index: int, value: dict[str, Any]) -> list[int]:
        found: list[int] = []
        for keyword in _REFERENCES:
            reference = value.get(keyword)
            if isinstance(reference, str):
                targets = self._resolved(index, reference)
                if not targets and self._is_schema[index] and not self._is_literal[index]:
                    raise InvalidGrammar(
                        f"{keyword} {reference[:100]!r} refers to nothing in the schema"
                    )
                found += [target for target in targets if target != _TRUE_OR_FALSE]
        return found

    def _resolved(self, index: int, reference: str) -> list[int]:
        """Where a reference may lead; nowhere: it is wrong."""
        uri, _, fragment = reference.partition("#")
        resources = [self._resources[index], 0]
        if uri:
            full = _joined(self._uris[resources[0]], uri)
            resources = self._targets.get(full, [])
        if not fragment:
            return list(dict.fromkeys(resources))
        if not fragment.startswith("/"):
            return self._targets.get(f"#{unquote(fragment)}", [])
        steps = [
            step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:]
        ]
        found = [self._at(resource, steps) for resource in dict.fromkeys(resources)]
        return [target for target in found if target is not None]

    def _at(self, index: int, steps: list[str]) -> int | None:
        value = self.values[index]
        for step in steps:
            if isinstance(value, dict):
                value = cast("dict[str, Any]", value).get(step)
            elif isinstance(value, list) and step.isascii() and step.isdigit() and len(step) < 7:
                items = cast("list[Any]", value)
                value = items[int(step)] if int(step) < len(items) else None
            else:
                return None
        return _TRUE_OR_FALSE if isinstance(value, bool) else self._indices.get(id(value))


def _joined(base: str, uri: str) -> str:
    """A URI in a document of that base; what is none stays as it is."""
    try:
        return urljoin(base, uri)
    except ValueError:
        return uri


class _Finite:
    """Which nodes are true, given what each needs: the least solution, in linear time."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        self._others = 0

    def all_of(self, node: int, needs: list[int]) -> None:
        """The node is true if all others are."""
        self._missing[node] = len(needs)
        for need in needs:
            self._users.setdefault(need, []).append(node)

    def any_of(self, alternatives: list[list[int]]) -> int:
        """A node of its own that is true if all of one alternative are."""
        self._others -= 1
        node = self._others
        self._missing[node] = 1
        for needs in alternatives:
            self._others -= 1
            self.all_of(self._others, needs)
            self._users.setdefault(self._others, []).append(node)
        return node

    def solve(self) -> set[int]:
        """The nodes that are true."""
        left = [node for node, missing in self._missing.items() if not missing]
        found: set[int] = set()
        while left:
            node = left.pop()
            found.add(node)
            for user in self._users.get(node, ()):
                self._missing[user] -= 1
                if not self._missing[user] and user not in found:
                    left.append(user)
        return found


class _Keywords:
    """Counts what the keywords of schemas ask for."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._properties = 0
        self._pattern_properties = 0
        self._multiples = 0
        self._multiple = 1

    def check(self, schema: dict[str, Any]) -> float:
        """One schema's; returns how many items its shortest value has."""
        self._check_names(schema)
        for keyword in ("enum", "const"):
            if keyword in schema:
                value = schema[keyword]
                number = len(cast("list[Any]", value)) if isinstance(value, list) else 1
                self._counts.add_literal(json.dumps(value, ensure_ascii=False), number)
        if isinstance(pattern := schema.get("pattern"), str):
            self._counts.add_pattern(pattern)
        if isinstance(options := schema.get("x-guidance"), dict):
            for option in cast("dict[str, Any]", options).values():
                self._counts.add_pattern(option if isinstance(option, str) else "")
        if (multiple := _number(schema, "multipleOf")) > 0:
            self._add_multiple(multiple)
        self._counts.add_counted(len(schema.keys() & {"minItems", "maxItems"}))
        least = [_number(schema, name) for name in ("minItems", "minLength", "minProperties")]
        return max(1.0, *least)

    def _check_names(self, schema: dict[str, Any]) -> None:
        names: set[str] = set()
        for keyword in ("properties", "required"):
            found = schema.get(keyword)
            if isinstance(found, dict | list):
                found = cast("dict[str, Any] | list[Any]", found)
                names.update(name for name in found if isinstance(name, str))
        self._properties += len(names)
        refuse(len(names), MAX_PROPERTIES, "properties in one object")
        refuse(self._properties, MAX_ALL_PROPERTIES, "properties")
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            patterns = cast("dict[str, Any]", patterns)
            self._pattern_properties += len(patterns)
            refuse(len(patterns), MAX_PATTERN_PROPERTIES, "patternProperties in one object")
            refuse(self._pattern_properties, MAX_ALL_PATTERN_PROPERTIES, "patternProperties")
            for pattern in patterns:
                self._counts.add_pattern(pattern)

    def _add_multiple(self, multiple: float) -> None:
        digits = "".join(map(str, Decimal(str(multiple)).as_tuple().digits)).rstrip("0")
        number = int(digits or "1")
        self._multiples += number
        self._multiple = math.lcm(self._multiple, number)
        if self._multiple > MAX_MULTIPLE or self._multiples > MAX_ALL_MULTIPLES:
            raise InvalidGrammar(
                f"multipleOf {multiple} is supported up to a least common multiple of"
                f" {MAX_MULTIPLE}, without zeros at the end"
            )


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _number(schema: dict[str, Any], keyword: str) -> float:
    """A keyword's number; 0: it has none."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
