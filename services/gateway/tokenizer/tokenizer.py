"""The model's tokenizer: encodes text, finds added tokens by name, and decodes ids to bytes.

`encode_text` never returns an added token (`<|im_end|>`, `<|image_pad|>`, `<tool_call>` ...), even
if the text contains the token's name; `added` has the added tokens. The same tokenizer encodes
prompts and decodes completions. A tokenizer.json that is neither a byte-level BPE nor a BPE of
SentencePiece is refused at start with a `ModelSpecError`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.errors import ContextLengthExceeded
from services.common.model_spec import ModelSpecError, read_json
from services.gateway.tokenizer.byte_pairs import BytePairs
from services.gateway.tokenizer.token_format import format_of


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of tokenizer.json's `added_tokens`.

    Attributes:
        token_id: id of the token.
        content: name of the token, such as `<|im_end|>`.
        special: true if `skip_special_tokens` leaves the token out of the text.
    """

    token_id: int
    content: str
    special: bool


class ModelTokenizer:
    """Tokenizer of one model. Thread-safe: encoding is stateless and releases the GIL.

    Args:
        definition: the parsed tokenizer.json.

    Attributes:
        reference: Hugging Face's tokenizer of the same definition, without added tokens.
        added: added tokens by name.
        special_ids: ids of the added tokens that are special.
        max_token_bytes: number of bytes of the longest token.
        trims_start: True if one space at the beginning of a decoded text is no part of the text.
        prepends_space: True if the tokenizer puts a space before a text that it encodes.

    Raises:
        ModelSpecError: the tokenizer is of a kind that is not supported (`token_format`), or has
            added tokens that change the text around them; the message names the part.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._format = format_of(definition)
        self.trims_start = self._format.trims_start
        self.prepends_space = self._format.continuing is not None
        whole: dict[str, Any] = {**definition, "truncation": None, "padding": None}
        self.reference = _without_added(whole)
        self._whole = _built(whole)
        # The tokenizers of text behind an added token, and of text that continues other text.
        later, continuing = self._format.later, self._format.continuing
        self._later = self.reference if later is None else _without_added(later)
        self._continuing = self.reference
        if continuing is not None:
            same = continuing is later
            self._continuing = self._later if same else _without_added(continuing)
        self.added = _added_tokens(definition)
        self.special_ids = frozenset(t.token_id for t in self.added.values() if t.special)
        self._added_bytes = {t.token_id: t.content.encode() for t in self.added.values()}
        self._fast = BytePairs.of(definition)
        vocabulary = self.reference.get_vocab()
        self.max_token_bytes = max([len(self._format.bytes_of(token)) for token in vocabulary])
        normalizer: dict[str, Any] = definition.get("normalizer") or {}
        self._is_nfc = normalizer.get("type") == "NFC"
        self.token_bytes = cache(self._token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelTokenizer":
        """Returns the tokenizer of `directory`/tokenizer.json.

        Raises:
            ModelSpecError: the file is missing, malformed or of an unsupported kind.
        """
        return cls(read_json(directory / "tokenizer.json"))

    def encode_text(self, text: str, *, is_first: bool = True) -> list[int]:
        """Returns the ids of plain text, without BOS. Names of added tokens are plain text, too.

        Args:
            text: a prompt, or a part of a prompt between added tokens.
            is_first: False if an added token comes before the text.
        """
        ids = self._fast.encode(text) if self._fast is not None else None
        if ids is not None:
            return ids
        tokenizer = self.reference if is_first else self._later
        return _ids(tokenizer, text, add_special_tokens=False)

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the ids of plain text that continues other text, as a model writes it."""
        ids = self._fast.encode(text) if self._fast is not None else None
        return _ids(self._continuing, text, add_special_tokens=False) if ids is None else ids

    def encode_prompt(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a prompt as transformers encodes it, with added tokens by name.

        Args:
            text: text of the prompt.
            add_special_tokens: true if BOS and other tokens that tokenizer.json adds are included.
        """
        return _ids(self._whole, text, add_special_tokens=add_special_tokens)

    def check_length(self, text: str, max_tokens: int, param: str = "messages") -> None:
        """Refuses text that cannot fit into a context, without tokenizing it.

        Args:
            text: text of the prompt.
            max_tokens: context length.
            param: field of the request that the error names.

        Raises:
            ContextLengthExceeded: the text has more bytes than `max_tokens` of the longest token.
        """
        bound = max_tokens * self.max_token_bytes
        if self._is_nfc and not text.isascii():
            bound *= 4  # in the worst case NFC leaves 2 bytes of 7; normalizing the text takes long
        if len(text.encode()) > bound:
            raise ContextLengthExceeded(
                f"prompt is too long: the maximum context length is {max_tokens} tokens",
                param=param,
            )

    def token_string(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it, or an empty text for an unused id."""
        added = self._added_bytes.get(token_id)
        return added.decode() if added is not None else self.reference.id_to_token(token_id) or ""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of tokens, special ones included. Bytes that are not UTF-8 become
        U+FFFD.
        """
        data = b"".join(map(self.token_bytes, token_ids))
        return data.removeprefix(b" " if self.trims_start else b"").decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, or no bytes for an unused id."""
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self.reference.id_to_token(token_id)
        return b"" if token is None else self._format.bytes_of(token)


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes text by the one method that releases the GIL. A megabyte of text takes a second."""
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return found.ids


def _built(definition: Mapping[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # tokenizers raises no narrower type
        raise ModelSpecError(f"tokenizer.json: {error}") from None


def _without_added(definition: Mapping[str, Any]) -> Tokenizer:
    return _built({**definition, "added_tokens": [], "truncation": None, "padding": None})


def _added_tokens(definition: Mapping[str, Any]) -> dict[str, AddedToken]:
    added: dict[str, AddedToken] = {}
    for token in definition.get("added_tokens") or ():
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ModelSpecError(f"tokenizer.json: added token {token['content']!r} strips text")
        if len(token["content"]) < 2:
            raise ModelSpecError(f"tokenizer.json: added token {token['content']!r} is too short")
        added[token["content"]] = AddedToken(token["id"], token["content"], bool(token["special"]))
    return added


def token_name(tokenizer: ModelTokenizer, token_id: int, as_id: bool) -> tuple[str, list[int]]:
    """Returns the name of a token in logprobs, which is its text or `token_id:N`, and its bytes."""
    data = tokenizer.token_bytes(token_id)
    return f"token_id:{token_id}" if as_id else data.decode(errors="replace"), list(data)
