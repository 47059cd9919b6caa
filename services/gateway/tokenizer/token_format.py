"""How the tokens of a tokenizer.json stand for text: as bytes (GPT-2) or as pieces (SentencePiece).

A byte-level BPE splits text into words, and writes each byte of a token as a printable character.

SentencePiece's BPE, as Llama 2, Mistral 7B and Yi have it, writes a space as `▁` (U+2581). A
character that no token has is split into its bytes, which are tokens of their own (`<0xE2>`). Most
of these tokenizers also write `▁` before the beginning of a text, and remove one space from the
beginning of a decoded text in return:

    Hello world  →  ▁Hello ▁world  →  Hello world
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from services.common.model_spec import ModelSpecError
from services.gateway.tokenizer.byte_pairs import BYTE_OF_CHARACTER

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_SPACES = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}


class TokenFormat(Protocol):
    """The format of a tokenizer's tokens.

    Attributes:
        trims_start: True if one space at the beginning of a decoded text is no part of the text.
        later: a copy of tokenizer.json that encodes text behind an added token, where that differs
            from text at the beginning of a prompt. None if it does not.
        continuing: likewise for text that continues other text. None if it does not differ.
    """

    @property
    def trims_start(self) -> bool: ...
    @property
    def later(self) -> Mapping[str, Any] | None: ...
    @property
    def continuing(self) -> Mapping[str, Any] | None: ...

    def bytes_of(self, token: str) -> bytes:
        """Returns the bytes that a token of the vocabulary stands for."""
        ...


class ByteLevelTokens:
    """Tokens of a byte-level BPE: each character stands for a byte."""

    trims_start = False
    later = None
    continuing = None

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()


class PieceTokens(NamedTuple):
    """Tokens of SentencePiece: pieces of text with `▁` for a space, and bytes such as `<0xE2>`."""

    trims_start: bool
    later: Mapping[str, Any] | None
    continuing: Mapping[str, Any] | None

    def bytes_of(self, token: str) -> bytes:
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace(_SPACE, " ").encode()


def format_of(definition: Mapping[str, Any]) -> TokenFormat:
    """Returns the format of the tokens of a parsed tokenizer.json.

    Raises:
        ModelSpecError: the tokenizer is neither a byte-level BPE nor a BPE of SentencePiece with
            byte fallback; the message names the part.
    """
    model: dict[str, Any] = definition.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise _unsupported(f"model {model['type']} is not supported, only BPE")
    parts = [definition.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    if model.get("byte_fallback") or _SPACE in json.dumps(parts, ensure_ascii=False):
        return _pieces_of(definition)
    if "Metaspace" in json.dumps(parts):
        return _pieces_of(definition)
    if (decoder := _kind(definition.get("decoder"))) != "ByteLevel":
        raise _unsupported(f"decoder {decoder} is not supported, only ByteLevel")
    return ByteLevelTokens()


def _pieces_of(definition: Mapping[str, Any]) -> PieceTokens:
    model: dict[str, Any] = definition.get("model") or {}
    if not model.get("byte_fallback"):
        raise _unsupported("a SentencePiece tokenizer without byte_fallback loses characters")
    normalizers = _steps(definition.get("normalizer"), "normalizers")
    others = [step for step in normalizers if step not in (_PREPEND, _REPLACE)]
    if others:
        raise _unsupported(f"normalizer {_kind(others[0])} is not supported with byte fallback")
    before = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    if before and (len(before) > 1 or _kind(before[0]) != "Metaspace"):
        raise _unsupported(f"pre_tokenizer {_kind(before[-1])} is not supported with byte fallback")
    decoders = _steps(definition.get("decoder"), "decoders")
    if [_kind(step) for step in decoders[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        kinds = ", ".join(str(_kind(step)) for step in decoders) or "none"
        raise _unsupported(
            f"a decoder of {kinds} is not supported with byte fallback, only one of Replace, "
            "ByteFallback, Fuse and Strip"
        )
    if decoders[0] != _SPACES:
        raise _unsupported(f"decoder Replace does not replace {_SPACE} by a space")
    trims = any([_trims_start(step) for step in decoders[3:]])
    if not before:
        plain = {**definition, "normalizer": _REPLACE}
        return PieceTokens(trims, None, plain if _PREPEND in normalizers else None)
    if before[0].get("replacement", _SPACE) != _SPACE:
        raise _unsupported("pre_tokenizer Metaspace with another replacement is not supported")
    scheme = _scheme(before[0])
    bare = {key: value for key, value in before[0].items() if key != "add_prefix_space"}
    plain = {**definition, "pre_tokenizer": {**bare, "prepend_scheme": "never"}}
    return PieceTokens(
        trims, plain if scheme == "first" else None, plain if scheme != "never" else None
    )


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Returns the steps of a part of tokenizer.json, which may be a sequence, one step or None."""
    if part is None:
        return []
    return part[name] if _kind(part) == "Sequence" else [part]


def _kind(part: Mapping[str, Any] | None) -> str | None:
    return None if part is None else part.get("type")


def _scheme(metaspace: Mapping[str, Any]) -> str:
    """Returns where a `Metaspace` writes a space: `first`, `always` or `never`. Older files have
    `add_prefix_space` instead.
    """
    default = "always" if metaspace.get("add_prefix_space", True) else "never"
    return metaspace.get("prepend_scheme") or default


def _trims_start(step: Mapping[str, Any]) -> bool:
    """Returns whether a decoder removes one space from the beginning of the text.

    Raises:
        ModelSpecError: the decoder removes something else.
    """
    if _kind(step) != "Strip":
        raise _unsupported(f"decoder {_kind(step)} is not supported with byte fallback")
    if step["content"] != " " or step["start"] > 1 or step["stop"]:
        raise _unsupported("decoder Strip removes other text than one space at the beginning")
    return step["start"] == 1


def _unsupported(problem: str) -> ModelSpecError:
    return ModelSpecError(f"tokenizer.json: {problem}")
