"""One answer in the making: tokens in, text deltas out."""

from dataclasses import dataclass

from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Finished, TokenEvent, TokenLogprobs
from services.gateway.responses import LogprobEntry, TopLogprob
from services.gateway.tokenizer import ModelTokenizer

# What JSON can say of a probability of zero; OpenAI's and vLLM's value.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Update:
    """What is new in one choice.

    Attributes:
        finish_reason: `stop` or `length` with the last update.
    """

    choice: int
    text: str
    logprobs: list[LogprobEntry] | None
    finish_reason: str | None


class Choice:
    """One sequence as the client sees it."""

    def __init__(
        self, index: int, tokenizer: ModelTokenizer, detokenizer: Detokenizer, include_stop: bool
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, event: TokenEvent) -> Update:
        """Takes an event; after an update with a finish reason no more may come."""
        ids, end = event.token_ids, event.end
        finished = end if isinstance(end, Finished) else None
        # The token that ended it is no part of the text, unless asked for.
        hidden = int(finished is not None and finished.reason == "stop" and not self._include_stop)
        visible = ids[: len(ids) - hidden] if hidden else ids
        before = self._detokenizer.num_tokens
        text = self._detokenizer.feed(visible)
        taken = self._detokenizer.num_tokens - before
        if self._detokenizer.matched_stop is not None:
            self.finish_reason = "stop"
            self.num_tokens += taken
        else:
            self.num_tokens += len(ids)
            if finished:
                self.finish_reason = finished.reason
                text += self._detokenizer.finish()
        logprobs = None
        if event.logprobs:
            pairs = zip(visible[:taken], event.logprobs, strict=False)
            logprobs = [self._entry(token_id, found) for token_id, found in pairs]
        return Update(self._index, text, logprobs, self.finish_reason)

    def _entry(self, token_id: int, found: TokenLogprobs) -> LogprobEntry:
        top = [
            TopLogprob(*self._token(top_id), max(logprob, _LEAST_LOGPROB))
            for top_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
        ]
        return LogprobEntry(*self._token(token_id), max(found.logprob, _LEAST_LOGPROB), top)

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)
