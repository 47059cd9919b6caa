"""Messages of a process that fills token masks: with the front, and with the engine.

Its masks go to the engine as `TokenMasks` or `TokenMask`; a sequence's first one goes there through
the front, behind the sequence.
"""

import msgspec

from services.decoder.engine.messages import MaskMemoryOpened, NewTokens, TokenMask, TokenMasks
from services.decoder.grammar import Demands

# Front to process.


class MaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to know; JSON, on its standard input.

    Attributes:
        link: which of the engine's links the process has.
        directory: of the model.
        vocab_size: of the model's head.
        end_ids: of the model; the vocabulary is read for these at once.
        num_rows: sequences that it may have at once.
        num_threads: that fill masks.
        log_level: of its log.
    """

    link: int
    directory: str
    vocab_size: int
    end_ids: tuple[int, ...]
    num_rows: int
    num_threads: int
    log_level: str = "INFO"


class Follow(msgspec.Struct, tag="follow"):
    """A sequence that the engine was sent, whose masks this process fills.

    Attributes:
        sequence_id: the engine's.
        demands: of its completion.
        generated: completion tokens that another decoder has sampled.
    """

    sequence_id: int
    demands: Demands
    generated: list[int]


class Forget(msgspec.Struct, tag="forget"):
    """A sequence has ended."""

    sequence_id: int


ToProcess = Follow | Forget
FromEngine = NewTokens | MaskMemoryOpened

# Process to front.


class CannotFollow(msgspec.Struct, tag="cannot_follow"):
    """A sequence cannot go on: the error's code and message."""

    sequence_id: int
    code: str
    message: str


class MaskTimes(msgspec.Struct, tag="mask_times"):
    """Seconds that masks of steps and compilations took since the last such message."""

    masks: list[float]
    compilations: list[float]


FromProcess = CannotFollow | MaskTimes | TokenMask | TokenMasks
