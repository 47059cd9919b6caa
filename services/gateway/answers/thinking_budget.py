"""A bound on an answer's reasoning: after so many tokens it is closed in the model's place.

`Attempts` runs each choice up to the budget first. If it still thinks there, what closes the
reasoning is appended, as if the model had written it, and the choice goes on behind it. What may
become a tool call is not cut apart: a choice whose text ends in the head of a call goes on for some
tokens, until the head is a call, which stays whole, or a mention of its tag, which is a thought.
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
    """Of one request.

    Attributes:
        num_tokens: of an answer, from its start on, with the tag that opens its reasoning.
        is_held: what follows the reasoning is held to a grammar, which may allow no empty line.
    """

    num_tokens: int
    is_held: bool
    _choices: Sequence[Choice]
    _tokenizer: ModelTokenizer

    def more_tokens(self, choice: int, num_generated: int) -> int:
        """Number of tokens that a choice at the budget may go on for before the budget is looked at
        again; 0 unless its text ends in the head of a call. The number doubles, so that a head of n
        tokens is continued about log2(n) times.
        """
        num_beyond = num_generated - self.num_tokens
        if num_beyond >= _MAX_HEAD_TOKENS or not self._choices[choice].in_head:
            return 0
        return max(1, num_beyond)

    def ids_behind(self, choice: int) -> list[int]:
        """What closes the reasoning of a choice that has come to the budget; empty: nothing."""
        found, tokenizer = self._choices[choice], self._tokenizer
        line = tokenizer.encode_text(_EMPTY_LINE)
        close = [*ids_of_tag(tokenizer, CLOSE), *(() if self.is_held else line)]
        if found.thinking:
            return close
        if not found.num_tokens:  # the model would open it
            return [*ids_of_tag(tokenizer, OPEN), *line, *close]
        return []


def thinking_budget(
    request: ChatRequest,
    answer_format: AnswerFormat,
    choices: Sequence[Choice],
    tokenizer: ModelTokenizer,
) -> ThinkingBudget | None:
    """The budget that a request names, if its answers may think."""
    num_tokens = request.thinking_token_budget
    if num_tokens is None or num_tokens < 0 or not answer_format.thinks:
        return None
    if num_tokens and answer_format.reasoning == "optional":
        num_tokens += len(ids_of_tag(tokenizer, OPEN))
    return ThinkingBudget(num_tokens, answer_format.grammar is not None, choices, tokenizer)


def ids_of_tag(tokenizer: ModelTokenizer, tag: str) -> tuple[int, ...]:
    """How the model writes a tag of reasoning."""
    added = tokenizer.added.get(tag)
    return (added.token_id,) if added is not None else tuple(tokenizer.encode_text(tag))
