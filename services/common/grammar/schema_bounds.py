"""Bounds on JSON schemas: references, nesting, properties and what else takes a compiler long.

A schema is walked once, as a list of its objects and lists; references are edges among those that
something refers to. Where a reference might mean several places, it means all of them.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
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
    _Parts(schema).check(counts)


@dataclass(slots=True)
class _Part:
    """An object or a list of a schema.

    Attributes:
        parent: index of what it is in.
        is_schema: its keys are keywords.
        is_literal: it is in a value that is no schema.
        resource: index of what its fragments are of.
    """

    value: Any
    parent: int = 0
    depth: int = 0
    is_schema: bool = True
    is_literal: bool = False
    resource: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        """Of a schema; empty: it is none."""
        return _object(self.value) if self.is_schema and not self.is_literal else {}


class _Parts:
    """A schema's objects and lists in the order of a walk; the schema itself is the first one."""

    def __init__(self, schema: object) -> None:
        self._parts = [_Part(schema)]
        self._uris: dict[int, str] = {0: ""}  # of resources
        self._targets: dict[str, list[int]] = {}  # by URI, and anchors behind a `#`
        self._indices: dict[int, int] = {}  # by id of a value
        for index, part in enumerate(self._parts):  # to which children are added
            self._indices[id(part.value)] = index
            if part.is_schema:
                self._name(index, _object(part.value))
            refuse(part.depth, MAX_NESTING, "levels of nesting")
            has_keywords = part.is_schema and _is_object(part.value)
            for key, child in (*_object(part.value).items(), *enumerate(_list(part.value))):
                if _is_object(child) or _is_list(child):
                    is_schema = not (has_keywords and key in MAPS)
                    is_literal = part.is_literal or (has_keywords and key in LITERALS)
                    self._parts.append(
                        _Part(child, index, part.depth + 1, is_schema, is_literal, part.resource)
                    )

    def _name(self, index: int, value: dict[str, Any]) -> None:
        part = self._parts[index]
        for keyword in ("$id", "id"):
            if isinstance(uri := value.get(keyword), str):
                full = _joined(self._uris[part.resource], uri).removesuffix("#")
                part.resource = index
                self._uris[index] = full
                self._targets.setdefault(full, []).append(index)
        for keyword in _ANCHORS:
            if isinstance(anchor := value.get(keyword), str):
                self._targets.setdefault(f"#{anchor}", []).append(index)

    def check(self, counts: Counts) -> None:
        """Raises InvalidGrammar where a bound is exceeded."""
        keywords = _Keywords(counts)
        least = [1.0] * len(self._parts)  # items that the shortest text has
        for index, part in enumerate(self._parts):
            least[index] = least[part.parent] * keywords.check(part.keywords)
            refuse_repeats(least[index])
        edges, heights = self._references()
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
        for index, part in enumerate(self._parts):
            if _is_object(part.value):
                finite.all_of(index, self._needs(finite, index))
        found = finite.solve()
        for index, part in enumerate(self._parts):
            if part.keywords and not found.issuperset(self._referred(index)):
                raise InvalidGrammar(
                    f"$ref {part.value.get('$ref')!s:.100} leads back to itself without an end"
                )

    def _needs(self, finite: "_Finite", index: int) -> list[int]:
        """What has to have an end so that a value of the schema has one."""
        schema = _object(self._parts[index].value)
        needs = self._referred(index) + self._nodes(_listed(schema.get("allOf")))
        for keyword in ("anyOf", "oneOf"):
            if _is_list(branches := schema.get(keyword)):
                found = self._nodes(_list(branches))
                free = len(found) < len(_list(branches))  # one is `true`
                needs.append(finite.any_of([[node] for node in found] + [[]] * free))
        types = _listed(schema.get("type"))
        if not {"enum", "const"} & schema.keys() and all(t in ("object", "array") for t in types):
            forms: list[list[int]] = []
            if "object" in types:
                named, names = _object(schema.get("properties")), _list(schema.get("required"))
                forms.append(self._nodes(named.get(n) for n in names if isinstance(n, str)))
            if "array" in types:
                least = int(min(_number(schema, "minItems"), len(self._parts)))
                prefix = schema.get("prefixItems")
                first = self._nodes(_list(prefix)[:least] or [prefix])
                others = self._nodes(_listed(schema.get("items")))
                forms.append(first + (others if least > len(first) else []))
            needs.append(finite.any_of(forms))
        return needs

    def _nodes(self, values: Iterable[object]) -> list[int]:
        """Indices of the objects among them."""
        return [self._indices[id(value)] for value in values if _is_object(value)]

    def _references(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """The graph of what is referred to, for `deepest`; its first node is the schema."""
        found = [
            (index, target) for index in range(len(self._parts)) for target in self._referred(index)
        ]
        nodes = {index: node for node, index in enumerate(sorted({0, *(t for _, t in found)}))}
        owners = [0] * len(self._parts)
        heights = [1] * len(nodes)
        edges: list[list[tuple[int, int]]] = [[] for _ in nodes]
        depths = [0] * len(self._parts)
        for index, part in enumerate(self._parts):
            owners[index], depths[index] = owners[part.parent], depths[part.parent] + 1
            if index in nodes:
                owners[index], depths[index] = nodes[index], 1
                if index:
                    edges[owners[part.parent]].append((nodes[index], 0))
            heights[owners[index]] = max(heights[owners[index]], depths[index])
        for index, target in found:
            edges[owners[index]].append((nodes[target], 1))
        return edges, heights

    def _referred(self, index: int) -> list[int]:
        found: list[int] = []
        part = self._parts[index]
        for keyword in _REFERENCES:
            if isinstance(reference := _object(part.value).get(keyword), str):
                targets = self._resolved(part.resource, reference)
                if not targets and part.keywords:
                    raise InvalidGrammar(
                        f"{keyword} {reference[:100]!r} refers to nothing in the schema"
                    )
                found += [target for target in targets if target != _TRUE_OR_FALSE]
        return found

    def _resolved(self, resource: int, reference: str) -> list[int]:
        """Where a reference may lead; nowhere: it is wrong."""
        uri, _, fragment = reference.partition("#")
        resources = [resource, 0]
        if uri:
            resources = self._targets.get(_joined(self._uris[resource], uri), [])
        if not fragment:
            return list(dict.fromkeys(resources))
        if not fragment.startswith("/"):
            return self._targets.get(f"#{unquote(fragment)}", [])
        steps = [
            step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:]
        ]
        found = [self._at(start, steps) for start in dict.fromkeys(resources)]
        return [target for target in found if target is not None]

    def _at(self, index: int, steps: list[str]) -> int | None:
        value = self._parts[index].value
        for step in steps:
            if _is_object(value):
                value = _object(value).get(step)
            elif _is_list(value) and step.isascii() and step.isdigit() and len(step) < 7:
                items = _list(value)
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
                self._counts.add_literal(json.dumps(value, ensure_ascii=False), len(_listed(value)))
        if isinstance(pattern := schema.get("pattern"), str):
            self._counts.add_pattern(pattern)
        for option in _object(schema.get("x-guidance")).values():
            self._counts.add_pattern(option if isinstance(option, str) else "")
        if (multiple := _number(schema, "multipleOf")) > 0:
            self._add_multiple(multiple)
        self._counts.add_counted(len(schema.keys() & {"minItems", "maxItems"}))
        least = [_number(schema, name) for name in ("minItems", "minLength", "minProperties")]
        return max(1.0, *least)

    def _check_names(self, schema: dict[str, Any]) -> None:
        given = (schema.get(keyword) for keyword in ("properties", "required"))
        found = (name for each in given for name in (*_object(each), *_list(each)))
        names = {name for name in found if isinstance(name, str)}
        self._properties += len(names)
        refuse(len(names), MAX_PROPERTIES, "properties in one object")
        refuse(self._properties, MAX_ALL_PROPERTIES, "properties")
        patterns = _object(schema.get("patternProperties"))
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


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _object(value: object) -> dict[str, Any]:
    """Empty: it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    """Empty: it is none."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _listed(value: object) -> list[Any]:
    """Keywords may have one value, or several."""
    return _list(value) if _is_list(value) else [value]


def _number(schema: dict[str, Any], keyword: str) -> float:
    """A keyword's number; 0: it has none."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
