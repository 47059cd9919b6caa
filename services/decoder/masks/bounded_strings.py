"""Fills masks within strings of arbitrary text, in a tenth of llguidance's time.

llguidance computes a mask by a walk over the vocabulary. Where a string may have n more characters,
the walk visits nearly all tokens and takes up to 1.4 ms. But nearly all tokens are plain text: they
have no character that ends or escapes a string or begins a tag. Exactly the plain tokens of at most
n characters are allowed, and a mask for each n is computed once.

A second matcher, whose vocabulary has no plain tokens, fills the mask of all other tokens. It finds
n with probes: tokens that repeat one character 1, 2, … times (`plain_strings`).

The masks are exact for grammars whose strings are plain.
"""

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.common.grammar.plain_strings import PROBE
from services.decoder.masks.rows import PROBE_WORDS, Int32Array

NUM_PROBES = 32 * PROBE_WORDS  # longer plain tokens are treated as other tokens


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A vocabulary in the form of llguidance's TokenizerWrapper."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # no text is tokenized


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """The plain tokens of a vocabulary.

    Attributes:
        full: the whole vocabulary, with `32 * num_words + NUM_PROBES` ids.
        others: the vocabulary without plain tokens of several bytes and up to 64 characters. The
            last ids are the probes.
        masks: masks of the plain tokens with at most n characters that `others` lacks,
            `[65, num_words]`.
        lengths: number of characters of each plain token. 0 for other tokens and longer tokens.
        is_missing: True, for each id, if `others` lacks the token.
        byte_ids: id of each single byte. `others` has these tokens.
        probe: ids of the bytes of the probes' character.
    """

    full: LLTokenizer
    others: LLTokenizer
    masks: Int32Array
    lengths: bytes
    is_missing: bytes
    byte_ids: dict[int, int]
    probe: list[int]

    @classmethod
    def of(
        cls, full: LLTokenizer, num_words: int, end_ids: tuple[int, ...]
    ) -> "PlainTokens | None":
        """Finds the plain tokens of a vocabulary. Returns None if the vocabulary lacks tokens of
        single bytes, with which plain tokens are spelled.
        """
        num_ids = 32 * num_words
        special = [number for number in range(num_ids) if full.is_special_token(number)]
        tokens = [full.decode_bytes([number]) for number in range(num_ids)]
        for number in special:
            tokens[number] = b""
        byte_ids = {token[0]: number for number, token in enumerate(tokens) if len(token) == 1}
        lengths = np.zeros(num_ids, np.uint8)
        missing = np.zeros(num_ids, np.bool_)
        for number, token in enumerate(tokens):
            if token and byte_ids.keys() >= set(token):
                length = _plain_length(token)
                if 0 < length <= NUM_PROBES:
                    lengths[number] = length
                    missing[number] = len(token) > 1
        for number in np.flatnonzero(missing).tolist():
            tokens[number] = b""
        if not byte_ids.keys() >= set(PROBE.encode()):
            return None
        for number in end_ids:
            tokens[number] = b"<end>"
        masks = [missing & (lengths <= count) for count in range(NUM_PROBES + 1)]
        return cls(
            full,
            _others(tokens, end_ids),
            np.packbits(np.stack(masks), axis=-1, bitorder="little").view("<i4"),
            lengths.tobytes(),
            missing.tobytes(),
            byte_ids,
            [byte_ids[byte] for byte in PROBE.encode()],
        )

    def spell(self, token_id: int) -> list[int]:
        """Returns a token as ids that `others` has."""
        if token_id >= len(self.is_missing) or not self.is_missing[token_id]:
            return [token_id]
        return [self.byte_ids[byte] for byte in self.full.decode_bytes([token_id])]


def _others(tokens: list[bytes], end_ids: tuple[int, ...]) -> LLTokenizer:
    tokens = tokens + [PROBE.encode() * count for count in range(1, NUM_PROBES + 1)]
    wrapped = TokenizerWrapper(_Tokens(tokens, list(end_ids), end_ids[0]))
    return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=list(end_ids), slices=[])


def _plain_length(token: bytes) -> int:
    """Returns the number of characters of a plain token. 0 if the token is not plain text."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    if any(c < " " or c in '"\\<>\x7f' for c in text):
        return 0
    return len(text)


@dataclass(slots=True)
class BoundedStrings:
    """The second matcher of one sequence. Within a string, only the second matcher reads tokens.
    Elsewhere, only the first matcher does.

    Attributes:
        state: matcher of the same grammar, for the vocabulary without plain tokens.
        plain: plain tokens of the vocabulary.
        max_chars: number of characters that may follow, as far as is known, up to `NUM_PROBES`.
    """

    state: LLMatcher
    plain: PlainTokens
    max_chars: int = 0

    def copy(self) -> "BoundedStrings":
        """Returns a copy in the same state, for another sequence."""
        return BoundedStrings(self.state.deep_copy(), self.plain, self.max_chars)

    def enter(self, full: LLMatcher, unread: list[int]) -> bool:
        """Tries to enter a string of arbitrary characters.

        Args:
            full: first matcher of the sequence.
            unread: tokens that this matcher has not read. They are read if the string is entered.

        Returns:
            Whether the grammar is within such a string, so that this matcher can fill masks.
        """
        if full.validate_tokens(self.plain.probe) < len(self.plain.probe):
            return False
        entered = self._read(unread)
        unread.clear()
        return entered

    def stay(self, token_ids: list[int]) -> bool:
        """Reads tokens. Returns whether the string continues after them. If not, `state` may have
        failed.
        """
        lengths, max_chars = self.plain.lengths, self.max_chars
        for token_id in token_ids:
            length = lengths[token_id] if token_id < len(lengths) else 0
            max_chars = max_chars - length if length else -1
            if max_chars < 0:
                break
        if not self._read(token_ids):
            return False
        self.max_chars = max(max_chars, 0)
        return max_chars > 0 or self.state.validate_tokens(self.plain.probe) == len(
            self.plain.probe
        )

    def fill(self, row: Int32Array) -> bool:
        """Fills a mask, including the plain tokens.

        Args:
            row: `[num_words + PROBE_WORDS]`: the mask, and the probes behind it.

        Returns:
            Whether the mask is valid. If not, the first matcher has to fill it.
        """
        self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.max_chars = int.from_bytes(row[-PROBE_WORDS:].tobytes(), "little").bit_length()
        if self.max_chars == 0 or self.state.is_error():
            return False
        row[:-PROBE_WORDS] |= self.plain.masks[self.max_chars]
        return True

    def _read(self, token_ids: list[int]) -> bool:
        spelled = [part for token_id in token_ids for part in self.plain.spell(token_id)]
        return not spelled or self.state.consume_tokens(spelled)
