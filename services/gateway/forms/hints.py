"""The table of fields that change no answer.

A field that is not served is removed from a request if the field is null, is empty, or has a value
that this table lists. The response names the removed fields in a header. A field with any other
value is refused by its name. `ignored` applies the table, and docs/fields.md shows it.

A field belongs into the table only if an answer that ignores the field is a right answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# In place of values of a field, or of types of elements: all of them.
ANY = None
Values = tuple[object, ...] | None


@dataclass(frozen=True, slots=True)
class Hints:
    """Fields of some objects that change no answer.

    Attributes:
        objects: names of structs in `forms`.
        fields: name of a field -> values that are ignored besides null and empty values. `ANY` if
            every value is ignored.
        why: reason why the fields change no answer, as a verb and its object, for the
            documentation.
    """

    objects: Sequence[str]
    fields: Mapping[str, Values]
    why: str


def _all(names: str) -> dict[str, Values]:
    return dict.fromkeys(names.split(), ANY)


_CHAT, _TEXT, _RESPONSES = "ChatRequest", "CompletionRequest", "ResponsesRequest"
_MESSAGES = ("MessagesRequest", "CountTokensRequest")
_SEARCH = ("EmbeddingRequest", "PoolingRequest", "RerankRequest", "ScoreRequest")
_CHAT_PARTS = (
    "TextPart", "InputTextPart", "ImageUrlPart", "InputImagePart", "NamedImagePart",
    "VideoUrlPart", "InputVideoPart", "NamedVideoPart",
)  # fmt: skip
_RESPONSE_PARTS = ("ResponseOutputText", "ResponseImage", "ResponseReasoningText")
_BLOCKS = (
    "TextBlock", "ImageBlock", "ThinkingBlock", "ToolUseBlock", "ToolResultBlock", "DocumentBlock",
    "SearchResultBlock",
)  # fmt: skip

TABLE: Sequence[Hints] = (
    Hints(
        (_CHAT, _TEXT, _RESPONSES),
        _all(
            "safety_identifier service_tier prompt_cache_key prompt_cache_retention "
            "prompt_cache_options request_id session_id client_metadata"
        ),
        "say who asks, how it is billed and cached",
    ),
    Hints(
        _SEARCH,
        {**_all("user metadata request_id safety_identifier add_generation_prompt "
                "continue_final_message"),
         "late_chunking": (False,), "return_multivector": (False,), "truncate": (False,),
         "embedding_type": ("float",), "encoding_type": ("float",),
         "add_special_tokens": (True,), "normalize": (True,), "normalized": (True,),
         "embed_dtype": ("float32", "auto"), "endianness": ("native", "little"),
         "use_activation": (True,), "softmax": (True,), "activation": (True,),
         "max_chunks_per_doc": (), "rank_fields": (["text"],)},
        "say who asks, or ask for what the model's template does",
    ),
    Hints((_TEXT, _RESPONSES), _all("prediction"), "make an answer faster, if it is a chat's"),
    Hints((_CHAT, _TEXT), _all("user metadata store"), "say who asks; nothing is stored"),
    Hints(
        _MESSAGES,
        _all(
            "metadata service_tier inference_geo speed diagnostics user_profile_id workspace_id "
            "betas cache_control context_management"
        ),
        "say who asks, how it is billed and cached; the context is never edited",
    ),
    Hints(
        (_CHAT,),
        {"verbosity": ANY, "audio": (), "functions": (), "web_search_options": (),
         "function_call": ("none", "auto"), "modalities": (["text"],)},
        "ask for what there is no switch for, or for nothing",
    ),
    Hints(
        (_CHAT, _TEXT, _RESPONSES),
        {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
         "best_of": (1,), "spaces_between_special_tokens": (True,), "watermarking": (False,),
         "detokenize": (True,), "return_weight_versions": (False,),
         "return_prompt_text": (False,), "routed_experts_prompt_start": (0,),
         "stream_interval": (1,), **_all("return_token_offsets mm_payload return_mm_kwargs")},
        "are vLLM's, with its defaults",
    ),
    Hints(
        (_CHAT,),
        {"add_special_tokens": (False,), "documents": (), "chat_template": (),
         "separate_reasoning": (True,), "stream_reasoning": (True,)},
        "are vLLM's and SGLang's, with their defaults",
    ),
    Hints((_TEXT,), {"suffix": (), "prompt_embeds": ()}, "ask for nothing"),
    Hints(
        (_RESPONSES,),
        {"conversation": (), "prompt": (), "background": (False,), "enable_response_messages":
         (False,), **_all("max_tool_calls context_management")},
        "limit tools and compaction, of which the gateway runs none, or ask for nothing",
    ),
    Hints(("TextConfig",), _all("verbosity"), "ask for what there is no switch for"),
    Hints(("OutputConfig",), _all("task_budget"), "ask for what there is no switch for"),
    Hints(
        ("StreamOptions", "ResponseStreamOptions"), _all("include_obfuscation"),
        "hide lengths from observers of the network",
    ),
    Hints(("StructuredOutputs",), {
        "disable_any_whitespace": (False,), "disable_additional_properties": (False,),
        "disable_fallback": ANY, "whitespace_pattern": (), "structural_tag": (),
    }, "are vLLM's, with its defaults"),
    Hints(
        ("Message",),
        {**_all(
            "name id created created_at timestamp parsed cache_control provider_specific_fields "
            "thinking_blocks reasoning_details reasoning_signature extra_content images "
            "annotations citations response_metadata additional_kwargs "
            "audio function_call"
        ), "refusal": ()},
        "name a participant, or come back with an earlier answer",
    ),
    Hints(
        ("ToolCall", "FunctionCall"),
        _all("index parsed_arguments provider_specific_fields extra_content cache_control caller"),
        "come back with an earlier answer",
    ),
    Hints(
        ("Tool", "FunctionDefinition", "ResponseFunction", "ToolDefinition"),
        {**_all("cache_control allowed_callers eager_input_streaming input_examples "
                "output_schema"), "defer_loading": (False,), "async": (False,)},
        "say who may call a tool, and when",
    ),
    Hints(
        _CHAT_PARTS + _RESPONSE_PARTS,
        _all("cache_control prompt_cache_breakpoint annotations citations logprobs id index role "
             "reasoning reasoning_content tool_calls provider_specific_fields"),
        "end a cached prefix, or come back with an earlier answer",
    ),
    Hints(("ImageUrl",), _all("format"), "guess what the bytes decide"),
    Hints(
        ("InputItem",),
        _all("status phase summary encrypted_content created_by cache_control execution caller "
             "async"),
        "come back with an earlier answer",
    ),
    Hints(
        _BLOCKS,
        _all("cache_control citations signature caller is_error toolset_name"),
        "end a cached prefix, or come back with an earlier answer",
    ),
    Hints(("Turn",), _all("id cache_control name"), "come back with an earlier answer"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a list that are left out, by their `type`.

    Attributes:
        lists: places of the lists, as `Struct.field`.
        why: description of the elements, for the documentation.
        types: types of the elements that are left out. `ANY` if only the types in `but` stay.
        but: types of the elements that stay if `types` is `ANY`. The entry None stands for elements
            without a type.
    """

    lists: Sequence[str]
    why: str
    types: frozenset[str] | None = ANY
    but: Sequence[str | None] = ()

    def leaves_out(self, kind: object) -> bool:
        """Returns whether an element of this type is left out."""
        if not isinstance(kind, str):
            return False
        return kind not in self.but if self.types is None else kind in self.types


LEFT_OUT: Sequence[Elements] = (
    Elements(
        ("ChatRequest.tools", "TokenizeRequest.tools"),
        "tools of other types than `function`: the gateway runs none",
        but=("function",),
    ),
    Elements(
        ("ResponsesRequest.tools", "ResponseNamespace.tools"),
        "tools of other types than `function` and `namespace`: the gateway runs none",
        but=("function", "namespace"),
    ),
    Elements(
        tuple(f"{name}.tools" for name in _MESSAGES),
        "tools with a `type` of Anthropic's: the gateway runs none",
        but=("custom", None),
    ),
    Elements(
        ("ResponsesRequest.include",),
        "parts of tools and inputs that answers do not have",
        frozenset((
            "code_interpreter_call.outputs", "computer_call_output.output.image_url",
            "file_search_call.results", "message.input_image.image_url",
            "web_search_call.action.sources", "web_search_call.results",
        )),
    ),
    Elements(
        ("ResponsesRequest.input",),
        "items of tools that another server ran",
        frozenset((
            "web_search_call", "file_search_call", "code_interpreter_call",
            "image_generation_call", "mcp_list_tools", "mcp_call", "mcp_approval_request",
            "mcp_approval_response", "tool_search_call", "tool_search_output", "program",
            "program_output", "compaction", "compaction_summary", "compaction_trigger",
            "ghost_snapshot",
        )),
    ),
    Elements(
        ("Message.content",),
        "thoughts of an earlier answer as parts",
        frozenset(("thinking", "redacted_thinking", "reasoning")),
    ),
    Elements(
        ("Turn.content", "ToolResultBlock.content"),
        "thoughts that only their server reads, and tools that another server ran",
        frozenset((
            "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result",
            "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
            "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
            "tool_search_tool_result", "advisor_tool_result", "mcp_tool_listing", "fallback",
            "tool_reference", "container_upload", "compaction",
        )),
    ),
)  # fmt: skip


def _by_object() -> dict[str, dict[str, Values]]:
    found: dict[str, dict[str, Values]] = {}
    for hints in TABLE:
        for name in hints.objects:
            found.setdefault(name, {}).update(hints.fields)
    return found


BY_OBJECT: Mapping[str, Mapping[str, Values]] = _by_object()
BY_LIST: Mapping[str, Elements] = {name: found for found in LEFT_OUT for name in found.lists}
