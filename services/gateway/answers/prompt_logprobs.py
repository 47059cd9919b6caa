"""Logprobs of the tokens of a prompt: received from the decoder, and converted for responses."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.common.errors import InvalidRequest
from services.common.pb import decoder_pb2 as pb
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import MIN_LOGPROB, LogprobEntry, PromptLogprob, TopLogprob
from services.gateway.tokenizer.tokenizer import ModelTokenizer, token_name

# Largest number of logprobs for one prompt, alternatives included.
MAX_PROMPT_LOGPROBS = 1 << 18
# Logprobs of each token in vLLM's format, by token id. None for the first token, which no token
# precedes.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
Tops = Iterable[tuple[int, float]]  # token ids and their logprobs
_BYTES_OF_A_LOGPROB = 256  # memory of a logprob and its token in a response


@dataclass(slots=True)
class PromptScores:
    """Logprobs of one prompt that have arrived so far.

    Attributes:
        parts: messages of the decoder, in the order of the prompt.
    """

    parts: list[pb.PromptLogprobs] = field(default_factory=list[pb.PromptLogprobs])

    @property
    def num_bytes(self) -> int:
        """Approximate memory that the logprobs take in a response, in bytes."""
        num_values = sum(len(part.logprobs) + len(part.top_logprobs) for part in self.parts) // 4
        return num_values * _BYTES_OF_A_LOGPROB

    def check(self, request: ChatRequest, prompt_tokens: int) -> None:
        """Checks that a prompt is not too long for the number of logprobs that the request wants.

        Raises:
            InvalidRequest: the prompt is too long.
        """
        wanted = request.prompt_logprobs
        if wanted is not None and prompt_tokens * (wanted + 1) > MAX_PROMPT_LOGPROBS:
            most = MAX_PROMPT_LOGPROBS // (wanted + 1)
            raise InvalidRequest(
                f"with {wanted} alternatives, a prompt may have at most {most} tokens; "
                f"this prompt has {prompt_tokens}",
                param="prompt_logprobs",
            )

    def add(self, parts: Sequence[pb.PromptLogprobs]) -> None:
        """Adds the next parts. A decoder that continues the request sends all parts again."""
        for part in parts:
            if part.start == 1:
                self.parts.clear()
            self.parts.append(part)

    def rows(self, token_ids: Sequence[int]) -> Iterator[tuple[int, float, int, Tops]]:
        """Yields the id, logprob, rank and alternatives of each token but the first.

        Args:
            token_ids: token ids of the whole prompt.
        """
        rows: list[tuple[float, int, list[int], list[float]]] = []
        for part in self.parts:
            logprobs = _floats(part.logprobs)
            top = (len(logprobs), -1)
            rows += zip(
                logprobs.tolist(),
                np.frombuffer(part.ranks, "<i4").tolist(),
                np.frombuffer(part.top_token_ids, "<i4").reshape(top).tolist(),
                _floats(part.top_logprobs).reshape(top).tolist(),
                strict=True,
            )
        for token_id, (logprob, rank, ids, logprobs) in zip(token_ids[1:], rows, strict=True):
            yield token_id, logprob, rank, zip(ids, logprobs, strict=True)

    def by_id(self, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> PromptLogprobs:
        """Returns the logprobs in vLLM's format.

        Args:
            token_ids: token ids of the whole prompt.
            tokenizer: tokenizer of the model.
        """
        found: PromptLogprobs = [None]
        for token_id, logprob, rank, top in self.rows(token_ids):
            place = {
                i: PromptLogprob(value, r, _text(tokenizer, i))
                for r, (i, value) in enumerate(top, 1)
            }
            place[token_id] = PromptLogprob(logprob, rank, _text(tokenizer, token_id))
            found.append(place)
        return found

    def entries(
        self, token_ids: Sequence[int], tokenizer: ModelTokenizer, *, as_ids: bool = False
    ) -> list[LogprobEntry]:
        """Returns the logprobs of all tokens but the first, in the format of sampled tokens.

        Args:
            token_ids: token ids of the whole prompt.
            tokenizer: tokenizer of the model.
            as_ids: true if tokens are named `token_id:N` instead of by their text.
        """
        found: list[LogprobEntry] = []
        for token_id, logprob, _, top in self.rows(token_ids):
            others = [TopLogprob(*token_name(tokenizer, i, as_ids), value) for i, value in top]
            found.append(LogprobEntry(*token_name(tokenizer, token_id, as_ids), logprob, others))
        return found


def _floats(data: bytes) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.maximum(np.frombuffer(data, "<f4"), np.float32(MIN_LOGPROB))


def _text(tokenizer: ModelTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
