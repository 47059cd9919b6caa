"""Conversion of JSON schemas from SDKs of other languages to the standard.

Go and Java write null for a keyword that is not used. PHP writes `[]` for an empty object, and an
object with numbers as keys for a list. Google's SDKs write types in upper case, numbers as strings,
and `nullable`. Python's SDKs write names of Python's types. Draft 3 of the standard has
`required: true` in a property. Each such value is replaced by its standard equivalent, and a
standard schema is not changed. A value without a certain equivalent is refused by its place, or
left out if the client was not promised that every keyword is enforced.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.gateway.answers.schema_place import SchemaPlace

# JSON type of each type name of other languages, in lower case. Empty if the name means any type.
_TYPES = {
    **dict.fromkeys(("string", "str", "text", "varchar", "char"), "string"),
    **dict.fromkeys(
        (
            "integer", "int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16",
            "uint32", "uint64", "long", "short", "bigint",
        ),
        "integer",
    ),
    **dict.fromkeys(
        ("number", "num", "float", "float32", "float64", "double", "decimal"), "number"
    ),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "set"), "array"),
    **dict.fromkeys(("object", "dict", "dictionary", "map"), "object"),
    **dict.fromkeys(("null", "none", "nonetype", "nil"), "null"),
    **dict.fromkeys(("", "any", "mixed", "type_unspecified"), ""),
}  # fmt: skip
# Matches `list[str]`, `Map<String, Object>` and `string[]`.
_GENERIC = re.compile(r"(\w+)(?:\[.+\]|<.+>)|\w+(\[\])", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})")
_DRAFT = re.compile(r"https?://json-schema\.org/draft(?:-0[3-7]|/20\d\d-\d\d)/schema#?")
_CHARACTER = r"[A-Za-z0-9._~@!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_HOST = r"//[A-Za-z0-9._~-]*(?::[0-9]{1,5})?(?=[/?#]|\Z)"
_URI = re.compile(
    rf"(?:[A-Za-z][A-Za-z0-9+.-]*:(?:{_HOST}|(?!//))(?:{_CHARACTER}|[:/])*"
    rf"|(?!//)(?:{_CHARACTER}|/)*)(?:\?(?:{_CHARACTER}|[:/?])*)?(?:#(?:{_CHARACTER})*)?"
)
_BOOLEANS = {"true": True, "false": False}
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$defs",
        "definitions",
        "$id",
        "$anchor",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    )
)
# Keywords whose values are no schemas and may be null.
_VALUES = frozenset(("const", "default", "examples", "example", "x-guidance"))
_SNAKE_CASE = {
    "additional_properties": "additionalProperties", "any_of": "anyOf", "one_of": "oneOf",
    "all_of": "allOf", "min_length": "minLength", "max_length": "maxLength",
    "min_items": "minItems", "max_items": "maxItems", "min_properties": "minProperties",
    "max_properties": "maxProperties", "prefix_items": "prefixItems",
}  # fmt: skip
# A limit of this size is the largest number of some type, and longer than any answer.
_UNLIMITED = 1 << 31
_MAX_SHOWN = 60


def standard_schema(schema: object, place: SchemaPlace) -> Any:  # noqa: ANN401 - any JSON
    """Returns a copy of a schema in which every value is standard.

    Args:
        schema: parsed JSON, of bounded nesting.
        place: place of the schema, which errors name.

    Raises:
        InvalidGrammar: the place is strict, and a value has no certain equivalent.
    """
    return _Reader(place).schema(schema, "")


def standard_keywords(schema: object) -> Any:  # noqa: ANN401 - any JSON
    """Returns a copy of a schema in which its own keywords are standard.

    The schemas within it are not converted. A value without a certain equivalent is left out.
    """
    reader = _Reader(SchemaPlace(strict=False), is_deep=False)
    if isinstance(schema, dict):
        return reader.keywords(cast("dict[str, Any]", schema), "")
    return reader.schema(schema, "")


class _Absent:
    """Type of the value that a reader returns for a keyword that is to be left out."""


_ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converter of the schemas of one function or answer.

    Attributes:
        is_deep: true if the schemas within a schema are converted as well.
    """

    _place: SchemaPlace
    is_deep: bool = True

    def schema(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Returns a converted schema, whose place is `path`."""
        if isinstance(value, bool):
            return value
        if isinstance(value, dict):
            given = cast("dict[str, Any]", value)
            return self.keywords(given, path) if self.is_deep else given
        if value is None or value == []:
            return {}
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        if isinstance(value, str) and (name := _type_name(value)) is not None:
            return {"type": name} if name else {}
        self._refuse(path, path.rpartition(".")[2], value)
        return {}

    def _refuse(self, path: str, keyword: str, value: object) -> None:
        if not self._place.strict:
            return
        text = json.dumps(value, ensure_ascii=False)
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
        self._place.refuse(path, f"{keyword} {shown}")

    def keywords(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        """Returns the keywords of a schema with standard names and values."""
        found: dict[str, Any] = {}
        for keyword, value in given.items():
            name = _SNAKE_CASE.get(keyword, keyword)
            if name != keyword and given.get(name) is not None:
                continue
            read = READERS.get(name)
            if value is None and name not in _VALUES:
                continue
            standard = value if read is None else read(self, value, f"{path}.{keyword}")
            if standard is not _ABSENT:
                found[name] = standard
        if self.is_deep and isinstance(given.get("properties"), dict):
            self._require_flagged(given["properties"], found)
        if isinstance(found.get("required"), list):
            self._name_required(found, path)
        _exclude_bounds(found)
        self._fit_values(found)
        return _with_null(found) if _is_true(found.pop("nullable", None)) else found

    # Readers of a keyword's value. They return _ABSENT for a keyword that restricts nothing.

    def map(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads schemas by name."""
        if value == []:
            return {}
        if not isinstance(value, dict):
            return self._unclear(value, path)
        if not self.is_deep:
            return cast("dict[str, Any]", value)
        members = cast("dict[str, Any]", value).items()
        return {name: self.schema(member, f"{path}.{name}") for name, member in members}

    def dependents(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads requirements that depend on properties, which are not enforced."""
        del path
        return value or _ABSENT

    def branches(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads a list of at least one schema, such as that of `anyOf`."""
        items = _listed(value)
        if items is None:
            return self._unclear(value, path)
        if not items:
            return _ABSENT
        found: list[Any] = []
        for index, item in enumerate(items):
            if _is_null_type(item):
                item = {**item, "type": "null"}
            if item is None:
                self._refuse(f"{path}[{index}]", path.rpartition(".")[2], item)
                return _ABSENT
            found.append(self.schema(item, f"{path}[{index}]"))
        return found

    def items(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads one schema or, before draft 2020-12, a list of schemas."""
        if isinstance(value, list) and value:
            items = enumerate(cast("list[Any]", value))
            return [self.schema(item, f"{path}[{index}]") for index, item in items]
        return self.schema(value, path)

    def type(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads the name of a type, or a list of names. An unknown name stays as it is."""
        if isinstance(value, str):
            name = _type_name(value)
            return value if name is None else (name or _ABSENT)
        items = _listed(value)
        if items is None or not all(item is None or isinstance(item, str) for item in items):
            return self._unclear(value, path)
        names: list[str] = []
        for item in items:
            name = "null" if item is None else _type_name(item)
            names.append(str(item) if name is None else name)
        return _ABSENT if "" in names or not names else list(dict.fromkeys(names))

    def required(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads names of properties. Booleans are read with the object around the property."""
        if isinstance(value, bool):
            return _ABSENT
        if isinstance(value, str):
            return _ABSENT if value.lower() in _BOOLEANS or not value else [value]
        items = _listed(value)
        return self._unclear(value, path) if items is None else items

    def enum(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        items = _listed(value)
        return self._unclear(value, path) if items is None else (items or _ABSENT)

    def count(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads a number of characters, items or properties. A negative number limits nothing."""
        number = self.number(value, path)
        if isinstance(number, int | float):
            is_unlimited = number >= _UNLIMITED
            if number < 0 or (is_unlimited and "max" in path.rpartition(".")[2]):
                return _ABSENT
            if is_unlimited or number != int(number):
                return self._unclear(value, path)
        return number

    def number(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        number = _number_of(value)
        return self._unclear(value, path) if number is None else number

    def multiple(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        number = self.number(value, path)
        if isinstance(number, int | float):
            if number == 0:
                return _ABSENT
            if number < 0:
                return self._unclear(value, path)
        return number

    def exclusive(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads a number or, in draft 4, whether the bound beside the keyword is exclusive."""
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        return value if isinstance(value, bool) else self.number(value, path)

    def text(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads a text. An empty text restricts nothing."""
        if not isinstance(value, str):
            return self._unclear(value, path)
        return value or _ABSENT

    def boolean(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        return value if isinstance(value, bool) else self._unclear(value, path)

    def name_of_schema(self, value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Reads a name by which schemas refer to the schema. A name that is no URI is left out."""
        known = _DRAFT if path.endswith(".$schema") else _URI
        return value if isinstance(value, str) and known.fullmatch(value) else _ABSENT

    def _unclear(self, value: Any, path: str) -> _Absent:  # noqa: ANN401 - any JSON
        self._refuse(path, path.rpartition(".")[2], value)
        return _ABSENT

    # Conversions of several keywords together.

    def _require_flagged(self, given: dict[str, Any], found: dict[str, Any]) -> None:
        """Adds properties to `required` that have `required: true` themselves, as in draft 3."""
        flagged = [
            name
            for name, schema in given.items()
            if isinstance(schema, dict)
            and _is_true(cast("dict[str, Any]", schema).get("required"))
            and name in found.get("properties", {})
        ]
        if flagged:
            required = found.get("required")
            names = cast("list[Any]", required) if isinstance(required, list) else []
            found["required"] = [*names, *(name for name in flagged if name not in names)]

    def _name_required(self, found: dict[str, Any], path: str) -> None:
        """Converts numbers in `required` to names: PHP writes names of digits as numbers."""
        names: list[str] = []
        for index, name in enumerate(cast("list[Any]", found["required"])):
            if isinstance(name, int) and not isinstance(name, bool):
                name = str(name)
            if isinstance(name, str):
                names.append(name)
            elif name is not None:
                self._refuse(f"{path}.required[{index}]", "required", name)
        found["required"] = names

    def _fit_values(self, found: dict[str, Any]) -> None:
        """Converts values of `enum` and `const` to the schema's type, if all values have another.

        SDKs write numbers and booleans as texts, and texts of digits as integers.
        """
        kinds = found.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds or ()))
        if "const" in found and found["const"] is None and kinds and "null" not in kinds:
            del found["const"]
        kinds.discard("null")
        fit = _FITTED.get(next(iter(kinds))) if len(kinds) == 1 else None
        if fit is None:
            return
        if isinstance(found.get("enum"), list):
            values = cast("list[Any]", found["enum"])
            fitted = [None if value is None else fit(value) for value in values]
            if all(v is None or f is not None for v, f in zip(values, fitted, strict=True)):
                found["enum"] = fitted
        if (const := found.get("const")) is not None and (value := fit(const)) is not None:
            found["const"] = value


def _type_name(name: str) -> str | None:
    """Returns the JSON type of a name. Empty if the name means any type, None if it is unknown."""
    lower = name.strip().lower()
    if generic := _GENERIC.fullmatch(lower):
        kind = "array" if generic[2] else _TYPES.get(generic[1])
        return kind if kind in ("array", "object") else None
    return _TYPES.get(lower)


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _is_null_type(branch: object) -> bool:
    """Returns whether a branch is `type: null`, which YAML reads as a null instead of a name."""
    if not isinstance(branch, dict) or "type" not in branch:
        return False
    schema = cast("dict[str, Any]", branch)
    return schema["type"] is None and schema.keys() <= {"type", *_ANNOTATIONS}


def _listed(value: object) -> list[Any] | None:
    """Returns a list, also from an object whose keys are numbers. None if the value is neither."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        if all(name.isascii() and name.isdigit() for name in members):
            return list(members.values())
    return None


def _number_of(value: object) -> int | float | None:
    """Returns a number, also from a text with digits. None if the value is neither."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip()
        number = int(text) if _INTEGER.fullmatch(text) else float(text)
        return None if math.isinf(number) else number
    return None


def _as_number(value: object) -> int | float | None:
    return _number_of(value) if isinstance(value, str) else None


def _as_boolean(value: object) -> bool | None:
    return _BOOLEANS.get(value.lower()) if isinstance(value, str) else None


def _as_text(value: object) -> str | None:
    """Returns the text of an integer. None for a float, whose original text is unknown."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


# Conversions to each type from values of other types. None if a value has no equivalent.
_FITTED: Mapping[str, Callable[[object], object]] = {
    "integer": _as_number,
    "number": _as_number,
    "boolean": _as_boolean,
    "string": _as_text,
}


def _exclude_bounds(found: dict[str, Any]) -> None:
    """Converts bounds that draft 4 makes exclusive by a boolean beside them."""
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := found.get(keyword), bool):
            del found[keyword]
            if flag and bound in found:
                found[keyword] = found.pop(bound)


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema extended by null."""
    null = {"type": "null"}
    if "$ref" in schema or "const" in schema or "allOf" in schema:
        around = {name: value for name, value in schema.items() if name in _ANNOTATIONS}
        inner = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        return {**around, "anyOf": [inner, null]}
    found = dict(schema)
    for keyword in ("anyOf", "oneOf"):
        if keyword in found and not any(_takes_null(branch) for branch in found[keyword]):
            found[keyword] = [*found[keyword], null]
    if "enum" in found and None not in found["enum"]:
        found["enum"] = [*found["enum"], None]
    if (kinds := found.get("type")) is not None:
        names = cast("list[str]", kinds) if isinstance(kinds, list) else [kinds]
        found["type"] = names if "null" in names else [*names, "null"]
    return found


def _takes_null(branch: object) -> bool:
    kinds = cast("dict[str, Any]", branch).get("type") if isinstance(branch, dict) else None
    return kinds == "null" or (isinstance(kinds, list) and "null" in kinds)


_Read = Callable[[_Reader, Any, str], Any]
# Reader of the value of each keyword.
READERS: Mapping[str, _Read] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _Reader.map),
    **dict.fromkeys(
        ("dependentSchemas", "dependentRequired", "dependencies"), _Reader.dependents
    ),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Reader.branches),
    **dict.fromkeys(
        (
            "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties",
            "unevaluatedItems",
        ),
        _Reader.schema,
    ),
    **dict.fromkeys(
        (
            "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
            "minContains", "maxContains",
        ),
        _Reader.count,
    ),
    **dict.fromkeys(("minimum", "maximum"), _Reader.number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _Reader.exclusive),
    **dict.fromkeys(("format", "pattern", "$ref"), _Reader.text),
    **dict.fromkeys(("$schema", "$id", "id", "$anchor"), _Reader.name_of_schema),
    "uniqueItems": _Reader.boolean,
    "multipleOf": _Reader.multiple,
    "items": _Reader.items,
    "type": _Reader.type,
    "required": _Reader.required,
    "enum": _Reader.enum,
}  # fmt: skip
