"""Bounds on JSON schemas: references, nesting, properties and other keywords that compile slowly.

A schema is walked once, which makes a list of its objects and lists. References are edges between
the objects that are referred to. A reference that might mean several places counts as all of them.
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

MAX_NESTING = 100  # the compiler's JSON parser accepts 127 levels
MAX_CHAIN = 64  # references along a path
# Objects and lists along a path of references. A stack of 8 MiB ends between 1,700 and 2,500.
MAX_LEVELS = 512
MAX_PROPERTIES = 1000  # properties of an object; optional properties take quadratic time, 0.1 s
MAX_ALL_PROPERTIES = 5000  # they take 0.3 s and 40 MiB
MAX_PATTERN_PROPERTIES = 64  # patterns of an object, all pairs of which are compared in 0.03 s
MAX_ALL_PATTERN_PROPERTIES = 512
# Least common multiple of all `multipleOf` without trailing zeros, which is the size of an
# automaton.
MAX_MULTIPLE = 20_000
MAX_ALL_MULTIPLES = 50_000

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
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_TRUE_OR_FALSE = -1  # target of a reference to a schema `true` or `false`


def check_schema(schema: object, counts: Counts) -> None:
    """Checks a schema against the bounds.

    Args:
        schema: the schema as parsed JSON.
        counts: sums over the whole grammar, to which those of the schema are added.

    Raises:
        InvalidGrammar: the schema exceeds a bound, or has a reference to nothing.
    """
    _Parts(schema).check(counts)


@dataclass(slots=True)
class _Part:
    """An object or a list of a schema.

    Attributes:
        value: the parsed JSON.
        parent: index of the part that contains it.
        depth: number of parts around it.
        is_schema: True if its keys are keywords.
        is_literal: True if it is within a value that is no schema.
        resource: index of the part whose URI is the base of its fragments.
    """

    value: Any
    parent: int = 0
    depth: int = 0
    is_schema: bool = True
    is_literal: bool = False
    resource: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of a schema. Empty if the part is not a schema."""
        return _object(self.value) if self.is_schema and not self.is_literal else {}


class _Parts:
    """The objects and lists of a schema, in the order of a walk from the schema itself."""

    def __init__(self, schema: object) -> None:
        self._parts = [_Part(schema)]
        self._uris: dict[int, str] = {0: ""}  # by index of the resource
        self._targets: dict[str, list[int]] = {}  # by URI, or by `#` and anchor
        self._indices: dict[int, int] = {}  # by id() of the value
        for index, part in enumerate(self._parts):  # the loop appends the children
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
        """Checks the bounds, and adds the sums of the schema.

        Raises:
            InvalidGrammar: the schema exceeds a bound, or has a reference to nothing.
        """
        keywords = _Keywords(counts)
        least = [1.0] * len(self._parts)  # number of items of the shortest value
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
        """Refuses a reference to a schema that only infinite JSON would match.

        Raises:
            InvalidGrammar: the schema has such a reference.
        """
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
        """Returns the nodes that must have finite values so that the schema has a finite value."""
        schema = _object(self._parts[index].value)
        needs = self._referred(index) + self._nodes(_listed(schema.get("allOf")))
        for keyword in ("anyOf", "oneOf"):
            if _is_list(branches := schema.get(keyword)):
                found = self._nodes(_list(branches))
                free = len(found) < len(_list(branches))  # a branch is `true`
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
        """Returns the indices of the values that are objects."""
        return [self._indices[id(value)] for value in values if _is_object(value)]

    def _references(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Returns edges and heights for `deepest`. The nodes are the schema itself and the parts
        that are referred to.
        """
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
        """Returns the possible targets of a reference. A wrong reference has none."""
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
    """Resolves a URI against a base. Text that is not a URI is returned unchanged."""
    try:
        return urljoin(base, uri)
    except ValueError:
        return uri


class _Finite:
    """Finds the nodes that are true, if each node is true when its needs are. It computes the least
    solution in linear time.
    """

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        self._others = 0

    def all_of(self, node: int, needs: list[int]) -> None:
        """Declares that a node is true if all of its needs are."""
        self._missing[node] = len(needs)
        for need in needs:
            self._users.setdefault(need, []).append(node)

    def any_of(self, alternatives: list[list[int]]) -> int:
        """Creates a node that is true if all needs of an alternative are, and returns the node."""
        self._others -= 1
        node = self._others
        self._missing[node] = 1
        for needs in alternatives:
            self._others -= 1
            self.all_of(self._others, needs)
            self._users.setdefault(self._others, []).append(node)
        return node

    def solve(self) -> set[int]:
        """Returns the nodes that are true."""
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
    """Sums over the keywords of all schemas in a grammar."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._properties = 0
        self._pattern_properties = 0
        self._multiples = 0
        self._multiple = 1

    def check(self, schema: dict[str, Any]) -> float:
        """Checks the keywords of a schema and returns the number of items of its shortest value.

        Raises:
            InvalidGrammar: the keywords exceed a bound.
        """
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
    """Returns the value if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    """Returns the value if it is a list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _listed(value: object) -> list[Any]:
    """Returns the values of a keyword that has a single value or a list of values."""
    return _list(value) if _is_list(value) else [value]


def _number(schema: dict[str, Any], keyword: str) -> float:
    """Returns the number of a keyword, or 0 if the keyword has no number."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
