"""Messages of the processes that compile grammars and fill masks.

Masks go to the engine as `TokenMasks`; a sequence's first one goes there through the front, behind
the sequence.
"""

from typing import NamedTuple

import msgspec

from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks.grammar import Demands, GrammarSource


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
LANES = Lane(0.05, 0), Lane(0.5, 5)

# Front to processes.


class MaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What such a process needs to know; JSON, on its standard input.

    Attributes:
        vocab_size: of the model's head.
        end_ids: of the model, which end a complete text.
        num_rows: sequences that a process may have at once.
        link: the number of a process that fills masks.
        max_work_s: CPU seconds after which a piece of work in a thread is given up. The compile
            process allows a grammar half a second, and compiling it again took 2.6 times as long
            at most.
        grammar_bytes: memory that grammars and matchers may take in a process that fills masks.
    """

    directory: str
    vocab_size: int
    end_ids: tuple[int, ...]
    num_rows: int
    link: int = 0
    max_work_s: float = 5.0
    grammar_bytes: int = 1 << 30
    log_level: str = "INFO"


class Follow(msgspec.Struct, tag="follow"):
    """A sequence that the engine was sent, whose masks this process fills.

    Attributes:
        sequence_id: the engine's number of the sequence.
        generated: completion tokens so far, of another decoder or of a process that has ended.
        is_slow: whether its grammar takes long to compile.
    """

    sequence_id: int
    demands: Demands
    generated: list[int]
    is_slow: bool = False


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


class ThreadTaken(msgspec.Struct, tag="thread_taken"):
    """Work on one grammar has taken a thread for so long that it is given up. The process goes on
    with the sequences whose masks it fills in other threads; further ones need another process.

    Attributes:
        source: the grammar, which is to be refused; None if the grammar has none.
        sequence_ids: sequences that wait for the thread; the process has forgotten them.
    """

    source: GrammarSource | None
    sequence_ids: list[int]


class MaskTimes(msgspec.Struct, tag="mask_times"):
    """Seconds that masks of steps took since the last such message; sent every second, also to
    show that the process runs.
    """

    seconds: list[float]


FromProcess = CannotFollow | ThreadTaken | MaskTimes | TokenMasks
