"""Codex and Claude Code: the requests that they send, written down from their sources and issues.

The programs are not run: each wants its vendor's model to decide what to do.
"""

import json
import urllib.error
import urllib.request

from cells import CITIES, KEY, MODEL, ONE_CALL, PARAMETERS, QUESTION, URL, report

FUNCTION = {"name": "forecast", "description": "The weather", "parameters": PARAMETERS}
SHELL = {
    "type": "function", "name": "exec_command", "description": "Runs a command", "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"enum": ["ls"]}}, "required": ["cmd"],
                   "additionalProperties": False},
}  # fmt: skip
CODEX = {
    "model": MODEL, "instructions": "You are Codex.", "store": False, "stream": True,
    "tool_choice": "auto", "parallel_tool_calls": True, "max_output_tokens": 200,
    "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "service_tier": "auto",
    "client_metadata": {"x-codex-installation-id": "1"},
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "description": "Edits files",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"}, {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client"},
        {"type": "namespace", "name": "mcp__weather", "description": "Weather of cities.",
         "tools": [{"type": "function", "strict": False, "defer_loading": False, **FUNCTION}]},
    ],
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ],
}  # fmt: skip
CLAUDE = {
    "model": MODEL, "max_tokens": 200, "stream": True, "temperature": 1,
    "metadata": {"user_id": "user_1"}, "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
    ],
    "tools": [
        {"name": "Forecast", "description": "The weather", "input_schema": PARAMETERS,
         "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>x</system-reminder>"},
            {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "system", "content": "Available agent types for the Agent tool: none"},
    ],
}  # fmt: skip


def post(path, body):
    """The events of a stream, and what was ignored."""
    headers = {
        "Content-Type": "application/json", "Authorization": f"Bearer {KEY}",
        "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219",
    }  # fmt: skip
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
            ignored = answer.headers.get("x-triptych-ignored", "").split(", ")
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")], ignored


def codex():
    events, ignored = post("/v1/responses", CODEX)
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    for name in ("tools.custom", "tools.web_search", "tools.local_shell", "client_metadata"):
        assert name in ignored, ignored


def codex_tools():
    """A call of an MCP server's function, and the turn after it."""
    choice = {"type": "function", "namespace": "mcp__weather", "name": "forecast"}
    events, _ = post("/v1/responses", {**CODEX, "tool_choice": choice})
    output = events[-1]["response"]["output"]
    (call,) = [item for item in output if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("mcp__weather", "forecast"), call
    assert json.loads(call["arguments"])["city"] in CITIES
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    patch = {"type": "custom_tool_call", "status": "completed", "call_id": "p", "name":
             "apply_patch", "input": "*** Begin Patch"}  # fmt: skip
    patched = {"type": "custom_tool_call_output", "call_id": "p", "output": "Done"}
    search = {"type": "web_search_call", "id": "ws", "status": "completed",
              "action": {"type": "search", "query": "x"}}  # fmt: skip
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "content": None}
    history = [*CODEX["input"], reasoning, *output, result, search, patch, patched]
    events, _ = post("/v1/responses", {**CODEX, "input": history})
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]


def claude_code():
    events, ignored = post("/v1/messages?beta=true", CLAUDE)
    assert events[-1]["type"] == "message_stop", events[-1]
    assert {"context_management", "tools.web_search_20250305"} <= set(ignored), ignored


def claude_code_tools():
    """A call, and the turn after it, with thoughts and tools of another server before."""
    events, _ = post("/v1/messages?beta=true", {**CLAUDE, "tool_choice": ONE_CALL})
    (start,) = [e for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    call = start["content_block"]
    given = "".join(e["delta"].get("partial_json", "") for e in events if "delta" in e)
    assert json.loads(given)["city"] in CITIES
    history = [
        *CLAUDE["messages"],
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "Eq"},
            {"type": "thinking", "thinking": "x", "signature": "Eq"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "tool_use", "id": call["id"], "name": call["name"],
             "input": json.loads(given), "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "is_error": False,
             "content": [{"type": "text", "text": "sunny"}],
             "cache_control": {"type": "ephemeral"}},
            {"type": "document", "title": "notes.txt", "source": {
                "type": "text", "media_type": "text/plain", "data": "Rome is warm."}},
        ]},
    ]  # fmt: skip
    events, _ = post("/v1/messages?beta=true", {**CLAUDE, "messages": history})
    assert events[-1]["type"] == "message_stop", events[-1]


report(
    codex=codex, codex_tools=codex_tools, claude_code=claude_code,
    claude_code_tools=claude_code_tools,
)  # fmt: skip
