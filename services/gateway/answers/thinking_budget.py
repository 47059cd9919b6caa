"""The thinking budget of a request: number of tokens after which an answer's reasoning is closed.

`BoundedThinking` runs each choice up to the budget, and asks `ThinkingBudget` how the choice
continues there. Text that may become a tool call is not cut apart: a choice whose text ends in the
head of a call continues for some tokens, until the head has become a call, which stays whole, or
has turned out to be a mention of the call's tag inside the reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.reasoning import CLOSE, OPEN
from services.gateway.forms.openai import ChatRequest
from services.gateway.tokenizer.tokenizer import ModelTokenizer

_EMPTY_LINE = "\n\n"
# Tokens beyond the budget in which the head of a call has to become a call.
_MAX_HEAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The thinking budget of one request.

    Attributes:
        num_tokens: number of tokens of an answer, from its start, at which its reasoning is closed.
            The tag that opens the reasoning counts, too.
        has_grammar: true if the text behind the reasoning follows a grammar, which may allow no
            empty line.
    """

    num_tokens: int
    has_grammar: bool
    _choices: Sequence[Choice]
    _tokenizer: ModelTokenizer

    def more_tokens(self, choice: int, num_generated: int) -> int:
        """Returns the number of tokens for which a choice at the budget continues before the budget
        is checked again; 0 unless the choice's text ends in the head of a call. The number doubles
        with each check, so that a head of n tokens is checked about log2(n) times.
        """
        num_beyond = num_generated - self.num_tokens
        if num_beyond >= _MAX_HEAD_TOKENS or not self._choices[choice].in_head:
            return 0
        return max(1, num_beyond)

    def closing_ids(self, choice: int) -> list[int]:
        """Returns the token ids that close the reasoning of a choice at the budget. Empty if the
        choice does not think.
        """
        found, tokenizer = self._choices[choice], self._tokenizer
        line = tokenizer.encode_continuation(_EMPTY_LINE)
        close = [*ids_of_tag(tokenizer, CLOSE), *(() if self.has_grammar else line)]
        if found.thinking:
            return close
        if not found.num_tokens:  # The model would open its reasoning next.
            return [*ids_of_tag(tokenizer, OPEN), *line, *close]
        return []


def thinking_budget(
    request: ChatRequest,
    answer_format: AnswerFormat,
    choices: Sequence[Choice],
    tokenizer: ModelTokenizer,
) -> ThinkingBudget | None:
    """Returns the budget that a request names. None if there is none or no answer thinks."""
    num_tokens = request.thinking_token_budget
    if num_tokens is None or num_tokens < 0 or not answer_format.thinks:
        return None
    if num_tokens and answer_format.reasoning == "optional":
        num_tokens += len(ids_of_tag(tokenizer, OPEN))
    return ThinkingBudget(num_tokens, answer_format.grammar is not None, choices, tokenizer)


def ids_of_tag(tokenizer: ModelTokenizer, tag: str) -> tuple[int, ...]:
    """Returns the token ids by which the model writes a tag of reasoning."""
    added = tokenizer.added.get(tag)
    return (added.token_id,) if added is not None else tuple(tokenizer.encode_continuation(tag))
