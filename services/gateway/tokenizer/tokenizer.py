"""The model's tokenizer: plain text to ids, added tokens by name, ids to bytes.

`encode_text` never returns an added token (`<|im_end|>`, `<|image_pad|>`, `<tool_call>` ...), even
if the text contains its name; `added` has them. Prompts are encoded and completions decoded with
it. A tokenizer.json of another kind than byte-level BPE is a `ModelSpecError` at start.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.errors import ContextLengthExceeded
from services.common.model_spec import ModelSpecError, read_json
from services.gateway.tokenizer.byte_pairs import BYTE_OF_CHARACTER, BytePairs


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of tokenizer.json's `added_tokens`.

    Attributes:
        special: `skip_special_tokens` leaves it out of the text.
    """

    token_id: int
    content: str
    special: bool


class ModelTokenizer:
    """tokenizer.json of one model. Thread-safe: encoding is stateless and releases the GIL.

    Args:
        definition: the parsed tokenizer.json, of a byte-level BPE.

    Raises:
        ModelSpecError: the tokenizer is not a byte-level BPE, or has added tokens that change the
            text around them; the message names the part.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        _check_kind(definition)
        whole: dict[str, Any] = {**definition, "truncation": None, "padding": None}
        try:
            self._plain = Tokenizer.from_str(json.dumps({**whole, "added_tokens": []}))
            self._whole = Tokenizer.from_str(json.dumps(whole))
        except Exception as error:  # it has no type of its own
            raise ModelSpecError(f"tokenizer.json: {error}") from None
        self.added = _added_tokens(definition)
        self.special_ids = frozenset(t.token_id for t in self.added.values() if t.special)
        self._added_bytes = {t.token_id: t.content.encode() for t in self.added.values()}
        self._fast = BytePairs.of(definition)
        vocabulary = self._plain.get_vocab()
        self.max_token_bytes = max(map(len, vocabulary))
        self._is_nfc = _kind(definition, "normalizer") == "NFC"
        self.token_bytes: Callable[[int], bytes] = cache(self._token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelTokenizer":
        """Reads `directory`/tokenizer.json.

        Raises:
            ModelSpecError: it is missing, malformed or of an unsupported kind.
        """
        return cls(read_json(directory / "tokenizer.json"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without BOS; the name of an added token is plain text, too."""
        ids = self._fast.encode(text) if self._fast is not None else None
        return _ids(self._plain, text, add_special_tokens=False) if ids is None else ids

    def encode_prompt(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a prompt as transformers encodes it: names of added tokens are those tokens.

        `add_special_tokens`: with BOS and the like, where tokenizer.json adds them.
        """
        return _ids(self._whole, text, add_special_tokens=add_special_tokens)

    def check_length(self, text: str, max_tokens: int, param: str = "messages") -> None:
        """Refuses text that cannot fit, without tokenizing it; `param` is its field.

        Raises:
            ContextLengthExceeded: the text has more bytes than `max_tokens` of the longest token.
        """
        bound = max_tokens * self.max_token_bytes
        if self._is_nfc and not text.isascii():
            bound *= 4  # it leaves 2 bytes of 7, in the worst case; to try it takes long
        if len(text.encode()) > bound:
            raise ContextLengthExceeded(
                f"prompt is too long: the maximum context length is {max_tokens} tokens",
                param=param,
            )

    def token_string(self, token_id: int) -> str:
        """A token as the vocabulary writes it; empty for an unused id."""
        added = self._added_bytes.get(token_id)
        return added.decode() if added is not None else self._plain.id_to_token(token_id) or ""

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an unused id."""
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._plain.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """By the call that releases the interpreter lock, which a text of a megabyte takes a second."""
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return found.ids


def _kind(definition: Mapping[str, Any], part: str) -> str | None:
    found: dict[str, Any] = definition.get(part) or {}
    return found.get("type")


def _check_kind(definition: Mapping[str, Any]) -> None:
    """Refuses all but byte-level BPE: only its tokens are bytes that can simply be joined."""
    model: dict[str, Any] = definition.get("model") or {}
    text = json.dumps([definition.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
    if model.get("byte_fallback") or "Metaspace" in text or "\\u2581" in text:
        raise ModelSpecError(
            "tokenizer.json: SentencePiece tokenizers (Metaspace, byte fallback) are not supported"
        )
    if model.get("type", "BPE") != "BPE":
        raise ModelSpecError(f"tokenizer.json: model {model['type']} is not supported, only BPE")
    decoder = _kind(definition, "decoder")
    if decoder != "ByteLevel":
        raise ModelSpecError(f"tokenizer.json: decoder {decoder} is not supported, only ByteLevel")


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
    """What logprobs call a token, its text or `token_id:N`, and its bytes."""
    data = tokenizer.token_bytes(token_id)
    return f"token_id:{token_id}" if as_id else data.decode(errors="replace"), list(data)
