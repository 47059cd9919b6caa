"""The answer reader derives the format of a request's answers from the request and its prompt.

`ChatService` calls it once the prompt is rendered.
"""

from dataclasses import replace

from msgspec import UNSET

from services.common.model_spec import ModelSpec
from services.common.threads import WorkerThreads
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.grammar import read_grammar
from services.gateway.answers.reasoning import CLOSE, answer_start
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import read_tools
from services.gateway.forms.generation import JsonObjectFormat, JsonSchemaFormat
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.tools import tool_characters
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# Schemas and grammars up to this length are read in the event loop, and longer ones in a thread.
_INLINE_CHARS = 8192


class AnswerReader:
    """Reads the formats of answers. Thread-safe.

    Args:
        spec: the model's specification.
        tokenizer: the model's tokenizer.
        template: source of the chat template, which shows the form of tool calls, and whether the
            model thinks.
        threads: threads that read long schemas.

    Attributes:
        call_parser: parser of the model's format of tool calls. None if the model has no format.
    """

    def __init__(
        self, spec: ModelSpec, tokenizer: ModelTokenizer, template: str, threads: WorkerThreads
    ) -> None:
        self._threads = threads
        self._tokenizer = tokenizer
        self._end_ids = spec.eos_token_ids
        self._thinks = spec.conversation.thinks and CLOSE in template
        parsers = (PARSERS[name] for name in spec.conversation.tool_parsers)
        self.call_parser = next((p for p in parsers if p.marker in template), None)

    async def format_of(self, request: ChatRequest, tail: str | None) -> AnswerFormat:
        """Calls `read`, in a thread if the request has long schemas or grammars."""
        if _num_characters(request) <= _INLINE_CHARS:
            return self.read(request, tail)
        return await self._threads.run(self.read, request, tail)

    def read(self, request: ChatRequest, tail: str | None) -> AnswerFormat:
        """Returns the format of a request's answers.

        Args:
            request: the request.
            tail: the prompt after its last special token. None if the prompt is not a chat's.

        Raises:
            InvalidRequest: the request contradicts itself, or demands an answer that no grammar can
                enforce.
        """
        start, calls = None, None
        if tail is not None:
            start = answer_start(tail) if self._thinks else None
            calls = read_tools(request, self.call_parser)
        grammar = answer_grammar(read_grammar(request), start, calls, self._tokenizer)
        return AnswerFormat(
            start,
            replace(calls, has_grammar=grammar is not None) if calls else None,
            calls is not None and calls.required,
            request.include_reasoning is not False,
            grammar.to_proto(self._end_ids) if grammar else None,
            grammar.param if grammar else None,
        )


def _num_characters(request: ChatRequest) -> int:
    """Returns the approximate length of the schemas and grammars of a request."""
    size, structured = 0, request.structured_outputs
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        schema = request.response_format.schema
        size += 0 if schema is UNSET else len(schema)
    if structured is not None:
        texts = structured.regex or "", structured.grammar or "", *(structured.choice or ())
        size += sum(map(len, texts))
        size += 0 if structured.json is UNSET else len(structured.json)
    choice, tools = request.tool_choice, request.tools or ()
    has_grammar = size > 0 or choice not in (None, "none", "auto")
    if tools and (has_grammar or any(tool.function.strict for tool in tools)):
        size += 4 * tool_characters(tools)  # the grammar of a schema is longer than its characters
    return size
