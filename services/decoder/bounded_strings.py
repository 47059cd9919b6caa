"""Masks within JSON strings of bounded length, in a tenth of llguidance's time.

llguidance finds a mask by a walk over the vocabulary. Where a string may have n more characters the
walk tries nearly all tokens: up to 1.3 ms. But nearly all are plain text, without a character that
ends or escapes a string, and of these exactly those of at most n characters are allowed: a mask for
each n is made once. A second matcher, whose vocabulary has no plain tokens, fills the mask of the
others, and finds n with probes: tokens of 1, 2, … characters that the schema does not contain.

Exact, for schemas whose strings are of any characters (`has_plain_bounds`).
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

Int32Array = npt.NDArray[np.int32]

NUM_PROBES = 64  # plain tokens of more characters count among the others
PROBE_WORDS = NUM_PROBES // 32
# Of a private use area, so no token is such text, and a schema that contains it is refused here.
_PROBE = "\ue123"
_BOUND = "maxLength"
_ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
        "readOnly", "writeOnly",
    )
)  # fmt: skip
# Keywords whose values hold no schema, and under which a string is of any characters.
_PLAIN = frozenset(
    (
        "type", "required", "const", "enum", _BOUND, "minLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
        "minProperties", "maxProperties",
    )
)  # fmt: skip
_SCHEMA, _SCHEMAS, _NAMED = ("items", "additionalProperties"), ("prefixItems",), (
    "properties", "$defs", "definitions",
)  # fmt: skip
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")  # what it refers to is looked at
_NO_STRING = frozenset(("null", "boolean", "integer", "number"))


def has_plain_bounds(schema: str) -> bool:
    """Whether strings are bounded in the schema and, where several forms of a value are possible,
    no bounded string is beside another string. Then each plain text of the same length may come
    within a string, or none.
    """
    if _BOUND not in schema:
        return False
    try:
        value = json.loads(schema)
        return _PROBE not in json.dumps(value, ensure_ascii=False) and _is_plain(value)
    except (ValueError, RecursionError):
        return False


def _is_plain(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    for name, value in cast("dict[str, Any]", schema).items():
        if name in _ANNOTATIONS or name in _PLAIN:
            continue
        if name == "$ref":
            plain = isinstance(value, str) and _REFERENCE.fullmatch(value) is not None
        elif name in _SCHEMA:
            plain = _is_plain(value)
        elif name in _SCHEMAS and isinstance(value, list):
            plain = all(_is_plain(item) for item in cast("list[Any]", value))
        elif name in _NAMED and isinstance(value, dict):
            plain = all(_is_plain(item) for item in cast("dict[str, Any]", value).values())
        elif (
            name in ("anyOf", "oneOf")
            and isinstance(value, list)
            and len(schema)
            == 1 + sum(key in _ANNOTATIONS for key in cast("dict[str, Any]", schema))
        ):
            others = [item for item in cast("list[Any]", value) if not _is_scalar(item)]
            plain = len(others) <= 1 and all(map(_is_plain, others))
        else:
            return False
        if not plain:
            return False
    return True


def _is_scalar(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether a value of the schema is no string, list or object."""
    if not isinstance(schema, dict):
        return False
    kind = cast("dict[str, Any]", schema).get("type")
    return isinstance(kind, str) and kind in _NO_STRING and _is_plain(schema)


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
        is_missing: of each id, whether `others` lacks it.
        byte_ids: the id of each byte; `others` has them.
        probe: ids that together are one probe character.
    """

    full: LLTokenizer
    others: LLTokenizer
    masks: Int32Array
    is_missing: npt.NDArray[np.bool_]
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
        lengths = np.zeros(num_ids, np.int64)
        for number, token in enumerate(tokens):
            if len(token) > 1 and byte_ids.keys() >= set(token):
                length = _plain_length(token)
                if 0 < length <= NUM_PROBES:
                    lengths[number] = length
                    tokens[number] = b""
        probe = _PROBE.encode()
        if not byte_ids.keys() >= set(probe):
            return None
        for number in end_ids:
            tokens[number] = b"<end>"
        tokens += [probe * count for count in range(1, NUM_PROBES + 1)]
        wrapped = TokenizerWrapper(_Tokens(tokens, list(end_ids), end_ids[0]))
        missing = lengths > 0
        masks = [missing & (lengths <= count) for count in range(NUM_PROBES + 1)]
        return cls(
            full,
            LLTokenizer(wrapped, n_vocab=num_ids + NUM_PROBES, eos_token=list(end_ids), slices=[]),
            np.packbits(np.stack(masks), axis=-1, bitorder="little").view("<i4"),
            missing,
            byte_ids,
            [byte_ids[byte] for byte in probe],
        )

    def spell(self, token_id: int) -> list[int]:
        """The token as ids that `others` has."""
        if token_id < len(self.is_missing) and self.is_missing[token_id]:
            return [self.byte_ids[byte] for byte in self.full.decode_bytes([token_id])]
        return [token_id]


def _plain_length(token: bytes) -> int:
    """Characters of a token that is plain text; 0: it is not."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    if any(c < " " or c in '"\\\x7f' for c in text):
        return 0
    return len(text)


@dataclass(slots=True)
class BoundedStrings:
    """The second matcher of one sequence.

    Attributes:
        state: of the vocabulary without plain tokens; the same grammar.
        plain: the vocabulary's.
    """

    state: LLMatcher
    plain: PlainTokens
    _unread: list[int] = field(default_factory=list[int])

    def copy(self) -> "BoundedStrings":
        """At the same place, for another sequence."""
        return BoundedStrings(self.state.deep_copy(), self.plain, self._unread.copy())

    def consume(self, token_ids: list[int]) -> None:
        """Takes the sequence's next tokens."""
        self._unread += token_ids

    def contains(self, full: LLMatcher) -> bool:
        """Whether the grammar, of which `full` is the first matcher, is within a string of any
        characters; then `state` can fill the mask.
        """
        probe = self.plain.probe
        if full.validate_tokens(probe) < len(probe):
            return False
        unread, self._unread = self._unread, []
        spelled = [part for token_id in unread for part in self.plain.spell(token_id)]
        return not spelled or self.state.consume_tokens(spelled)

    def complete(self, mask: Int32Array, probes: Int32Array) -> bool:
        """Adds the plain tokens to a mask that `state` has filled.

        Args:
            mask: `[words]`.
            probes: `[PROBE_WORDS]`, what it has filled behind the mask.

        Returns:
            Whether the mask is right; else the first matcher has to fill it.
        """
        room = int(probes.view("<u8")[0]).bit_length()
        if room == 0 or self.state.is_error():
            return False
        mask |= self.plain.masks[room]
        return True
