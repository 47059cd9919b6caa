"""Byte-pair encoding by tiktoken, for tokenizer.json files for which the results are proven equal.

`ModelTokenizer` uses the encoder where `BytePairs.of` and `encode` return a result, and otherwise
the reference.

`tokenizers`, the reference, spends most of its time on offsets that are not needed here: 1,000
words take 1.3 ms, and 0.1 ms with tiktoken. The two libraries merge different pairs: tokenizers
merges a pair that tokenizer.json lists; tiktoken merges any pair whose concatenation is a token.
The libraries agree on every text if each token is listed as exactly one pair, and merging the
token's own bytes, lowest rank first, arrives at this pair. Proof: merges inside a token's bytes do
not depend on the neighbouring bytes until a pair is merged across their border, and then the token
does not occur.

`ignore_merges` (a word that is a token needs no merges) changes nothing for these files: tiktoken
always looks words up first, and merging each token's bytes ends at that token. Llama 3's file lists
several pairs for a token, so that the reference encodes it.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tiktoken import Encoding
from tokenizers import normalizers

# tiktoken matches runs of white space by recursion, which overflows the stack at about a million
# characters. The reference encodes texts with such runs of white space.
_LONG_BLANK = re.compile(r"\s(?<!\s\s)\s{999}")
# Longest text in characters whose ids are kept. Templates write the same few short pieces between
# added tokens in each prompt, such as `assistant` and a line feed.
_SHORT, _MAX_KEPT = 16, 4096
_WINDOW = 500  # characters; a run of 1,000 fills at least one aligned window


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            table[chr(0x100 + len(table) - len(printable))] = byte
    return table


BYTE_OF_CHARACTER = _byte_of_character()


class BytePairs:
    """Encoder of plain text with the same ids as `tokenizers`. Thread-safe; releases the GIL.

    Args:
        pattern: regular expression that splits text into words.
        ranks: rank of each token, which is also its id, by the token's bytes.
        nfc: true if text is normalized to NFC first.
    """

    def __init__(self, pattern: str, ranks: dict[bytes, int], *, nfc: bool) -> None:
        self._encoding = Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        # Python's tables are of another Unicode version than the reference's.
        self._nfc = normalizers.NFC() if nfc else None
        self._encode_short = lru_cache(_MAX_KEPT)(self._encoding.encode_ordinary)

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> "BytePairs | None":
        """Returns the encoder for a parsed tokenizer.json, or None if equality is not proven."""
        model = definition["model"]
        pattern = _split_pattern(definition.get("pre_tokenizer") or {})
        normalizer = definition.get("normalizer")
        if pattern is None or normalizer not in (None, {"type": "NFC"}):
            return None
        if any(model.get(f) for f in ("dropout", "byte_fallback", "fuse_unk", "unk_token")):
            return None
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        try:
            ranks = {_bytes_of(token): rank for token, rank in model["vocab"].items()}
            merges = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
            pairs = [(_bytes_of(left), _bytes_of(right)) for left, right in merges]
        except KeyError:
            return None  # a character outside the byte alphabet
        if not (_covers(ranks, pairs) and _is_canonical(ranks, pairs)):
            return None
        return cls(pattern, ranks, nfc=normalizer is not None)

    def encode(self, text: str) -> list[int] | None:
        """Returns the ids of plain text, or None if only the reference can encode the text."""
        if _has_long_blank(text):
            return None
        if self._nfc is not None and not text.isascii():
            text = self._nfc.normalize_str(text)
        if len(text) <= _SHORT:
            return list(self._encode_short(text))
        return self._encoding.encode_ordinary(text)


def _has_long_blank(text: str) -> bool:
    """Returns whether the text has 1,000 characters of white space in a row.

    Checking each window first is 20 times faster than the regular expression alone.
    """
    starts = range(0, len(text) - _WINDOW + 1, _WINDOW)
    if not any(text[start : start + _WINDOW].isspace() for start in starts):
        return False
    return _LONG_BLANK.search(text) is not None


def _split_pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Returns the regular expression that splits text into words, which are encoded separately.

    Returns None for another kind of pre-tokenizer.
    """
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str() as pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case _:
            return None


def _bytes_of(token: str) -> bytes:
    return bytes([BYTE_OF_CHARACTER[character] for character in token])


def _covers(ranks: Mapping[bytes, int], pairs: list[tuple[bytes, bytes]]) -> bool:
    """Returns whether the tokens are the 256 bytes and one token per pair, in the pairs' order."""
    merged = [ranks.get(left + right, -1) for left, right in pairs]
    return (
        all(bytes([byte]) in ranks for byte in range(256))
        and len(ranks) == 256 + len(pairs)
        and all(a < b for a, b in pairwise(merged))
        and (not merged or merged[0] >= 0)
    )


def _is_canonical(ranks: dict[bytes, int], pairs: list[tuple[bytes, bytes]]) -> bool:
    """Returns whether merging each token's own bytes by lower ranks ends at its listed pair.

    The check takes most of a second for 150,000 tokens.
    """
    rank_of = ranks.get
    for left, right in pairs:
        token = left + right
        if len(token) == 2:
            continue
        limit = ranks[token]
        parts = [token[i : i + 1] for i in range(len(token))]
        # Rank of each part joined with the next one; `limit` if they do not merge.
        joined = [rank_of(token[i : i + 2], limit) for i in range(len(token) - 1)]
        while joined and (lowest := min(joined)) < limit:
            i = joined.index(lowest)
            parts[i] += parts.pop(i + 1)
            del joined[i]
            if i < len(joined):
                joined[i] = rank_of(parts[i] + parts[i + 1], limit)
            if i > 0:
                joined[i - 1] = rank_of(parts[i - 1] + parts[i], limit)
        if parts != [left, right]:
            return False
    return True
