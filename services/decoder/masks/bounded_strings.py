"""Masks within strings of any text, in a tenth of llguidance's time.

llguidance finds a mask by a walk over the vocabulary. Where a string may have n more characters the
walk tries nearly all tokens: up to 1.4 ms. But nearly all are plain text, without a character that
ends or escapes a string or begins a tag, and of these exactly those of at most n characters are
allowed: a mask for each n is made once. A second matcher, whose vocabulary has no plain tokens,
fills the mask of the others, and finds n with probes: tokens of 1, 2, … times a character
(`plain_strings`).

Exact, for grammars whose strings are plain.
"""

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.common.grammar.plain_strings import PROBE
from services.decoder.masks.rows import PROBE_WORDS, Int32Array

NUM_PROBES = 32 * PROBE_WORDS  # plain tokens of more characters count among the others


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A vocabulary, as llguidance's TokenizerWrapper wants it."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # nothing is tokenized


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """A vocabulary's plain tokens.

    Attributes:
        full: the whole vocabulary, of `32 * num_words + NUM_PROBES` ids.
        others: without plain tokens of 2 to 64 characters or several bytes, and with the probes,
            whose ids are the last ones.
        masks: of the plain tokens that `others` lacks, of at most n characters; `[65, words]`.
        lengths: of each id, characters of a plain token; 0: it is none, or a longer one.
        is_missing: of each id, whether `others` lacks it.
        byte_ids: the id of each byte; `others` has them.
        probe: ids that together are the character.
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
        """None: the vocabulary lacks bytes, so that plain tokens cannot be spelled."""
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
        """The token as ids that `others` has."""
        if token_id >= len(self.is_missing) or not self.is_missing[token_id]:
            return [token_id]
        return [self.byte_ids[byte] for byte in self.full.decode_bytes([token_id])]


def _others(tokens: list[bytes], end_ids: tuple[int, ...]) -> LLTokenizer:
    tokens = tokens + [PROBE.encode() * count for count in range(1, NUM_PROBES + 1)]
    wrapped = TokenizerWrapper(_Tokens(tokens, list(end_ids), end_ids[0]))
    return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=list(end_ids), slices=[])


def _plain_length(token: bytes) -> int:
    """Characters of a token that is plain text; 0: it is not."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    if any(c < " " or c in '"\\<>\x7f' for c in text):
        return 0
    return len(text)


@dataclass(slots=True)
class BoundedStrings:
    """The second matcher of one sequence. Within a string it is ahead of the first, else behind.

    Attributes:
        state: of the vocabulary without plain tokens; the same grammar.
        plain: the vocabulary's.
        room: characters that may come, as far as is known, at most `NUM_PROBES`.
    """

    state: LLMatcher
    plain: PlainTokens
    room: int = 0

    def copy(self) -> "BoundedStrings":
        """At the same place, for another sequence."""
        return BoundedStrings(self.state.deep_copy(), self.plain)

    def enter(self, full: LLMatcher, unread: list[int]) -> bool:
        """Whether the grammar, of which `full` is the first matcher, is within a string of any
        characters; then `state` takes the tokens that it has not read, and can fill the mask.
        """
        if full.validate_tokens(self.plain.probe) < len(self.plain.probe):
            return False
        entered = self._read(unread)
        unread.clear()
        return entered

    def stay(self, token_ids: list[int]) -> bool:
        """Whether the string goes on behind these tokens; no: `state` may have failed."""
        lengths, room = self.plain.lengths, self.room
        for token_id in token_ids:
            length = lengths[token_id] if token_id < len(lengths) else 0
            room = room - length if length else -1
            if room < 0:
                break
        if not self._read(token_ids):
            return False
        self.room = max(room, 0)
        return room > 0 or self.state.validate_tokens(self.plain.probe) == len(self.plain.probe)

    def fill(self, row: Int32Array) -> bool:
        """Fills a mask `[words]`, and probes behind it, `[PROBE_WORDS]`, and adds the plain tokens.

        Returns:
            Whether the mask is right; else the first matcher has to fill it.
        """
        self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.room = int.from_bytes(row[-PROBE_WORDS:].tobytes(), "little").bit_length()
        if self.room == 0 or self.state.is_error():
            return False
        row[:-PROBE_WORDS] |= self.plain.masks[self.room]
        return True

    def _read(self, token_ids: list[int]) -> bool:
        spelled = [part for token_id in token_ids for part in self.plain.spell(token_id)]
        return not spelled or self.state.consume_tokens(spelled)
