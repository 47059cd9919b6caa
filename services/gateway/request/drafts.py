"""Drafts of prompts: the messages of a request, rendered and tokenized, before images are loaded.

Long text is rendered and tokenized in threads, so that the event loop can serve other requests.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.common.errors import InvalidRequest
from services.common.threads import WorkerThreads
from services.gateway.forms.openai import ChatRequest
from services.gateway.prompts.conversation import ConversationReader
from services.gateway.prompts.prompt import Draft, PromptBuilder
from services.gateway.request.sampling import check_ids
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# Text of at most this many characters is tokenized in the event loop, and longer text in a thread.
# Lists of token ids are checked in the event loop up to the same length.
_INLINE_CHARS = 8192
_TEXT_THREADS = 4
# With `truncate_prompt_tokens`, a prompt may be longer than the context, because it is cut. A
# prompt longer than this many contexts is refused, because tokenizing it would take too long.
MAX_CONTEXTS_TO_CUT = 8


@dataclass(slots=True)
class DraftReader:
    """Reads the messages of requests into drafts, and tokenizes other text.

    Attributes:
        conversations: reader of a request's messages, which the chat template renders.
        prompts: maker of drafts from conversations.
        tokenizer: tokenizer of the model.
        threads: threads that render and tokenize long text.
    """

    conversations: ConversationReader
    prompts: PromptBuilder
    tokenizer: ModelTokenizer
    threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(_TEXT_THREADS, "text"))

    async def read(self, request: ChatRequest, max_tokens: int, omitted: range = range(0)) -> Draft:
        """Renders and tokenizes the messages of a request.

        Args:
            max_tokens: number of tokens of the context.
            omitted: indices of messages that are left out, because the conversation is too long.

        Raises:
            TriptychError: the messages do not fit the chat template or the context.
        """
        if request.truncate_prompt_tokens is not None:
            max_tokens *= MAX_CONTEXTS_TO_CUT
        num_characters = request.num_characters
        # A token has at least one byte, and a character at most four.
        bound = None if 4 * num_characters <= max_tokens else max_tokens
        if num_characters <= _INLINE_CHARS:
            return self._read(request, bound, omitted)
        return await self.threads.run(self._read, request, bound, omitted)

    def _read(self, request: ChatRequest, max_tokens: int | None, omitted: range) -> Draft:
        return self.prompts.draft(self.conversations.read(request, omitted), max_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool | None) -> list[int]:
        """Tokenizes text that no chat template has rendered.

        Args:
            add_special_tokens: True if the tokenizer adds tokens such as BOS to the text. If True
                or False, the name of a special token in the text, such as `<|im_end|>`, becomes
                that token. If None, such a name is text like any other.
        """
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await self.threads.run(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is None:
            return self.tokenizer.encode_text(text)
        return self.tokenizer.encode_prompt(text, add_special_tokens)

    async def prediction(self, request: ChatRequest, max_tokens: int) -> bytes:
        """Returns the int32 ids of the request's prediction, cut to the length of an answer. Empty
        if there is no prediction.
        """
        if request.prediction is None:
            return b""
        ids = await self.encode(request.prediction.text, add_special_tokens=None)
        return array("i", ids[:max_tokens]).tobytes()

    async def check_ids(self, name: str, ids: Sequence[int], vocab_size: int) -> None:
        """Checks the token ids of a request's field.

        Args:
            name: name of the field, for the error.
            ids: token ids of the field.
            vocab_size: number of tokens of the model's vocabulary.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        if len(ids) <= _INLINE_CHARS:
            check_ids(name, ids, vocab_size)
        else:
            await self.threads.run(check_ids, name, ids, vocab_size)

    def cut(
        self, draft: Draft, request: ChatRequest, max_tokens: int, num_answer_tokens: int
    ) -> Draft:
        """Returns the draft, cut to `truncate_prompt_tokens` tokens if the request has that field.

        If the field is -1, the draft is cut so that the context has tokens left for the answer:
        `num_answer_tokens`, or a quarter of the context if that is less.

        Args:
            max_tokens: number of tokens of the context.
            num_answer_tokens: largest number of tokens that the answer may have.

        Raises:
            InvalidRequest: the draft is too long and has images or videos, which cannot be cut.
        """
        limit = request.truncate_prompt_tokens
        if limit is None:
            return draft
        if limit < 0:
            limit = max_tokens - min(num_answer_tokens, max_tokens // 4)
        if len(draft.token_ids) <= limit:
            return draft
        if draft.images or draft.videos:
            raise InvalidRequest(
                "a prompt with images or videos cannot be cut", param="truncate_prompt_tokens"
            )
        # `truncation_side` names the end of the prompt that is cut off, as in transformers.
        is_right = request.truncation_side == "right"
        ids = draft.token_ids[:limit] if is_right else draft.token_ids[-limit:]
        return replace(draft, token_ids=ids)

    def close(self) -> None:
        """Ends the threads."""
        self.threads.close()
