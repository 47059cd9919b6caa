"""Messages between the front and the processes that compile grammars and fill masks.

Masks are sent to the engine as `TokenMasks`. The first mask of a sequence is sent to the engine
through the front, so that it arrives after the sequence.
"""

from typing import NamedTuple

import msgspec

from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks.grammar import GrammarSource, TokenConstraints


class Lane(NamedTuple):
    """A fork of the compile process, with the limits of one grammar.

    Attributes:
        cpu_s: CPU seconds that the compilation of one grammar may take.
        niceness: addition to the priority of the process, as `os.nice` takes it.
    """

    cpu_s: float
    niceness: int


# All but two of the 2,183 schemas of JSONSchemaBench compile in less than 0.05 s, and all but one
# in less than 0.5 s, as do all grammars of `benchmarks.grammar_bounds`. Grammars that clients write
# have a lane of their own, so that schemas do not wait for them.
LANES = Lane(0.05, 0), Lane(0.5, 10), Lane(0.5, 10)
QUICK_LANE, SLOW_LANE, CLIENTS_LANE = range(len(LANES))

# Front to processes.


class MaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a mask process or compile process, which reads them as JSON from standard input.

    Attributes:
        directory: directory of the checkpoint.
        vocab_size: number of rows of the model's head.
        end_ids: end tokens of the model.
        num_rows: largest number of sequences of a mask process.
        max_drafts: the most drafts of a sequence, each of which has a mask of its own.
        link: number of the mask process.
        max_work_s: CPU seconds after which a thread's piece of work is abandoned. The compile
            process allows a grammar half a second, and a second compilation took at most 2.6 times
            as long as the first. The longest mask that was found took 10 s.
        grammar_bytes: bytes that grammars and matchers may take in a mask process.
        log_level: lowest level that is logged.
    """

    directory: str
    vocab_size: int
    end_ids: tuple[int, ...]
    num_rows: int
    max_drafts: int = 0
    link: int = 0
    max_work_s: float = 30.0
    grammar_bytes: int = 1 << 30
    log_level: str = "INFO"


class Follow(msgspec.Struct, tag="follow"):
    """Adds a sequence, which the engine knows already, to a mask process.

    Attributes:
        sequence_id: the engine's number of the sequence.
        constraints: constraints on the tokens of the sequence.
        generated: completion tokens so far.
        is_slow: True if the grammar takes long to compile.
        tenant: tenant in whose turn the grammar may be compiled, and which is then charged.
        background: True if this turn comes behind the turns of all other tenants.
    """

    sequence_id: int
    constraints: TokenConstraints
    generated: list[int]
    is_slow: bool = False
    tenant: str = ""
    background: bool = False


class Forget(msgspec.Struct, tag="forget"):
    """Removes a sequence that has ended."""

    sequence_id: int


ToProcess = Follow | Forget | NewTokens

# Processes to front.


class Verdict(msgspec.Struct, tag="verdict"):
    """The outcome of a compilation.

    Attributes:
        error: reason why the grammar cannot be compiled. Empty if the grammar can be compiled.
        cpu_s: CPU seconds that the compilation took.
        died: True if the fork that compiled the grammar has ended.
        timed_out: True if the fork has ended because it took more CPU time than its lane allows.
        is_last: True if the fork ends after this verdict, because its memory has grown.
    """

    error: str
    cpu_s: float
    died: bool = False
    timed_out: bool = False
    is_last: bool = False


class CannotFollow(msgspec.Struct, tag="cannot_follow"):
    """Reports that a sequence cannot continue.

    Attributes:
        sequence_id: the engine's number of the sequence.
        code: code of the error.
        message: message of the error.
    """

    sequence_id: int
    code: str
    message: str


class ThreadStuck(msgspec.Struct, tag="thread_stuck"):
    """Reports that work on one grammar takes a thread too long. The process continues with the
    sequences whose masks it fills elsewhere. Other sequences need another process.

    Attributes:
        source: grammar that is to be refused. None if the work belongs to no grammar.
        sequence_ids: sequences that wait for the thread. The process has removed them.
    """

    source: GrammarSource | None
    sequence_ids: list[int]


class MaskTimes(msgspec.Struct, tag="mask_times"):
    """Reports the time that masks took since the last report. The process sends it every second,
    which also shows that the process runs.

    Attributes:
        seconds: seconds that the masks of each step took.
    """

    seconds: list[float]


FromProcess = CannotFollow | ThreadStuck | MaskTimes | TokenMasks
