"""Removal of fields and elements that change no answer from the body of a request.

The table in `hints` says which fields and elements are removed; the response names them in a
header. Elements that another server wrote into the conversation are replaced by elements of
served types, by the table in `foreign_history`.

`Parser` calls `Ignored.without` only for a body that does not fit its type, so a request without
such fields costs no extra time. The body is walked once, along the type.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from services.common.errors import InvalidRequest
from services.gateway.forms import foreign_history
from services.gateway.forms.foreign_history import Reading
from services.gateway.forms.hints import BY_LIST, BY_OBJECT, Elements
from services.gateway.forms.successors import successor

HEADER = b"x-triptych-ignored"
_MAX_NAMES = 32
_MAX_NAME_LENGTH = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$-]")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Object:
    """A struct.

    Attributes:
        name: name of the struct's class.
        fields: field name -> shape of the field's type. None if the type contains no objects.
        tag_field: name of the field that holds the struct's tag. None if the struct has no tag.
    """

    name: str
    fields: Mapping[str, "_Shape | None"]
    tag_field: str | None


@dataclass(slots=True)
class _Shape:
    """The structs that a value of a type may contain: the value itself or its elements.

    Attributes:
        is_map: true if the value may be an object and may not be a list.
        objects: tag -> struct that the value may be. The key of a struct without a tag is None.
        tag_field: name of the field that holds the tag.
        items: shape of the elements of a list. None if the value may not be a list.
        elements: elements that are left out of a list. None if every element stays.
        readings: type of an element -> reading that replaces the element.
    """

    is_map: bool = False
    objects: dict[str | None, _Object] = field(default_factory=dict[str | None, _Object])
    tag_field: str = "type"
    items: "_Shape | None" = None
    elements: Elements | None = None
    readings: Mapping[str, Reading] = field(default_factory=dict[str, Reading])

    def object_of(self, value: Mapping[str, object]) -> _Object | None:
        tag = value.get(self.tag_field)
        found = self.objects.get(tag) if isinstance(tag, str) else None
        return found or self.objects.get(None)


@cache
def _shape(kind: Any) -> _Shape:  # noqa: ANN401 - a body's struct
    shape = _shape_of(inspect.type_info(kind), "")
    assert shape is not None
    return shape


def _shape_of(info: inspect.Type, place: str) -> _Shape | None:
    """Returns the shape of a type. None if the type contains no objects."""
    members = list(_members(info))
    has_lists = any(isinstance(member, inspect.ListType) for member in members)
    has_objects = any(isinstance(m, inspect.StructType | inspect.DictType) for m in members)
    shape = _Shape(
        is_map=has_objects and not has_lists,
        elements=BY_LIST.get(place),
        readings=foreign_history.BY_LIST.get(place) or {},
    )
    for member in members:
        if isinstance(member, inspect.StructType):
            name = member.cls.__name__
            fields = {f.encode_name: _shape_of(f.type, f"{name}.{f.name}") for f in member.fields}
            shape.objects[cast("str | None", member.tag)] = _Object(name, fields, member.tag_field)
        elif isinstance(member, inspect.ListType):
            shape.items = _shape_of(member.item_type, "") or _Shape()
    is_walked = shape.is_map or shape.objects or shape.elements or shape.readings
    return shape if is_walked or _has_structs(shape.items) else None


def _has_structs(shape: _Shape | None) -> bool:
    return shape is not None and bool(shape.objects or _has_structs(shape.items))


def _members(info: inspect.Type) -> Iterator[inspect.Type]:
    """Yields the members of a union without their annotations. Any other type is its own member."""
    if isinstance(info, inspect.Metadata):
        yield from _members(info.type)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _members(member)
    else:
        yield info


class Ignored:
    """The fields and elements that were removed from the body of a request.

    Args:
        all_unknown: true if every unknown field is removed. By default, an unknown field is removed
            only if it is null or empty.

    Attributes:
        names: path without indices -> name in metrics, in the order of the body.
        paths: path of an element after the removal -> its path in the client's body. Only elements
            that moved have an entry.
    """

    def __init__(self, *, all_unknown: bool = False) -> None:
        self._all_unknown = all_unknown
        self.names: dict[str, str] = {}
        self.paths: dict[str, str] = {}

    def add(self, name: str, label: str = "") -> None:
        """Names a field that is known and has no effect for this model."""
        if len(self.names) < _MAX_NAMES:
            self.names.setdefault(name, label or name)

    def header(self) -> tuple[bytes, bytes]:
        """Returns the response's header that names the ignored fields."""
        return HEADER, ", ".join(self.names).encode("latin-1")

    def without(self, kind: object, body: bytes | bytearray) -> bytes | None:
        """Returns a body's JSON without the fields and elements that change no answer.

        Three more kinds of values are converted to values that are served: elements from other
        servers, `1.0` to `1` (some languages have no integers), and `[]` to `{}` where no list is
        allowed (PHP writes empty objects like this).

        Args:
            kind: type of the body.
            body: JSON that does not fit the type.

        Returns:
            The new JSON. None if the body has a number out of range. The type's own error
            stands then.

        Raises:
            InvalidRequest: a field that is not served has a value that would change the answer.
            msgspec.DecodeError: the body is not JSON.
        """
        try:
            value = msgspec.json.decode(body)
        except msgspec.ValidationError:  # A number is out of range; the type's error names it.
            return None
        self._walk(value, _shape(kind), "", "")
        return msgspec.json.encode(value)

    def _walk(self, value: object, shape: _Shape, path: str, name: str) -> None:
        if isinstance(value, dict):
            members = cast("dict[str, object]", value)
            if (found := shape.object_of(members)) is not None:
                if found.name == "Message":
                    foreign_history.read_message(members)
                self._object(members, found, path, name)
        elif isinstance(value, list):
            elements = cast("list[object]", value)
            if shape.readings:
                _read(elements, shape.readings, path)
            if shape.elements is not None:
                self._leave_out(elements, shape, path, name)
            if (items := shape.items) is not None and (items.objects or items.items):
                for index, element in enumerate(elements):
                    self._walk(element, items, f"{path}[{index}]", name)

    def _object(self, members: dict[str, object], kind: _Object, path: str, name: str) -> None:
        hints = BY_OBJECT.get(kind.name, {})
        for key, value in list(members.items()):
            below = f"{path}.{key}" if path else key
            named = f"{name}.{key}" if name else key
            if key in kind.fields:
                shape = kind.fields[key]
                if shape is not None and shape.is_map and value == []:
                    members[key] = {}
                elif shape is not None:
                    self._walk(value, shape, below, named)
                elif isinstance(value, float) and value.is_integer():
                    members[key] = int(value)
                continue
            if key == kind.tag_field:
                continue
            is_empty = value is None or value in ("", [], {})
            taken = hints.get(key, _MISSING)
            if taken is _MISSING:
                if not (is_empty or self._all_unknown):
                    continue  # The second parse refuses the field as unknown.
            elif taken is not None and not is_empty and value not in cast("tuple[Any]", taken):
                raise _refusal(key, cast("tuple[Any]", taken), below, kind.fields)
            del members[key]
            self.add(_safe(named), key if key in hints else "other")

    def _leave_out(self, values: list[object], shape: _Shape, path: str, name: str) -> None:
        elements = shape.elements
        assert elements is not None
        remaining: list[object] = []
        for index, value in enumerate(values):
            is_object = isinstance(value, dict)
            kind = cast("dict[str, object]", value).get(shape.tag_field) if is_object else value
            if elements.leaves_out(kind):
                self.add(_safe(f"{name}.{kind}"), name)
                continue
            if len(remaining) < index:
                self.paths[f"{path}[{len(remaining)}]"] = f"{path}[{index}]"
            remaining.append(value)
        values[:] = remaining


def _read(values: list[object], readings: Mapping[str, Reading], path: str) -> None:
    """Replaces elements of a list by the elements that they are read as, in place."""
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            continue
        element = cast("foreign_history.Object", value)
        if isinstance(kind := element.get("type"), str) and kind in readings:
            served = readings[kind].read(element, f"{path}[{index}]")
            values[index] = value if served is None else served


def _refusal(
    key: str, taken: tuple[Any, ...], path: str, fields: Collection[str]
) -> InvalidRequest:
    others = " or ".join(msgspec.json.encode(value).decode() for value in taken)
    only = f"; leave it out, or send {others}" if others else ""
    instead = successor(key, fields)
    return InvalidRequest(f"{key} is not supported{instead or only}", param=path)


def _safe(name: str) -> str:
    """Returns a name with the characters and the length that a header allows."""
    return _UNSAFE.sub("?", name[:_MAX_NAME_LENGTH])
