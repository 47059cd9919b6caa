"""How the answers to a request are read: its format, from the request and the prompt's end.

`ChatService` calls it once the prompt is rendered; nothing here knows how.
"""

from services.common.model_spec import ModelSpec
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.grammar import read_grammar
from services.gateway.answers.reasoning import CLOSE, answer_start
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import read_tools
from services.gateway.forms.openai import ChatRequest
from services.gateway.tokenizer.tokenizer import ModelTokenizer


class AnswerReader:
    """Thread-safe.

    Args:
        template: source of the chat template, which teaches a form of calls, and whether to think.
    """

    def __init__(self, spec: ModelSpec, tokenizer: ModelTokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._end_ids = spec.eos_token_ids
        self._thinks = spec.conversation.thinks and CLOSE in template
        parsers = (PARSERS[name] for name in spec.conversation.tool_parsers)
        self._call_parser = next((p for p in parsers if p.marker in template), None)

    def read(self, request: ChatRequest, tail: str | None) -> AnswerFormat:
        """The format of a request's answers.

        Args:
            tail: the prompt after its last special token; None: it is no chat's.

        Raises:
            InvalidRequest: the request contradicts itself, or its answer cannot be held to it.
        """
        start, calls = None, None
        if tail is not None:
            start = answer_start(tail) if self._thinks else None
            calls = read_tools(request, self._call_parser)
        grammar = answer_grammar(read_grammar(request), start, calls, self._tokenizer)
        return AnswerFormat(
            start,
            calls.format if calls else None,
            request.include_reasoning is not False,
            grammar.to_proto(self._end_ids) if grammar else None,
            grammar.param if grammar else None,
        )
