"""POST /v1/messages: the handler of Anthropic's Messages API.

It converts a request into a chat request, and the parts of the answer into Anthropic's content
blocks. A stream has Anthropic's events in Anthropic's order.
"""

from collections.abc import Sequence

from msgspec import UNSET, Raw
from starlette.requests import Request

from services.common.errors import InvalidRequest, TriptychError
from services.gateway.endpoints.answer_writer import AnswerWriter
from services.gateway.endpoints.chat_messages import ChatMessages
from services.gateway.endpoints.direct_tokens import DirectTokens
from services.gateway.endpoints.request_context import RequestContext, parse_body, renamed
from services.gateway.endpoints.tokenization import prompt_ids
from services.gateway.forms import messages_api as api
from services.gateway.forms.error_answers import error_of, messages_error
from services.gateway.forms.generation import JsonSchema, JsonSchemaFormat
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import (
    ChatRequest,
    ImageUrlPart,
    Message,
    TextPart,
    check_chat_request,
)
from services.gateway.forms.openai import Part as ContentPart
from services.gateway.forms.parts import Call, Part, Reasoning, Text, join
from services.gateway.forms.responses import Update, encode_json
from services.gateway.forms.tools import (
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolCall,
    ToolChoice,
)
from services.gateway.http.exchange import JsonResponse
from services.gateway.request.chat import ChatService
from services.gateway.request.completion import Completion
from services.gateway.tenancy.slot import Slot

_PATHS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    "tool_choice.function": "tool_choice.name",
}
_STOP_REASONS: dict[str | None, api.StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


async def messages(context: RequestContext, body: Body) -> None:
    """Answers a request for a message, whole or as a stream.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    request = await context.parse(api.parse_messages_request, body)
    chat = to_chat(request, context.paths)
    chat.max_tokens, chat.stop = request.max_tokens, request.stop_sequences
    chat.temperature, chat.top_p = request.temperature, request.top_p
    chat.top_k = request.top_k
    check_chat_request(chat)
    completion = await context.prepare(chat)
    name = context.service.name_in_answer(request.model)
    answer = api.MessageAnswer(f"msg_{context.answer_id}", name, [], api.MessageUsage(0, 0))
    if not request.stream:
        updates = (await context.collect(completion))[0]
        answer.content = blocks([part for update in updates for part in update.parts])
        answer.stop_reason, answer.stop_sequence = _stop(updates[-1])
        answer.usage = _usage(completion)
        await context.exchange.write_json(answer)
        return
    context.writer = writer = MessageWriter(answer, completion)
    sink = DirectTokens(completion, context.exchange, writer)
    await writer.stream(context.service.answer(completion, sink=sink), context.exchange)
    await context.exchange.write(writer.encode(writer.finish()), last=True)


async def count_tokens(
    service: ChatService, request: Request, slot: Slot, body: Body
) -> JsonResponse:
    """Answers POST /v1/messages/count_tokens: counts the tokens of a message's prompt."""
    given = await parse_body(service, api.parse_count_request, body, request.scope)
    paths: dict[str, str] = {}
    try:
        chat = to_chat(given, paths)
        check_chat_request(chat)
        tokens, _ = await prompt_ids(service, chat, slot)
    except TriptychError as error:
        error.param = error.param and renamed(error.param, paths)
        raise
    return JsonResponse(api.TokenCount(len(tokens)))


def to_chat(request: api.CountTokensRequest, paths: dict[str, str]) -> ChatRequest:
    """Converts a request into a chat request.

    Args:
        request: the client's request.
        paths: mapping to which the client's paths of the chat request's fields are added.
    """
    paths |= _PATHS
    messages = _Messages(paths)
    if request.system:
        messages.add(Message("system", _system(request.system)), "system")
    for index, turn in enumerate(request.messages):
        messages.turn(turn, f"messages[{index}]")
    last = messages.found[-1] if messages.found else None
    chat = ChatRequest(messages.found, request.model)
    if last is not None and last.role == "assistant" and not last.tool_calls:
        chat.continue_final_message = True
    if request.tools:
        chat.tools = [
            Tool("function", FunctionDefinition(t.name, t.description, t.input_schema, t.strict))
            for t in request.tools
        ]
        for index in range(len(chat.tools)):
            paths[f"tools[{index}].function"] = f"tools[{index}]"
            paths[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    chat.tool_choice, chat.parallel_tool_calls = _tool_choice(request)
    chat.chat_template_kwargs, chat.cache_salt = request.chat_template_kwargs, request.cache_salt
    thinking, config = request.thinking, request.output_config
    if isinstance(thinking, api.EnabledThinking):
        chat.enable_thinking = True
    elif isinstance(thinking, api.DisabledThinking):
        chat.enable_thinking = False
    if isinstance(thinking, api.AdaptiveThinking):
        chat.include_reasoning = thinking.display != "omitted"
        chat.thinking_token_budget = thinking.budget_tokens or None  # proxies write 0
    if config is not None and config.effort is not None and chat.enable_thinking is not False:
        chat.reasoning_effort = config.effort
    if given := request.output_format or (config and config.format):
        chat.response_format = JsonSchemaFormat(JsonSchema(schema=given.schema))
    if request.output_format:
        paths |= dict.fromkeys(("response_format", "response_format.json_schema"), "output_format")
    return chat


class _Messages(ChatMessages):
    """Chat messages that are converted from turns."""

    def turn(self, turn: api.Turn, path: str) -> None:
        """Adds a turn. Results of tools come before the rest of their turn."""
        if isinstance(turn.content, str):
            self.add(Message(turn.role, turn.content), path)
            return
        parts: list[ContentPart] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        blocks = [(block, f"{path}.content[{at}]") for at, block in enumerate(turn.content)]
        for block, place in blocks:
            if isinstance(block, api.ToolResultBlock):
                self._result(block, place)
        own = f"messages[{len(self.found)}]"
        for block, place in blocks:
            match block:
                case api.ToolResultBlock():
                    continue
                case api.ThinkingBlock():
                    thoughts.append(block.thinking)
                case api.ToolUseBlock():
                    arguments = f"{own}.tool_calls[{len(calls)}].function.arguments"
                    self._paths[arguments] = f"{place}.input"
                    function = FunctionCall(block.name, bytes(block.input).decode())
                    calls.append(ToolCall(block.id, function))
                case _:
                    self._paths[f"{own}.content[{len(parts)}]"] = place
                    parts.append(_part(block, place))
        is_left = turn.content or turn.role == "assistant"
        if not (parts or thoughts or calls) and is_left:
            return  # The turn has only results of tools, or thoughts in a form not read here.
        content: str | list[ContentPart] | None = parts
        if turn.role == "assistant":
            texts = [part.text for part in parts if isinstance(part, TextPart)]
            content = "".join(texts) if texts else None
        message = Message(turn.role, content, tool_calls=calls or None)
        message.reasoning_content = "\n".join(thoughts) or None
        self.add(message, path)

    def _result(self, block: api.ToolResultBlock, path: str) -> None:
        content: str | list[ContentPart]
        if isinstance(block.content, list):
            parts = enumerate(block.content)
            content = [_part(part, f"{path}.content[{index}]") for index, part in parts]
        else:
            content = block.content or ""
        self.add(Message("tool", content, tool_call_id=block.tool_use_id), path)


def _system(given: str | list[api.TextBlock]) -> str | list[ContentPart]:
    return given if isinstance(given, str) else [TextPart(block.text) for block in given]


def _part(block: api.ContentBlock, path: str) -> ContentPart:
    if isinstance(block, api.DocumentBlock) and isinstance(block.source, api.Base64Source):
        # When Claude Code finds these words in an error, it goes on without the file.
        raise InvalidRequest("Could not process PDF: the model reads none", param=path)
    if not isinstance(block, api.ImageBlock):
        return TextPart(block.text)
    source = block.source
    if isinstance(source, api.Base64Source):
        return ImageUrlPart(image_url=f"data:{source.media_type};base64,{source.data}")
    return ImageUrlPart(image_url=source.url)


def _tool_choice(request: api.CountTokensRequest) -> tuple[ToolChoice | None, bool | None]:
    """Returns the tool choice, and whether calls may be parallel."""
    choice = request.tool_choice
    match choice:
        case None:
            return None, None
        case api.NoChoice():
            return "none", None
        case api.AnyChoice():
            found: ToolChoice = "required"
        case api.ToolNameChoice():
            found = FunctionChoice(FunctionName(choice.name))
        case api.AutoChoice():
            found = "auto"
    return found, False if choice.disable_parallel_tool_use else None


def blocks(pieces: Sequence[Part]) -> list[api.AnswerBlock]:
    """Returns the blocks of a whole answer."""
    return [_block(part, part.text) for part in join(pieces)]


def _block(part: Part, text: str) -> api.AnswerBlock:
    match part:
        case Reasoning():
            return api.ThinkingAnswer(text)
        case Call():
            return api.ToolUseAnswer(part.call_id, part.name, Raw(text.encode()))
        case Text():
            return api.TextAnswer(text)


def _delta(part: Part) -> api.Delta:
    match part:
        case Reasoning():
            return api.ThinkingDelta(part.text)
        case Call():
            return api.InputDelta(part.text)
        case Text():
            return api.TextDelta(part.text)


def _stop(update: Update) -> tuple[api.StopReason, str | None]:
    """Returns `stop_reason` and `stop_sequence` of an answer that ended with the update. The reason
    is `tool_use` whenever there are calls, because agents run calls only for this reason.
    """
    if isinstance(update.stop_reason, str) and update.finish_reason != "tool_calls":
        return "stop_sequence", update.stop_reason
    return _STOP_REASONS[update.finish_reason], None


def _usage(completion: Completion) -> api.MessageUsage:
    usage, cached = completion.usage(), completion.cached_tokens or 0
    found = api.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
    if (details := usage.completion_tokens_details) is not UNSET:
        found.output_tokens_details = api.OutputTokensDetails(details.reasoning_tokens)
    return found


class MessageWriter(AnswerWriter[api.MessageEvent]):
    """Writes Anthropic's blocks and events."""

    def __init__(self, answer: api.MessageAnswer, completion: Completion) -> None:
        super().__init__(completion)
        self._answer = answer
        self._index = -1

    def begin(self) -> list[api.MessageEvent]:
        self._answer.usage = usage = _usage(self._completion)
        usage.output_tokens, usage.output_tokens_details = 0, UNSET
        return [api.MessageStart(self._answer)]

    def open(self, part: Part) -> list[api.MessageEvent]:
        self._index += 1
        block = _block(part, "{}" if isinstance(part, Call) else "")
        return [api.BlockStart(self._index, block)]

    def delta(self, part: Part) -> api.MessageEvent:
        return api.BlockDelta(self._index, _delta(part))

    def close(self, part: Part, *, is_last: bool) -> list[api.MessageEvent]:
        is_thought = isinstance(part, Reasoning)
        signature = [api.BlockDelta(self._index, api.SignatureDelta(""))] if is_thought else []
        return [*signature, api.BlockStop(self._index)]

    def end(self) -> list[api.MessageEvent]:
        assert self._last is not None  # an answer has an update at least
        delta = api.MessageDelta(api.StopDelta(*_stop(self._last)), _usage(self._completion))
        return [delta, api.MessageStop()]

    def error_events(self, error: TriptychError) -> bytes:
        answer = messages_error(error.http_status, error_of(error))
        return b"event: error\ndata: " + encode_json(answer) + b"\n\n"

    def kind(self, event: api.MessageEvent) -> str:
        return str(event.__struct_config__.tag)
