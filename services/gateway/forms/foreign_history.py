"""Conversion of items, parts and messages from other servers to types that are served.

A conversation that began on another server may contain calls of the server's own tools, refusals,
and fields of older APIs. The user cannot change the history, so each element is read as an element
that chat templates know: a call of a function, the result of a call, or text. `ignored` applies the
table to a body that does not fit its type, before the body is checked; docs/fields.md shows it.
Elements that a template cannot show at all are left out by `hints.LEFT_OUT`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from services.common.errors import InvalidRequest

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """Elements of lists that are read as another type of element.

    Attributes:
        lists: places of the lists, as `Struct.field`.
        types: types of the elements.
        becomes: description of the result, for the documentation.
        read: function that converts an element, given the element and its path. The result is None
            if the element has no text. A malformed element raises InvalidRequest.
    """

    lists: Sequence[str]
    types: Sequence[str]
    becomes: str
    read: Callable[[Object, str], Object | None]


def _text(value: object) -> str:
    """Returns a string as it is, and the JSON text of any other value."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _needed(item: Object, name: str, kind: type[Any], path: str) -> Any:  # noqa: ANN401 - JSON
    """Returns a field's value.

    Raises:
        InvalidRequest: the field is missing or null, or its value has another type.
    """
    value = item.get(name)
    if value is None or not isinstance(value, kind):
        raise InvalidRequest(f"a {item['type']} needs {name}", param=f"{path}.{name}")
    return value


def _call_id(item: Object, path: str) -> str:
    """Returns the id of a call. An output of a local shell has the call's id as its own `id`."""
    if isinstance(found := item.get("id"), str) and item.get("call_id") is None:
        return found
    return _needed(item, "call_id", str, path)


def _call(item: Object, name: str, arguments: object, path: str) -> Object:
    return {
        "type": "function_call",
        "id": item.get("id"),
        "call_id": _call_id(item, path),
        "name": name,
        "arguments": _text(arguments),
    }


def _output(item: Object, output: object, path: str) -> Object:
    return {
        "type": "function_call_output",
        "id": item.get("id"),
        "call_id": _call_id(item, path),
        "output": output,
    }


def _shell_call(item: Object, path: str) -> Object:
    name = item["type"].removesuffix("_call")
    return _call(item, name, _needed(item, "action", dict, path), path)


def _computer_call(item: Object, path: str) -> Object:
    actions = item.get("actions")
    if isinstance(actions, list):
        return _call(item, "computer", {"actions": cast("list[object]", actions)}, path)
    return _call(item, "computer", _needed(item, "action", dict, path), path)


def _apply_patch_call(item: Object, path: str) -> Object:
    return _call(item, "apply_patch", _needed(item, "operation", dict, path), path)


def _shell_output(item: Object, path: str) -> Object:
    return _output(item, _text(_needed(item, "output", object, path)), path)


def _apply_patch_output(item: Object, path: str) -> Object:
    values = (item.get("status"), item.get("output"))
    return _output(item, "\n".join(_text(each) for each in values if each), path)


def _computer_output(item: Object, path: str) -> Object:
    screenshot = cast("Object", _needed(item, "output", dict, path))
    image = {name: screenshot.get(name) for name in ("image_url", "file_id")}
    return _output(item, [{"type": "input_image", **image}], path)


def _refusal(part: Object, path: str) -> Object:
    return {"type": "text", "text": _needed(part, "refusal", str, path)}


def _output_refusal(part: Object, path: str) -> Object:
    return _refusal(part, path) | {"type": "output_text"}


def _output_text(part: Object, path: str) -> Object:
    return part | {"type": "text"}


def _custom_call(call: Object, path: str) -> Object:
    """Converts the chat API's call of a custom tool, whose input is free text."""
    custom = cast("Object", _needed(call, "custom", dict, path))
    arguments = _text({"input": custom.get("input")})
    function = {"name": custom.get("name"), "arguments": arguments}
    rest = {name: value for name, value in call.items() if name != "custom"}
    return rest | {"type": "function", "function": function}


def _browser_state(block: Object, path: str) -> Object:
    known = {name: block[name] for name in ("tabs", "state_changes") if block.get(name)}
    return {"type": "text", "text": _text(known)}


def _compaction(block: Object, _: str) -> Object | None:
    """Returns a text block with the summary that Anthropic's server made of earlier turns. None if
    the summary is encrypted or empty.
    """
    summary = block.get("content")
    return {"type": "text", "text": summary} if isinstance(summary, str) and summary else None


READINGS: Sequence[Reading] = (
    Reading(
        ("ResponsesRequest.input",),
        ("shell_call", "local_shell_call"),
        "a call of the function `shell` or `local_shell` with the action as its arguments",
        _shell_call,
    ),
    Reading(
        ("ResponsesRequest.input",),
        ("computer_call",),
        "a call of the function `computer` with the action, or all actions, as its arguments",
        _computer_call,
    ),
    Reading(
        ("ResponsesRequest.input",),
        ("apply_patch_call",),
        "a call of the function `apply_patch` with the operation as its arguments",
        _apply_patch_call,
    ),
    Reading(
        ("ResponsesRequest.input",),
        ("shell_call_output", "local_shell_call_output"),
        "the call's result: its text, or the JSON text of its parts",
        _shell_output,
    ),
    Reading(
        ("ResponsesRequest.input",),
        ("apply_patch_call_output",),
        "the call's result: status and text",
        _apply_patch_output,
    ),
    Reading(
        ("ResponsesRequest.input",),
        ("computer_call_output",),
        "the call's result: an image",
        _computer_output,
    ),
    Reading(("InputItem.content",), ("refusal",), "the assistant's text", _output_refusal),
    Reading(("Message.content",), ("refusal",), "the assistant's text", _refusal),
    Reading(("Message.content",), ("output_text",), "text", _output_text),
    Reading(
        ("Message.tool_calls",),
        ("custom",),
        "a call of a function with the argument `input`",
        _custom_call,
    ),
    Reading(("Turn.content",), ("compaction",), "the text of its summary", _compaction),
    Reading(
        ("ToolResultBlock.content",),
        ("browser_state",),
        "the JSON text of its tabs and changes",
        _browser_state,
    ),
)


def read_message(message: Object) -> None:
    """Reads a chat message's older and foreign fields as fields that are served, in place.

    - The role `function`, and an assistant's `function_call`, of the API before tools: the result
      of a tool call and the call, with the function's name in the call's id.
    - `refusal` of an assistant: text after the message's content.
    - The transcript in `audio` of an assistant: the text of a message without content.
    """
    role = message.get("role")
    if role == "function" and isinstance(name := message.get("name"), str):
        del message["name"]
        message |= {"role": "tool", "tool_call_id": f"call_{name}"}
    if role != "assistant":
        return
    call = _object(message, "function_call")
    if call.get("name") and not message.get("tool_calls"):
        del message["function_call"]
        call_id = f"call_{call['name']}"
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        del message["refusal"]
        _add_text(message, refusal)
    transcript = _object(message, "audio").get("transcript")
    if isinstance(transcript, str) and not message.get("content"):
        del message["audio"]
        message["content"] = transcript


def _object(message: Object, name: str) -> Object:
    """Returns a field that is an object, and an empty object in place of any other value."""
    value = message.get(name)
    return cast("Object", value) if isinstance(value, dict) else {}


def _add_text(message: Object, text: str) -> None:
    """Adds a text part to a message's content; a message without content gets the text."""
    content = message.get("content")
    if not content:
        message["content"] = text
    elif isinstance(content, str):
        message["content"] = [{"type": "text", "text": each} for each in (content, text)]
    elif isinstance(content, list):
        cast("list[object]", content).append({"type": "text", "text": text})


def _by_list() -> dict[str, dict[str, Reading]]:
    found: dict[str, dict[str, Reading]] = {}
    for reading in READINGS:
        for place in reading.lists:
            found.setdefault(place, {}).update(dict.fromkeys(reading.types, reading))
    return found


BY_LIST: Mapping[str, Mapping[str, Reading]] = _by_list()
