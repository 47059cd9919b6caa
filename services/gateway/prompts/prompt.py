"""A request's messages to the prompt's token ids and positions.

`PromptBuilder.draft` renders and tokenizes the messages, with one placeholder per image; once the
images are loaded, `PromptBuilder.expand` puts their units there and computes positions.
`ChatService` calls both; bytes of images are not seen here. Messages that do not fit the model, its
template or its context are an `InvalidRequest`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.errors import InvalidRequest
from services.common.geometry import Int32s, Run, Unit
from services.common.model_spec import ModelSpec
from services.gateway.answers.answer import AnswerFormat, ToolCalls
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.reasoning import CLOSE, answer_start
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS, CallParser
from services.gateway.forms.openai import ChatRequest, Message
from services.gateway.forms.tools import ToolUse, check_nesting, read_tools
from services.gateway.media.images import ImageSource
from services.gateway.prompts.chat_template import RESERVED, ChatTemplate, Conversation
from services.gateway.prompts.messages import (
    join_systems,
    read_messages,
    refuse_late_system,
    refuse_tool_images,
)
from services.gateway.tokenizer.tokenizer import ModelTokenizer

_TOOL_ROLE = re.compile(r"""["'](tool|ipython)["']""")


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before its images are loaded.

    Attributes:
        token_ids: one placeholder per image.
        images: in order.
        format: how answers to it are read.
        ignored: fields of the request that change no answer of this model.
    """

    token_ids: list[int]
    images: list[ImageSource]
    format: AnswerFormat = field(default_factory=AnswerFormat)
    ignored: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder takes it.

    Attributes:
        token_ids: [num_tokens], placeholders expanded.
        positions: [3, num_tokens]; None without images: 0 to num_tokens - 1 on each axis.
        position_delta: what decode steps add to a token's index.
        runs: the tokens of each image's units.
    """

    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    runs: Sequence[Run] = ()

    @property
    def num_image_tokens(self) -> int:
        """Tokens of all images."""
        return sum(run.num_tokens for run in self.runs)


def _call_parser(spec: ModelSpec, template: ChatTemplate) -> type[CallParser] | None:
    """The parser of the form that the template teaches; None: it takes no tools."""
    if not template.takes_tools:
        return None
    parsers = (PARSERS[name] for name in spec.conversation.tool_parsers)
    return next((parser for parser in parsers if parser.marker in template.source), None)


class PromptBuilder:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: ModelTokenizer,
        template: ChatTemplate,
        *,
        max_images: int = 0,
    ) -> None:
        self._geometry = None if spec.vision is None else spec.vision.geometry
        self._tokenizer = tokenizer
        self._template = template
        self._max_images = max_images
        self._thinks = spec.conversation.thinks and CLOSE in template.source
        self._call_parser = _call_parser(spec, template)
        self._takes_calls = "tool_calls" in template.source
        self._takes_results = _TOOL_ROLE.search(template.source) is not None
        self._takes_tool_images = spec.vision is not None and self._shows_tool_images()

    def draft(self, request: ChatRequest, max_tokens: int, cut: range = range(0)) -> Draft:
        """Renders and tokenizes a request's messages, without those that are cut.

        Raises:
            InvalidRequest: the messages do not fit the model or its chat template.
            ContextLengthExceeded: the text is longer than `max_tokens` can be.
        """
        tool_use = read_tools(
            request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
        )
        messages, images = read_messages(
            request, max_images=self._max_images, takes_images=self._geometry is not None, cut=cut
        )
        if not self._template.takes_late_system:
            refuse_late_system(request.messages)
            join_systems(messages)
        self._refuse_unseen_calls(request.messages)
        if images and not self._takes_tool_images:
            refuse_tool_images(request)
        conversation = Conversation(
            messages=messages,
            tools=tool_use.definitions if tool_use else None,
            options=self._options(request),
            add_generation_prompt=request.add_generation_prompt is not False
            and not request.continue_final_message,
            continue_final_message=bool(request.continue_final_message),
        )
        ids, tail = self.tokenize(conversation, max_tokens)
        answer_format = AnswerFormat(
            answer_start(tail) if self._thinks else None,
            self._tool_calls(tool_use) if tool_use else None,
            request.include_reasoning is not False,
        )
        ignored = [*self._unused(request), *(("messages",) if cut else ())]
        return Draft(ids, images, answer_format, ignored)

    def tokenize(self, conversation: Conversation, max_tokens: int) -> tuple[list[int], str]:
        """Token ids before expansion, and the prompt's text after its last special token. No BOS
        token is added: a template writes its own.

        Raises:
            InvalidRequest: the template refuses the messages.
            ContextLengthExceeded: the text is longer than `max_tokens` can be.
        """
        self._tokenizer.check_length(conversation.text, max_tokens)
        ids: list[int] = []
        tail: list[str] = []
        for piece, is_added in self._template.render(conversation):
            tail.append(piece)
            if is_added:
                token = self._tokenizer.added[piece]
                ids.append(token.token_id)
                if token.special:
                    tail.clear()
            else:
                ids += self._tokenizer.encode_text(piece)
        return ids, "".join(tail)

    def _tool_calls(self, tool_use: ToolUse) -> ToolCalls:
        if self._call_parser is None:
            raise InvalidRequest("the model's chat template has no tools", param="tools")
        return ToolCalls(self._call_parser, tool_use)

    def _options(self, request: ChatRequest) -> dict[str, object]:
        """Variables of the template: those given, and `reasoning_effort` as the model has it."""
        variables = self._template.variables
        options: dict[str, object] = {}
        for name, value in (request.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name[:100]}"
            if name in RESERVED:
                raise InvalidRequest(f"{name} is not a variable to be set", param=param)
            if value is None or (name == "enable_thinking" and self._has_thinking_fixed(value)):
                continue
            if name not in variables:
                raise InvalidRequest(f"the model's chat template has no {name[:100]}", param=param)
            check_nesting(value, param)
            options[name] = value
        thinks = request.wants_thinking
        if thinks is not None and "enable_thinking" in variables:
            options.setdefault("enable_thinking", thinks)
        elif thinks is False:
            self._refuse_to_be_silent("enable_thinking")
        effort = request.reasoning_effort
        if effort is None:
            return options
        if "reasoning_effort" in variables and effort != "none":
            options.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in variables:
            options.setdefault("enable_thinking", effort != "none")
        elif effort == "none":
            self._refuse_to_be_silent("reasoning_effort")
        return options

    def _refuse_to_be_silent(self, param: str) -> None:
        if self._thinks:
            raise InvalidRequest(
                "the model always thinks; include_reasoning: false hides it", param=param
            )

    def _unused(self, request: ChatRequest) -> Sequence[str]:
        """Fields that change no answer of this model."""
        variables, found = self._template.variables, list[str]()
        if request.wants_thinking is not None and "enable_thinking" not in variables:
            found.append("enable_thinking")
        if request.thinking_token_budget is not None and not self._thinks:
            found.append("thinking_token_budget")
        if request.reasoning_effort and not {"reasoning_effort", "enable_thinking"} & variables:
            found.append("reasoning_effort")
        return found

    def _refuse_unseen_calls(self, messages: Sequence[Message]) -> None:
        """Refuses calls and results that the template would leave out."""
        for index, message in enumerate(messages):
            if message.tool_calls and not self._takes_calls:
                path = f"messages[{index}].tool_calls"
            elif message.role == "tool" and not self._takes_results:
                path = f"messages[{index}].role"
            else:
                continue
            raise InvalidRequest("the model's chat template has no tool calls", param=path)

    def _has_thinking_fixed(self, value: object) -> bool:
        """Whether the template has no switch, and the model does anyway what `value` says."""
        return "enable_thinking" not in self._template.variables and value is self._thinks

    def _shows_tool_images(self) -> bool:
        """Whether the template writes an image of a tool message."""
        function: dict[str, Any] = {"name": "f", "arguments": {}}
        call = {"id": "1", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image"}]},
        ]
        try:
            ids, _ = self.tokenize(Conversation(messages=messages, options={}), 1 << 20)
        except InvalidRequest:
            return False
        return self.has_placeholder(ids)

    def has_placeholder(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the tokens stands for an image."""
        return self._geometry is not None and self._geometry.image_token_id in token_ids

    def grammar(self, asked: Grammar | None, draft: Draft) -> Grammar | None:
        """What an answer to a draft has to be, of which a part was asked for; None: it is free.

        Raises:
            InvalidRequest: the request contradicts itself, or cannot be held to.
        """
        return answer_grammar(asked, draft.format, self._tokenizer)

    def expand(self, draft: Draft, images: Sequence[Sequence[Unit]]) -> Prompt:
        """Puts each image's units in the place of its placeholder, and computes positions.

        Raises:
            InvalidRequest: the template dropped or repeated an image.
        """
        compact, geometry = np.asarray(draft.token_ids, np.int32), self._geometry
        if geometry is None:
            return Prompt(compact, None, 0)
        places = np.flatnonzero(compact == geometry.image_token_id).tolist()
        if len(places) != len(images):
            raise InvalidRequest(
                f"the chat template placed {len(places)} images of {len(images)}",
                param="messages",
            )
        if not images:
            return Prompt(compact, None, 0)
        pieces: list[Int32s] = []
        runs: list[Run] = []
        start, length = 0, 0
        for image, (place, units) in enumerate(zip(places, images, strict=True)):
            ids, offsets = geometry.placeholders(units)
            length += place - start
            for unit, offset in zip(units, offsets, strict=True):
                runs.append(Run(length + offset, geometry.num_tokens(unit), unit, image))
            pieces += (compact[start:place], ids)
            start, length = place + 1, length + len(ids)
        token_ids = np.concatenate((*pieces, compact[start:]))
        positions, delta = geometry.positions(len(token_ids), runs)
        return Prompt(token_ids, positions, delta, runs)
