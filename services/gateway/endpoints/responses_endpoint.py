"""POST /v1/responses: the handler of OpenAI's Responses API.

It converts a request into a chat request, and the parts of the answer into OpenAI's output items. A
stream has OpenAI's events in OpenAI's order, numbered from 0.
"""

from collections.abc import Sequence
from copy import deepcopy
from secrets import token_hex

from msgspec import UNSET, structs

from services.common.errors import InvalidImage, InvalidRequest, TriptychError
from services.gateway.endpoints.answer_writer import AnswerWriter
from services.gateway.endpoints.chat_messages import ChatMessages
from services.gateway.endpoints.request_context import RequestContext, now, renamed
from services.gateway.endpoints.stored_responses import StoredResponses
from services.gateway.endpoints.truncation import draft_with_room
from services.gateway.forms import responses_api as api
from services.gateway.forms.generation import JsonSchemaFormat, SamplingFields, TextFormat
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import (
    ChatRequest,
    Message,
    TextPart,
    check_chat_request,
)
from services.gateway.forms.openai import Part as ContentPart
from services.gateway.forms.parts import Call, Part, Reasoning, Text
from services.gateway.forms.responses import CompletionTokensDetails, encode_json
from services.gateway.forms.tools import (
    AllowedFunctions,
    AllowedTools,
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolCall,
    ToolChoice,
)
from services.gateway.media.images import Image
from services.gateway.request.completion import Completion

_RANDOM_ID_BYTES = 20  # 160 bits, which nobody guesses
_PATHS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice.name",
    "tool_choice.allowed_tools": "tool_choice",
}
_KINDS: dict[type[Part], str] = {
    Reasoning: "reasoning_text",
    Call: "function_call_arguments",
    Text: "output_text",
}


async def responses(stored: StoredResponses, context: RequestContext, body: Body) -> None:
    """Answers a request for a response, whole or as a stream, and stores the response.

    Args:
        stored: earlier responses, which the request may continue or refer to.
        context: the request that is served.
        body: the request's body.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    service, exchange, tenant = context.service, context.exchange, context.slot.tenant.name
    request = await context.parse(api.parse_responses_request, body)
    before = await stored.items_until(tenant, request.previous_response_id)
    if isinstance(request.input, list):
        await stored.resolve(tenant, request.input)
    chat = to_chat(request, context.paths, before)
    check_chat_request(chat)
    draft = None
    if request.truncation == "auto":
        with context.timings.measure("tokenize"):
            draft = await draft_with_room(service, chat)
    completion = await context.prepare(chat, draft=draft)
    # Several requests may have the same client's id, and others may know it. Whoever knows the
    # response's id can read the stored response, so a random part makes the id a secret.
    name = f"{context.answer_id}-{token_hex(_RANDOM_ID_BYTES)}"
    model = service.name_in_answer(request.model)
    context.writer = writer = ResponseWriter(request, name, completion, model)
    if request.stream:
        await writer.stream(service.answer(completion, holds_updates=True), exchange)
    else:
        for update in (await context.collect(completion))[0]:
            writer.update(update)
    events = writer.finish()
    images = {
        renamed(image.param, context.paths): image.data
        for image in completion.images
        if isinstance(image, Image)
    }
    await stored.store(tenant, request, writer.response, images)
    if request.stream:
        await exchange.write(writer.encode(events), last=True)
    else:
        await exchange.write_json(writer.response)


def to_chat(
    request: api.ResponsesRequest, paths: dict[str, str], before: Sequence[api.InputItem] = ()
) -> ChatRequest:
    """Converts a request into a chat request.

    Instructions and system messages at the beginning of the input become one system message,
    because many models accept only one.

    Args:
        request: the client's request.
        paths: mapping to which the client's paths of the chat request's fields are added.
        before: items of the turns that the request continues.
    """
    paths |= _PATHS
    messages = _Messages(paths)
    if request.instructions:
        messages.system(request.instructions, "instructions")
    for item in before:
        messages.item(item, "previous_response_id")
    if isinstance(request.input, str):
        messages.add(Message("user", request.input), "input")
    else:
        for index, item in enumerate(request.input):
            messages.item(item, f"input[{index}]")
    messages.join_systems()
    reasoning = request.reasoning
    logprobs = bool(request.top_logprobs) or (
        "message.output_text.logprobs" in (request.include or ())
    )
    chat = ChatRequest(messages.found, request.model)
    chat.max_completion_tokens = request.max_output_tokens
    for name in (
        *SamplingFields.__struct_fields__, "include_reasoning", "thinking_token_budget",
        "mm_processor_kwargs", "media_io_kwargs", "chat_template_kwargs", "parallel_tool_calls",
    ):  # fmt: skip
        setattr(chat, name, getattr(request, name))
    chat.logprobs, chat.top_logprobs = logprobs or None, request.top_logprobs
    chat.tools, chat.tool_choice = _tools(request, paths), _tool_choice(request)
    chat.reasoning_effort = reasoning.effort if reasoning else None
    given = request.text.format if request.text else None
    is_named = isinstance(given, api.NamedJsonSchema)
    chat.response_format = JsonSchemaFormat(given) if is_named else given
    return chat


class _Messages(ChatMessages):
    """Chat messages that are converted from items."""

    def __init__(self, paths: dict[str, str]) -> None:
        super().__init__(paths)
        self._systems: list[str] = []  # texts of the last message, if it is a system message

    def system(self, text: str, path: str) -> None:
        """Adds a system message, or joins its text to a system message right before it."""
        if not self._systems:
            self.add(Message("system", text), path)
        self._systems.append(text)

    def add(self, message: Message, path: str) -> None:
        self.join_systems()
        super().add(message, path)

    def join_systems(self) -> None:
        """Joins the texts of neighbouring system messages. All are joined at once, because text
        that grows piece by piece is copied each time.
        """
        if len(self._systems) > 1:
            self.found[-1].content = "\n\n".join(self._systems)
        self._systems = []

    def item(self, item: api.InputItem, path: str) -> None:
        """Adds an item. Reasoning, text and calls of one turn become one assistant message."""
        match item.type:
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else ()
                thoughts = (p for p in parts if isinstance(p, api.ResponseReasoningText))
                text = "".join(thought.text for thought in thoughts)
                if text:
                    self.add(Message("assistant", None, reasoning_content=text), path)
            case "function_call" | "custom_tool_call":
                arguments = item.arguments or ""
                if item.input is not None:
                    arguments = encode_json({"input": item.input}).decode()
                function = FunctionCall(api.flat(item.name or "", item.namespace), arguments)
                message = self._assistant(path)
                calls = message.tool_calls = message.tool_calls or []
                place = f"messages[{len(self.found) - 1}].tool_calls[{len(calls)}].function"
                self._paths[place] = path
                calls.append(ToolCall(item.call_id or "", function))
            case "function_call_output" | "custom_tool_call_output":
                self._paths[f"messages[{len(self.found)}].content"] = f"{path}.output"
                content = _content(item.output, f"{path}.output")
                self.add(Message("tool", content, tool_call_id=item.call_id), path)
            case _:
                self._message(item, path)

    def _message(self, item: api.InputItem, path: str) -> None:
        content = _content(item.content, f"{path}.content")
        role = item.role or "user"
        if role == "assistant":
            message = self._assistant(path)
            if message.content is not None or message.tool_calls:
                message = Message("assistant")
                self.add(message, path)
            message.content = content
        elif role in ("system", "developer") and (text := _only_text(content)) is not None:
            self.system(text, path)
        else:
            self.add(Message(role, content), path)

    def _assistant(self, path: str) -> Message:
        """Returns the last message if it is an assistant's, else a new assistant message."""
        if not self.found or self.found[-1].role != "assistant":
            self.add(Message("assistant"), path)
        return self.found[-1]


def _content(given: str | list[api.InputPart] | None, path: str) -> str | list[ContentPart]:
    if given is None or isinstance(given, str):
        return given or ""
    parts: list[ContentPart] = []
    for index, part in enumerate(given):
        place = f"{path}[{index}]"
        if isinstance(part, api.ResponseReasoningText):
            raise InvalidRequest("belongs to an item of reasoning", param=f"{place}.type")
        if isinstance(part, api.ResponseImage):
            if part.file_id is not None:
                message = "files are not stored here; give image_url"
                raise InvalidRequest(message, param=f"{place}.file_id")
            if part.image_url is None and part.uuid is None:
                raise InvalidRequest("is required", param=f"{place}.image_url")
        parts.append(part)
    return parts


def _only_text(content: str | list[ContentPart]) -> str | None:
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(content) else None


def _tools(request: api.ResponsesRequest, paths: dict[str, str]) -> list[Tool]:
    """Returns the tools, with the functions of namespaces under unique names."""
    found: list[Tool] = []

    def add(function: FunctionDefinition, path: str) -> None:
        paths[f"tools[{len(found)}].function"] = path
        found.append(Tool("function", function))

    for index, given in enumerate(request.tools or ()):
        path = f"tools[{index}]"
        if isinstance(given, api.ResponseFunction):
            add(given, path)
            continue
        about = given.description  # The first function of the namespace gets its description, too.
        for position, inner in enumerate(given.tools):
            function = structs.replace(inner, name=api.flat(inner.name, given.name))
            if about:
                function.description = "\n\n".join(filter(None, (about, inner.description)))
                about = None
            add(function, f"{path}.tools[{position}]")
    return found


def _namespaces(request: api.ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Returns the namespace and the name of each function in a namespace, by the model's name."""
    return {
        api.flat(inner.name, given.name): (given.name, inner.name)
        for given in request.tools or ()
        if isinstance(given, api.ResponseNamespace)
        for inner in given.tools
        if api.flat(inner.name, given.name) != inner.name
    }


def _tool_choice(request: api.ResponsesRequest) -> ToolChoice | None:
    match request.tool_choice:
        case api.NamedFunction(name, namespace):
            return FunctionChoice(FunctionName(api.flat(name, namespace)))
        case api.AllowedResponseTools(mode, tools):
            names = [FunctionChoice(FunctionName(api.flat(t.name, t.namespace))) for t in tools]
            return AllowedTools(AllowedFunctions(mode, names))
        case choice:
            return choice


class ResponseWriter(AnswerWriter[api.ResponseEvent]):
    """Writes OpenAI's items and events, numbered from 0.

    Attributes:
        response: the response with all items so far.
    """

    def __init__(
        self,
        request: api.ResponsesRequest,
        response_id: str,  # also part of the ids of its items
        completion: Completion,
        model_name: str,
    ) -> None:
        super().__init__(completion)
        self._number = 0
        self._pieces: list[str] = []  # text of the open item
        self._id = response_id
        self._namespaces = _namespaces(request)
        sampling, text = completion.sampling, request.text
        self.response = api.ResponseObject(
            id=f"resp_{self._id}",
            created_at=now(),
            model=model_name,
            status="in_progress",
            output=[],
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=None if request.metadata is UNSET else request.metadata,
            previous_response_id=request.previous_response_id,
            store=request.store is not False,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning,
            temperature=sampling.temperature,
            text=api.TextConfig((text and text.format) or TextFormat()),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=request.truncation or "disabled",
            user=request.user,
        )

    @property
    def _item(self) -> api.OutputItem:
        return self.response.output[-1]

    def begin(self) -> list[api.ResponseEvent]:
        response = structs.replace(self.response, output=[])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def end(self) -> list[api.ResponseEvent]:
        response, is_cut = self.response, self._is_cut
        events: list[api.ResponseEvent] = []
        if not response.output:  # An empty answer is written as an empty message.
            events = [*self.open(Text("")), *self.close(Text(""), is_last=True)]
        response.status = "incomplete" if is_cut else "completed"
        response.completed_at = now()
        response.usage = self._usage()
        if is_cut:
            response.incomplete_details = api.IncompleteDetails("max_output_tokens")
        return [*events, self._event(f"response.{response.status}", response=response)]

    def kind(self, event: api.ResponseEvent) -> str:
        return event.type

    def error_events(self, error: TriptychError) -> bytes:
        code = "server_error"
        if isinstance(error, InvalidRequest):
            code = "invalid_image" if isinstance(error, InvalidImage) else "invalid_prompt"
        response = self.response
        if self._open is not None:
            self._fill_item()
            self._item.status = "incomplete"
        response.status, response.error = "failed", api.ResponseFailure(code, error.message)
        return self.encode(
            (
                self._event("error", code=error.code, message=error.message, param=error.param),
                self._event("response.failed", response=response),
            )
        )

    @property
    def _is_cut(self) -> bool:
        return self._completion.choices[0].finish_reason == "length"

    def open(self, part: Part) -> list[api.ResponseEvent]:
        index = len(self.response.output)
        match part:
            case Reasoning():
                content = [api.ReasoningText("")]
                item = api.OutputReasoning(f"rs_{self._id}_{index}", content, "in_progress")
            case Call():
                item_id = f"fc_{self._id}_{index}"
                item = api.OutputCall(item_id, part.call_id, part.name, "", "in_progress")
                if part.name in self._namespaces:
                    item.namespace, item.name = self._namespaces[part.name]
            case Text():
                content = [api.OutputText("", [], [])]
                item = api.OutputMessage(f"msg_{self._id}_{index}", content, "in_progress")
        self.response.output.append(item)
        snapshot = deepcopy(item)  # The lists of `item` grow after the event was made.
        added = self._event("response.output_item.added", item=snapshot, output_index=index)
        if isinstance(snapshot, api.OutputCall):
            return [added]
        part_added = self._item_event("response.content_part.added", part=snapshot.content[0])
        snapshot.content = []
        return [added, part_added]

    def delta(self, part: Part) -> api.ResponseEvent:
        event = self._part_event(part, "delta", delta=part.text)
        if isinstance(self._item, api.OutputMessage):
            event.logprobs, self._logprobs = self._logprobs, []
            self._item.content[0].logprobs += event.logprobs
        self._pieces.append(part.text)
        return event

    def close(self, part: Part, *, is_last: bool) -> list[api.ResponseEvent]:
        self._fill_item()
        item, index = self._item, len(self.response.output) - 1
        item.status = "incomplete" if is_last and self._is_cut else "completed"
        if isinstance(item, api.OutputCall):
            events = [self._part_event(part, "done", arguments=item.arguments, name=item.name)]
        else:
            content = item.content[0]
            events = [self._part_event(part, "done", text=content.text)]
            if isinstance(content, api.OutputText):
                events[0].logprobs = content.logprobs
            events.append(self._item_event("response.content_part.done", part=content))
        return [*events, self._event("response.output_item.done", item=item, output_index=index)]

    def _fill_item(self) -> None:
        """Joins the pieces to the text of the open item. All are joined at once, because text that
        grows piece by piece is copied each time.
        """
        text, item = "".join(self._pieces), self._item
        self._pieces = []
        if isinstance(item, api.OutputCall):
            item.arguments = text
        else:
            item.content[0].text = text

    def _part_event(self, part: Part, what: str, **fields: object) -> api.ResponseEvent:
        """Returns the event of a piece of the open item, or of its end."""
        return self._item_event(f"response.{_KINDS[type(part)]}.{what}", **fields)

    def _item_event(self, kind: str, **fields: object) -> api.ResponseEvent:
        """Returns an event of an item's content. Calls have no separate content."""
        index, item = len(self.response.output) - 1, self._item
        event = self._event(kind, item_id=item.id, output_index=index, **fields)
        if not isinstance(item, api.OutputCall):
            event.content_index = 0
        return event

    def _event(self, kind: str, **fields: object) -> api.ResponseEvent:
        event = api.ResponseEvent(type=kind, sequence_number=self._number)
        for name, value in fields.items():
            setattr(event, name, value)
        self._number += 1
        return event

    def _usage(self) -> api.ResponseUsage:
        usage = self._completion.usage()
        details, given = usage.completion_tokens_details, usage.prompt_tokens_details
        found = api.InputTokensDetails(self._completion.cached_tokens or 0, given.image_tokens or 0)
        if given.videos is not None:
            found.video_tokens, found.videos = given.video_tokens or 0, given.videos
        return api.ResponseUsage(
            usage.prompt_tokens,
            found,
            usage.completion_tokens,
            CompletionTokensDetails(0) if details is UNSET else details,
            usage.total_tokens,
        )
