"""Messages of the processes that compile grammars and fill masks.

Masks go to the engine as `TokenMasks`; a sequence's first one goes there through the front, behind
the sequence.
"""

from typing import NamedTuple

import msgspec

from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks.grammar import Demands


class Lane(NamedTuple):
    """A fork of the compile process, and what it allows a grammar.

    Attributes:
        cpu_s: CPU seconds of one grammar.
        niceness: addition to the priority of the process, as `os.nice` takes it.
    """

    cpu_s: float
    niceness: int


# Of 2,183 schemas of JSONSchemaBench all but two take less than 0.05 s, and all but one less than
# 0.5 s, as do all of `benchmarks.grammar_bounds`.
LANES = Lane(0.05, 0), Lane(0.5, 10)

# Front to processes.


class MaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What such a process needs to know; JSON, on its standard input.

    Attributes:
        vocab_size: of the model's head.
        end_ids: of the model, which end a complete text.
        num_rows: sequences that a process may have at once.
        link: the number of a process that fills masks.
    """

    directory: str
    vocab_size: int
    end_ids: tuple[int, ...]
    num_rows: int
    link: int = 0
    log_level: str = "INFO"


class Follow(msgspec.Struct, tag="follow"):
    """A sequence that the engine was sent, whose masks this process fills.

    Attributes:
        sequence_id: the engine's.
        generated: completion tokens so far: of another decoder, or of a process that has ended.
    """

    sequence_id: int
    demands: Demands
    generated: list[int]


class Forget(msgspec.Struct, tag="forget"):
    """A sequence has ended."""

    sequence_id: int


ToProcess = Follow | Forget | NewTokens

# Processes to front.


class Verdict(msgspec.Struct, tag="verdict"):
    """The outcome of a compilation.

    Attributes:
        error: reason why the grammar cannot be compiled; empty if it can be.
        cpu_s: CPU seconds that the compilation took.
        died: whether the fork that compiled the grammar has ended.
        timed_out: whether the fork has ended because it took more CPU time than its lane allows.
        is_last: whether the fork ends behind this verdict, because its memory has grown.
    """

    error: str
    cpu_s: float
    died: bool = False
    timed_out: bool = False
    is_last: bool = False


class CannotFollow(msgspec.Struct, tag="cannot_follow"):
    """A sequence cannot go on: the error's code and message."""

    sequence_id: int
    code: str
    message: str


class MaskTimes(msgspec.Struct, tag="mask_times"):
    """Seconds that masks of steps took since the last such message; sent every second, also to
    show that the process runs.
    """

    seconds: list[float]


FromProcess = CannotFollow | MaskTimes | TokenMasks
