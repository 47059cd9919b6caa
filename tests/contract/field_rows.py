"""Fields, parts and shapes that OpenAI's, Anthropic's and vLLM's references have, and histories of
popular programs: what each gets. `test_fields` sends them.

A row: path, what is added to a small request, what it gets. `SERVED`: an answer, and nothing is
ignored; a hint's name: an answer whose header has that name; `refused(param)`: a 400.
"""

from typing import Any, NamedTuple

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SERVED = ""


class Refused(NamedTuple):
    """A 400 with that `param`."""

    param: str


class Row(NamedTuple):
    """One probe."""

    path: str
    fields: dict[str, Any]
    gets: str | Refused


def user(content: object = "hello", **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


def assistant(**more: object) -> dict[str, object]:
    return {"messages": [user(), {"role": "assistant", "content": "x", **more}, user()]}


def part(kind: str, **more: object) -> dict[str, object]:
    return {"messages": [user([{"type": "text", "text": "x"}, {"type": kind, **more}])]}


def items(*found: dict[str, object]) -> dict[str, object]:
    return {"input": [user(), *found, user()]}


def blocks(role: str, *found: dict[str, object]) -> dict[str, object]:
    turn = {"role": role, "content": [{"type": "text", "text": "x"}, *found]}
    return {"messages": [user(), turn, user()] if role == "assistant" else [turn]}


def server_tool(kind: str, **more: object) -> dict[str, object]:
    return {"tools": [{"type": kind, **more}]}


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": False}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUT = {**CALL, "function": {"name": "f", "arguments": '{"a": "'}}
VIDEO = "data:video/mp4;base64,AAAA"
IMAGE = "data:image/png;base64,iVBORw0KGgo="

# Served by chat and by text completions.
_GENERATION: dict[str, object] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1}, "seed": 1, "n": 2,
    "stop": ["x"], "stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["x"],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True,
    "min_tokens": 1, "cache_salt": "x", "response_format": {"type": "text"},
    "structured_outputs": {"choice": ["a"]}, "return_token_ids": True, "prompt_logprobs": 1,
    "return_tokens_as_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": "right",
    "priority": 1,
}  # fmt: skip
_HINTS: dict[str, object] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "safety_identifier": "x",
    "service_tier": "auto", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "prompt_cache_options": {"x": 1}, "request_id": "r", "session_id": "s",
    "client_metadata": {"a": "b"},
    "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1,
    "spaces_between_special_tokens": True, "watermarking": False, "detokenize": True,
    "return_weight_versions": False, "routed_experts_prompt_start": 0, "stream_interval": 1,
    "return_token_offsets": True, "mm_payload": "none", "return_mm_kwargs": False,
    "return_prompt_text": False, "guided_json": None, "guided_regex": None, "kv_transfer_params":
    None, "vllm_xargs": {}, "logits_processors": [], "repetition_detection": None,
    "ec_transfer_params": None, "mirostat": None,
}  # fmt: skip
_REFUSED: dict[str, object] = {
    "use_beam_search": True, "length_penalty": 2.0, "best_of": 2, "guided_json": {"type": "object"},
    "guided_regex": "a", "kv_transfer_params": {"a": 1}, "logits_processors": ["x"],
    "repetition_detection": {"max_pattern_size": 4}, "mirostat": 2, "grammar": "root ::= [a]",
    "no_such_field": 1, "spaces_between_special_tokens": False, "stream_interval": 4,
    "return_weight_versions": True, "vllm_xargs": {"a": 1},
}  # fmt: skip


def _rows(path: str, fields: dict[str, object], *, hint: bool = False) -> list[Row]:
    return [Row(path, {k: v}, k if hint else SERVED) for k, v in fields.items()]


def _refused(path: str, fields: dict[str, object]) -> list[Row]:
    return [Row(path, {name: value}, Refused(name)) for name, value in fields.items()]


_CHAT_ROWS = [
    *_rows(CHAT, {
        "max_tokens": 5, "max_completion_tokens": 5, "logprobs": True, "tools": [TOOL],
        "tool_choice": "none", "parallel_tool_calls": False, "include_reasoning": False,
        "chat_template_kwargs": {}, "add_generation_prompt": True, "include_stage_times": True,
        "mm_processor_kwargs": {"fps": 1.5, "cap_pixels_per_frame": True}, "echo": True,
        "prediction": {"type": "content", "content": "x"},
        "stream": False, "stream_options": None, "min_pixels": None,
        "media_io_kwargs": {"video": {"num_frames": -1}},
    }),
    Row(CHAT, {"mm_processor_kwargs": {"fps": 2, "do_sample_frames": True}}, SERVED),
    Row(CHAT, {"logprobs": True, "top_logprobs": 2}, SERVED),
    Row(CHAT, {"logprobs": True, "logprob_token_ids": [5]}, SERVED),
    Row(CHAT, {"messages": [user(), {"role": "assistant", "content": "x"}], "echo": True,
               "continue_final_message": True, "add_generation_prompt": False}, SERVED),
    Row(CHAT, {"messages": [user(), {"role": "assistant", "content": ""}],
               "continue_final_message": True, "add_generation_prompt": False}, SERVED),
    *[Row(CHAT, {"response_format": {"type": "json_object", **more}}, SERVED)
      for more in ({}, {"schema": SCHEMA}, {"schema": None})],
    Row(CHAT, {"response_format": {"type": "json_object", "schema": 1}},
        Refused("response_format.schema")),
    Row(CHAT, {"max_tokens": 5, "max_completion_tokens": 3}, SERVED),
    # Empty objects as PHP writes them.
    Row(CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}],
               "logit_bias": [], "stream_options": None}, SERVED),
    Row(RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": []}]}, SERVED),
    Row(MESSAGES, {"tools": [{"name": "f", "input_schema": []}]}, SERVED),
    Row(CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        Refused("tools[0].function.parameters")),
    Row(CHAT, {"response_format": []}, Refused("response_format.type")),
    Row(CHAT, {"tools": []}, SERVED),
    Row(CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
    Row(CHAT, {"thinking_token_budget": -2}, Refused("thinking_token_budget")),
    Row(CHAT, part("image_url", image_url=None, uuid="new"), Refused("messages[0].content[1]")),
    Row(CHAT, {"tools": [], "tool_choice": "auto"}, SERVED),
    Row(CHAT, {"stream": True, "stream_options": {"include_usage": True}}, SERVED),
    Row(CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}},
        "stream_options.include_obfuscation"),
    *_rows(CHAT, {
        "reasoning_effort": "high", "enable_thinking": True, "verbosity": "low", "functions": [],
        "function_call": "auto", "modalities": ["text"], "audio": None, "web_search_options": None,
        "add_special_tokens": False, "documents": None, "chat_template": None,
        "separate_reasoning": True, "moderation": None,
    }, hint=True),
    Row(CHAT, {"think": True}, "enable_thinking"),
    Row(CHAT, {"think": "low"}, "reasoning_effort"),
    Row(CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
    Row(CHAT, {"enable_thinking": False}, "enable_thinking"),
    *_refused(CHAT, {
        "functions": [FUNCTION], "function_call": {"name": "f"}, "modalities": ["text", "audio"],
        "audio": {"voice": "x"}, "web_search_options": {"search_context_size": "low"},
        "add_special_tokens": True, "documents": [{"text": "x"}],
        "chat_template": "x", "suffix": "x", "prompt": "x", "separate_reasoning": False,
        "tool_choice": "required", "reasoning_effort": "extreme", "moderation": {"a": 1},
    }),
    Row(CHAT, {"media_io_kwargs": {"image": {"mode": "L"}}}, Refused("media_io_kwargs.image")),
    Row(CHAT, {"tools": [{"type": "web_search"}, TOOL]}, "tools.web_search"),
    Row(CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.custom"),
    Row(CHAT, {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}, "tools.cache_control"),
    Row(CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        Refused("tool_choice")),
    Row(CHAT, {"tools": [{"type": "function"}]}, Refused("tools[0].function")),
    Row(CHAT, {"tools": [{"type": "web_search"}, {"type": "function"}]},
        Refused("tools[1].function")),
    Row(CHAT, {"tools": [{"type": "x"}, TOOL, TOOL]}, Refused("tools[2].function.name")),
    # Messages of LiteLLM, OpenRouter, LangChain, the SDKs.
    *[
        Row(CHAT, assistant(**{name: value}), f"messages.{name}")
        for name, values in {
            "provider_specific_fields": (None, {}, {"refusal": None}),
            "thinking_blocks": (None, [], [{"type": "thinking", "thinking": "x"}]),
            "reasoning_details": (None, [], [{"type": "reasoning.text", "text": "x"}]),
            "images": (None, [], [{"type": "image_url", "image_url": {"url": "x"}}]),
            "annotations": ([], [{"type": "url_citation"}]),
            "refusal": (None,), "audio": (None, {"id": "x"}), "function_call": (None,),
            "name": ("x",),
            "id": ("x",), "created": (1,), "parsed": ({},), "unheard_of": (None, {}, [], ""),
        }.items()
        for value in values
    ],
    *[
        Row(CHAT, assistant(**{name: value}), Refused(f"messages[1].{name}"))
        for name, value in {
            "refusal": 1, "unheard_of": 1,
        }.items()
    ],
    Row(CHAT, assistant(tool_calls=[]), SERVED),
    Row(CHAT, assistant(tool_calls=[CUT]), "messages.tool_calls"),
    Row(CHAT, {"messages": [user(), {"role": "tool", "tool_call_id": "c", "content": None}]},
        SERVED),
    Row(CHAT, assistant(reasoning="x", reasoning_content=None), SERVED),
    Row(CHAT, assistant(content=[{"type": "thinking", "thinking": "x"}]),
        "messages.content.thinking"),
    Row(CHAT, {"messages": [{"role": "system", "content": "a"}, {"role": "developer", "content":
        [{"type": "text", "text": "b"}]}, user()]}, SERVED),
    Row(CHAT, assistant(function_call={"name": "f", "arguments": "{}"}), SERVED),
    Row(CHAT, assistant(refusal="no"), SERVED),
    Row(CHAT, {"messages": [user(), {"role": "function", "content": "x", "name": "f"}]}, SERVED),
    Row(CHAT, {"messages": [user(), {"role": "function", "content": "x"}]},
        Refused("messages[1].role")),
    Row(CHAT, {"messages": [user(refusal="no")]}, Refused("messages[0].refusal")),
    Row(CHAT, {"messages": [user(), {"role": "critic", "content": "x"}]},
        Refused("messages[1].role")),
    Row(CHAT, part("input_text", text="x"), SERVED),
    Row(CHAT, part("text", text="x", cache_control={"type": "ephemeral"}),
        "messages.content.cache_control"),
    # As @openai/agents sends an answer back.
    Row(CHAT, assistant(tool_calls=[CALL], reasoning="r", content=[{
        "type": "text", "text": "x", "role": "assistant", "refusal": None, "tool_calls": [CALL],
        "reasoning": "r", "reasoning_content": "r"}]), "messages.content.tool_calls"),
    Row(CHAT, part("input_audio", input_audio={}), Refused("messages[0].content[1].type")),
    Row(CHAT, part("file", file={}), Refused("messages[0].content[1].type")),
    Row(CHAT, part("video_url", video_url={}), Refused("messages[0].content[1].video_url.url")),
    Row(CHAT, part("video_url", video_url=VIDEO, uuid="x"), Refused("messages[0].content[1].uuid")),
    Row(CHAT, part("video_url", video_url={"url": VIDEO, "max_dynamic_patch": 4}),
        Refused("messages[0].content[1].video_url.max_dynamic_patch")),
    Row(CHAT, part("video", video=[], total_pixels=9), Refused("messages[0].content[1]")),
    Row(CHAT, part("video", video=[], nframes=9), Refused("messages[0].content[1].nframes")),
    Row(CHAT, part("video", video=[], sample_fps="0"),
        Refused("messages[0].content[1].sample_fps")),
    Row(CHAT, part("input_video", video_url=""), Refused("messages[0].content[1]")),
    Row(CHAT, part("text", text="x", unheard_of=1), Refused("messages[0].content[1].unheard_of")),
    Row(CHAT, {"tools": [TOOL], "messages": [user(), {
        "role": "assistant", "content": None,
        "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": {"a": 1}}],
    }, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
        "messages.tool_calls.provider_specific_fields"),
]  # fmt: skip

_TEXT_ROWS = [
    *_rows(
        TEXT,
        {
            "max_tokens": 5,
            "echo": True,
            "logprobs": 1,
            "add_special_tokens": False,
            "stream": False,
            "stream_options": None,
        },
    ),
    Row(TEXT, {"prompt": [1, 2, 3]}, SERVED),
    Row(TEXT, {"logprobs": 1, "logprob_token_ids": [5]}, SERVED),
    Row(TEXT, {"thinking_token_budget": 5}, Refused("thinking_token_budget")),
    *_rows(TEXT, {"suffix": "", "prompt_embeds": None, "tools": [], "moderation": None}, hint=True),
    *_refused(TEXT, {"suffix": "x", "prompt_embeds": "x", "tools": [TOOL], "messages": [user()]}),
]

_RESPONSE_ROWS = [
    *_rows(RESPONSES, {
        "instructions": "x", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
        "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "stop": "x", "ignore_eos": True,
        "top_logprobs": 2, "include": ["message.output_text.logprobs"], "tools": [FLAT],
        "tool_choice": "none", "parallel_tool_calls": False, "reasoning": {"summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "cache_salt": "x", "stream": True, "stream_options": None, "metadata": {"a": "b"},
        "user": "u", "store": False, "truncation": "auto", "presence_penalty": 1,
        "frequency_penalty": 1, "logit_bias": {"5": 1}, "stop_token_ids": [5],
        "include_stop_str_in_output": True, "skip_special_tokens": False,
        "include_reasoning": False, "structured_outputs": {"choice": ["a"]},
        "mm_processor_kwargs": {}, "media_io_kwargs": {}, "priority": 1, "chat_template_kwargs": {},
    }),
    Row(RESPONSES, {"thinking_token_budget": 5}, "thinking_token_budget"),

    *_rows(RESPONSES, {
        "safety_identifier": "x", "service_tier": "auto", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "prompt_cache_options": {"x": 1}, "client_metadata":
        {"a": "b"}, "background": False, "conversation": None, "prompt": None, "max_tool_calls": 3,
        "context_management": [{"type": "compaction"}], "enable_response_messages": False,
        "request_id": "r", "session_id": "s", "mm_payload": "none", "moderation": None,
        "use_beam_search": False, "access_programs": None, "image": None,
        "ec_transfer_params": None, "kv_transfer_params": None,
        "previous_input_messages": [], "return_mm_kwargs": False, "vllm_xargs": None,
        "spaces_between_special_tokens": True, "watermarking": False,
    }, hint=True),
    *_refused(RESPONSES, {
        "background": True, "conversation": "c", "prompt": {"id": "x"}, "image": "x",
        "enable_response_messages": True, "moderation": {"a": 1}, "access_programs": ["x"],
        "kv_transfer_params": {"a": 1}, "previous_input_messages": [{"a": 1}],
        "spaces_between_special_tokens": False, "vllm_xargs": {"a": 1},
        "background_options": {"completion_window": "2h"},
    }),
    *[
        Row(RESPONSES, {"tools": [{"type": kind}, FLAT]}, f"tools.{kind}")
        for kind in ("web_search", "custom", "local_shell", "image_generation", "file_search",
                     "code_interpreter", "mcp", "tool_search", "apply_patch", "computer")
    ],
    Row(RESPONSES, {"tools": [{"type": "namespace", "name": "m", "tools": [FLAT]}]}, SERVED),
    Row(RESPONSES, {"tools": [{"type": "namespace", "name": "m", "tools": [
        {"type": "custom", "name": "x"}, FLAT]}]}, "tools.tools.custom"),
    Row(RESPONSES, {"include": ["web_search_call.action.sources"]},
        "include.web_search_call.action.sources"),
    Row(RESPONSES, {"include": ["no_such_part"]}, Refused("include[0]")),
    Row(RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, SERVED),
    Row(RESPONSES, {"text": {"format": {"type": "json_object", "schema": [1]}}},
        Refused("text.format.schema")),
    Row(RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    Row(RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    Row(RESPONSES, items({"type": "web_search_call", "id": "x"}), "input.web_search_call"),
    Row(RESPONSES, items({"type": "compaction", "encrypted_content": "x"}), "input.compaction"),
    Row(RESPONSES, items({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
                         {"type": "custom_tool_call_output", "call_id": "c", "output": "y"}),
        SERVED),
    Row(RESPONSES, items({"type": "function_call", "call_id": "c", "name": "f", "namespace": "m",
                          "arguments": "{}"},
                         {"type": "function_call_output", "call_id": "c", "output": "y"}), SERVED),
    Row(RESPONSES, items({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
        "input.encrypted_content"),
    Row(RESPONSES, {"previous_response_id": None}, SERVED),
    Row(RESPONSES, {"store": True}, SERVED),
    *[Row(RESPONSES, items({"type": kind}), f"input.{kind}")
      for kind in ("mcp_call", "mcp_approval_request", "mcp_approval_response", "mcp_list_tools",
                   "code_interpreter_call", "file_search_call", "image_generation_call",
                   "program", "program_output", "compaction_trigger")],
    Row(RESPONSES, items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                          "async": True}), "input.async"),
    Row(RESPONSES, items({"type": "computer_call_output"}), Refused("input[1].output")),
    Row(RESPONSES, items({"type": "shell_call"}), Refused("input[1].action")),
    Row(RESPONSES, items({"type": "shell_call", "action": {}}), Refused("input[1].call_id")),
    Row(RESPONSES, items({"type": "apply_patch_call", "id": "x"}), Refused("input[1].operation")),
    # Developers send them; without them the answer would be another.
    Row(RESPONSES, items({"type": "additional_tools", "role": "developer", "tools": []}),
        Refused("input[1].type")),
    Row(RESPONSES, items({"type": "configuration_update"}), Refused("input[1].type")),
]  # fmt: skip

_MESSAGE_ROWS = [
    *_rows(MESSAGES, {
        "system": "x", "stop_sequences": ["x"], "stream": True, "temperature": 0.5, "top_p": 0.5,
        "top_k": 5, "thinking": {"type": "adaptive"}, "tool_choice": {"type": "none"},
        "max_tokens": 5, "cache_salt": "x", "chat_template_kwargs": {},
    }),
    *_rows(MESSAGES, {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "inference_geo": "eu", "speed":
        "fast", "diagnostics": {}, "user_profile_id": "x", "workspace_id": "x", "betas": ["x"],
        "cache_control": {"type": "ephemeral"}, "context_management": {"edits": [{"type": "x"}]},
        "container": None, "mcp_servers": [], "compaction": None, "fallbacks": None,
        "billing_policy": None, "fallback_credit_token": None,
        "ec_transfer_params": None, "kv_transfer_params": {}, "mm_payload": "", "vllm_xargs": None,
        "return_mm_kwargs": None, "watermarking": None,
    }, hint=True),
    *_refused(MESSAGES, {
        "container": "x", "mcp_servers": [{"type": "url"}], "compaction": {"a": 1},
        "fallbacks": ["x"], "thread": "x", "no_such_field": 1,
    }),
    Row(MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    Row(MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens"),
    Row(MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
        "thinking.budget_tokens"),
    Row(MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, SERVED),
    Row(MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
    *[Row(MESSAGES, {"messages": [user(), {"role": "assistant", "content": content}]}, SERVED)
      for content in ("", [], [{"type": "text", "text": ""}])],
    Row(MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, SERVED),
    Row(MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, SERVED),
    Row(MESSAGES, {"output_format": {"type": "json_schema", "schema": []}},
        Refused("output_format.schema")),
    Row(MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}, "output_config": {
        "format": {"type": "json_schema", "schema": SCHEMA}}}, Refused("output_format")),
    Row(MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    Row(MESSAGES, {"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget"),
    *[
        Row(MESSAGES, server_tool(kind, name="x"), f"tools.{kind}")
        for kind in ("web_search_20250305", "bash_20250124", "text_editor_20250728",
                     "code_execution_20250825", "web_fetch_20250910")
    ],
    Row(MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": True}]},
        Refused("tools[0].defer_loading")),
    *[
        Row(MESSAGES, blocks("assistant", {"type": kind}), f"messages.content.{kind}")
        for kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result",
                     "code_execution_tool_result", "tool_search_tool_result", "compaction",
                     "advisor_tool_result", "mcp_tool_listing", "fallback")
    ],
    Row(MESSAGES, blocks("assistant", {"type": "thinking", "thinking": "x", "signature": "s"}),
        "messages.content.signature"),
    Row(MESSAGES, blocks("user", {"type": "document", "title": "t", "source": {
        "type": "text", "media_type": "text/plain", "data": "x"}}), SERVED),
    Row(MESSAGES, blocks("user", {"type": "document", "source": {
        "type": "content", "content": [{"type": "text", "text": "x"}]},
        "citations": {"enabled": True}}), "messages.content.citations"),
    Row(MESSAGES, blocks("user", {"type": "document", "source": {
        "type": "base64", "media_type": "application/pdf", "data": "x"}}),
        Refused("messages[0].content[1]")),
    Row(MESSAGES, blocks("user", {"type": "search_result", "source": "s", "title": "t",
                                  "content": [{"type": "text", "text": "x"}]}), SERVED),
    Row(MESSAGES, blocks("user", {"type": "search_result", "source": "s", "title": "t"}),
        Refused("messages[0].content[1].content")),
]  # fmt: skip

ROWS = [
    *(row for path in (CHAT, TEXT) for row in _rows(path, _GENERATION)),
    *(row for path in (CHAT, TEXT) for row in _rows(path, _HINTS, hint=True)),
    *_rows(TEXT, {"prediction": {"type": "content", "content": "x"}}, hint=True),
    *(row for path in (CHAT, TEXT) for row in _refused(path, _REFUSED)),
    *_CHAT_ROWS, *_TEXT_ROWS, *_RESPONSE_ROWS, *_MESSAGE_ROWS,
]  # fmt: skip
