"""Histories of other servers become what a chat template knows."""

import json
import typing

import msgspec
import pytest

from services.common.errors import InvalidRequest
from services.gateway.endpoints import messages_endpoint, responses_endpoint
from services.gateway.forms import foreign_history, hints
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.messages_api import Block, parse_messages_request
from services.gateway.forms.openai import parse_chat_request
from services.gateway.forms.responses_api import InputItem, parse_responses_request

USER = {"role": "user", "content": "u"}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
ACTION = {"type": "exec", "command": ["ls", "-l"], "env": {}}
SHELL = {"commands": ["ls"], "timeout_ms": 1000}
CLICK = {"type": "click", "x": 1, "y": 2, "button": "left"}
PATCH = {"type": "update_file", "path": "a.py", "diff": "-a\n+b"}
RAN = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


def plain(value):
    """Fields that are set, as JSON has them."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None}
    return value


def messages_of(chat):
    return plain(msgspec.to_builtins(chat.messages))


def chat_messages(*between):
    body = {"model": "m", "messages": [USER, *between]}
    return messages_of(parse_chat_request(msgspec.json.encode(body)))[1:]


def response_messages(*items, ignored=None):
    body = msgspec.json.encode({"model": "m", "input": [USER, *items]})
    request = parse_responses_request(body, ignored)
    return messages_of(responses_endpoint.to_chat(request, {}))[1:]


def called(name, arguments, call_id="c"):
    function = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}


def gave(content, call_id="c"):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def item(kind, **fields):
    return {"type": kind, "call_id": "c", "status": "completed", **fields}


ITEMS = {
    "shell_call": (item("shell_call", action=SHELL, environment=None), called("shell", SHELL)),
    "shell_call without ids": (
        {"type": "shell_call", "id": "s", "action": SHELL}, called("shell", SHELL, "s")),
    "local_shell_call": (item("local_shell_call", id="l", action=ACTION),
                         called("local_shell", ACTION)),
    "apply_patch_call": (item("apply_patch_call", operation=PATCH, caller={"type": "direct"}),
                         called("apply_patch", PATCH)),
    "computer_call": (item("computer_call", action=CLICK, pending_safety_checks=[]),
                      called("computer", CLICK)),
    "computer_call, actions": (item("computer_call", action=None, actions=[CLICK, CLICK]),
                               called("computer", {"actions": [CLICK, CLICK]})),
    "shell output": (item("shell_call_output", output=RAN, max_output_length=9),
                     gave(json.dumps(RAN, separators=(",", ":")))),
    "local shell output": ({"type": "local_shell_call_output", "id": "c", "output": "{}"},
                           gave("{}")),
    "empty output": (item("local_shell_call_output", output=""), gave("")),
    "patch output": (item("apply_patch_call_output", output="done"), gave("completed\ndone")),
    "patch output, failed": (item("apply_patch_call_output", status="failed", output=None),
                             gave("failed")),
    "screenshot": (
        item("computer_call_output", output={"type": "computer_screenshot", "image_url": IMAGE},
             acknowledged_safety_checks=[]),
        gave([{"type": "input_image", "image_url": IMAGE}])),
    "function output": (item("function_call_output", output="x", name="f", namespace="n"),
                        gave("x")),
    "refusal": (
        {"type": "message", "role": "assistant", "id": "m",
         "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}),
    "text and refusal": (
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []},
                                          {"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"},
                                          {"type": "output_text", "text": "No."}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ITEMS)
def test_items_of_responses(name):
    given, wanted = ITEMS[name]
    assert response_messages(given) == [wanted]


def test_a_call_and_its_result_are_turns_that_follow_each_other():
    found = response_messages(
        {"role": "assistant", "content": "I look."},
        item("shell_call", action=SHELL),
        item("shell_call", action=SHELL, call_id="d"),
        item("shell_call_output", output=RAN),
        item("shell_call_output", output=RAN, call_id="d"),
        USER,
    )
    assert [each["role"] for each in found] == ["assistant", "tool", "tool", "user"]
    assert found[0]["content"] == "I look." and len(found[0]["tool_calls"]) == 2


@pytest.mark.parametrize(
    "kind", ["mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"]
)
def test_items_of_servers_that_ran_their_tools_are_left_out_by_name(kind):
    ignored = Ignored()
    given = {"type": kind, "id": "m", "name": "search", "arguments": "{}", "output": "nothing"}
    assert response_messages(given, USER, ignored=ignored) == [USER]
    assert list(ignored.names) == [f"input.{kind}"]


BAD_ITEMS = {
    "shell_call without an action": ({"type": "shell_call", "call_id": "c"}, "action"),
    "action is text": (item("local_shell_call", action="ls"), "action"),
    "no call_id": ({"type": "apply_patch_call", "operation": PATCH}, "call_id"),
    "call_id is a number": (item("shell_call", action=SHELL) | {"call_id": 1}, "call_id"),
    "no output": (item("shell_call_output"), "output"),
    "output is null": (item("local_shell_call_output", output=None), "output"),
    "screenshot is text": (item("computer_call_output", output="x"), "output"),
    "refusal without text": (
        {"role": "assistant", "content": [{"type": "refusal"}]}, "content[0].refusal"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_malformed_items_are_refused_by_their_field(name):
    given, field = BAD_ITEMS[name]
    with pytest.raises(InvalidRequest) as refused:
        response_messages(given)
    assert refused.value.param == f"input[1].{field}"


def test_a_screenshot_that_only_its_server_has_is_refused():
    given = item("computer_call_output", output={"type": "computer_screenshot", "file_id": "f"})
    with pytest.raises(InvalidRequest, match="files are not stored here"):
        response_messages(given)


FUNCTION = {"name": "f", "arguments": '{"a":1}'}
CALL = {"id": "c", "function": FUNCTION}
TEXT = {"type": "text", "text": "a"}
NO = {"type": "text", "text": "No."}
MESSAGES = {
    "refusal": ({"content": None, "refusal": "No."}, {"content": "No."}),
    "refusal without content": ({"refusal": "No."}, {"content": "No."}),
    "refusal, empty text": ({"content": "", "refusal": "No."}, {"content": "No."}),
    "text and refusal": ({"content": "a", "refusal": "No."}, {"content": [TEXT, NO]}),
    "parts and refusal": ({"content": [TEXT], "refusal": "No."}, {"content": [TEXT, NO]}),
    "no refusal": ({"content": "a", "refusal": None}, {"content": "a"}),
    "refusal part": ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": [NO]}),
    "output_text part": ({"content": [TEXT | {"type": "output_text", "annotations": []}]},
                         {"content": [TEXT]}),
    "transcript": ({"content": None, "audio": {"id": "a", "data": "AA==", "transcript": "Hi."}},
                   {"content": "Hi."}),
    "text and transcript": ({"content": "a", "audio": {"id": "a", "transcript": "Hi."}},
                            {"content": "a"}),
    "function_call": ({"content": None, "function_call": FUNCTION},
                      {"tool_calls": [CALL | {"id": "call_f", "type": "function"}]}),
    "function_call beside tool_calls": ({"tool_calls": [CALL], "function_call": FUNCTION},
                                        {"tool_calls": [CALL]}),
    "custom call": (
        {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {"tool_calls": [{"id": "c", "type": "function",
                         "function": {"name": "f", "arguments": '{"input":"x"}'}}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_chat(name):
    given, wanted = MESSAGES[name]
    assert chat_messages({"role": "assistant", **given}) == [{"role": "assistant", **wanted}]


def test_a_function_message_is_the_result_of_the_call_of_that_name():
    call, result = chat_messages(
        {"role": "assistant", "content": None, "function_call": FUNCTION},
        {"role": "function", "name": "f", "content": "x"},
    )
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert result == gave("x", "call_f")


SEARCH_RESULT = {
    "type": "search_result", "source": "http://a.example", "title": "A",
    "content": [{"type": "text", "text": "Red."}, {"type": "text", "text": "Blue."}],
    "citations": {"enabled": True},
}  # fmt: skip
TABS = [{"tab_id": "1", "title": "t", "url": "http://a.example"}]
BLOCKS = {
    "search result": ("user", SEARCH_RESULT, [{"type": "text", "text": "A\nhttp://a.example\nRed.\nBlue."}]),
    "search result of a tool": (
        "user", {"type": "tool_result", "tool_use_id": "c", "content": [SEARCH_RESULT]},
        [{"type": "text", "text": "A\nhttp://a.example\nRed.\nBlue."}]),
    "compaction": ("assistant", {"type": "compaction", "content": "So far."}, "So far."),
    "browser state": (
        "user",
        {"type": "tool_result", "tool_use_id": "c",
         "content": [{"type": "browser_state", "tabs": TABS, "state_changes": None}]},
        [{"type": "text", "text": '{"tabs":[{"tab_id":"1","title":"t","url":"http://a.example"}]}'}]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_messages(name):
    role, block, wanted = BLOCKS[name]
    turns = [USER, {"role": role, "content": [block]}]
    body = {"model": "m", "max_tokens": 1, "messages": turns}
    request = parse_messages_request(msgspec.json.encode(body))
    assert messages_of(messages_endpoint.to_chat(request, {}))[1]["content"] == wanted


# Of the references: they change what follows, and only a developer sends them.
REFUSED = {"additional_tools", "configuration_update", "tool_addition", "tool_removal"}


def types_of(union):
    """The `type` of each member of a reference's union."""
    members = (member for member in typing.get_args(union) if isinstance(member, type))
    hints_of = (typing.get_type_hints(member)["type"] for member in members)
    return {each for hint in hints_of for each in typing.get_args(hint) if isinstance(each, str)}


def test_each_item_of_the_reference_is_served_read_or_left_out():
    reference = pytest.importorskip("openai.types.responses.response_input_item_param")
    (kinds,) = (f.type for f in msgspec.structs.fields(InputItem) if f.name == "type")
    known = {*typing.get_args(typing.get_args(kinds)[0]), *REFUSED}
    known |= foreign_history.BY_LIST["ResponsesRequest.input"].keys()
    known |= hints.BY_LIST["ResponsesRequest.input"].types
    found = types_of(reference.ResponseInputItemParam)
    assert "shell_call" in found and not found - known


def test_each_block_of_the_reference_is_served_read_or_left_out():
    reference = pytest.importorskip("anthropic.types.beta.beta_content_block_param")
    known = {block.__struct_config__.tag for block in typing.get_args(Block)} | REFUSED
    known |= hints.BY_LIST["Turn.content"].types
    found = types_of(reference.BetaContentBlockParam)
    assert "server_tool_use" in found and not found - known
