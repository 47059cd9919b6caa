"""The compile process: `python -m services.decoder.masks.compile_worker`, started by
`compile_process`. It finds out whether grammars can be compiled.

llguidance recurses along references and has no time limit, so a grammar may overflow the stack.
This process reads the vocabulary and forks into lanes. Each lane compiles grammars in a fork of its
own, with limits of CPU time, memory and stack. All forks share the memory of the vocabulary.
Another fork takes milliseconds.
"""

import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.common.errors import InvalidGrammar
from services.common.process import children
from services.common.process.channel import ChannelClosed, EngineChannel, create_socket_pair
from services.common.process.parent_death import end_with_parent
from services.common.process.work_limits import limited, mapped_bytes, prefer_oom_kill
from services.common.telemetry import setup_logging
from services.decoder.masks.compiler import Vocabulary, compile_grammar
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.grammar_memory import MAX_COMPILATION_BYTES
from services.decoder.masks.grammar_size import described
from services.decoder.masks.messages import LANES, SLOW_LANE, Lane, MaskSettings, Verdict

# This stack is smaller than in the mask processes, which compile the grammar again.
_STACK_BYTES = 8 << 20
_WALL_S = 20.0  # limit of one grammar, for a machine that is also busy with other work
# A fork whose channel has closed ends by itself. On a busy machine it gets no CPU for a while.
_ENDING_S = 10.0
# Time that a fork which is to be ended gets before it is killed.
_MOMENT_S = 0.1
# A fork is replaced when its address space has grown by this number of bytes. Memory that a grammar
# has freed counts for the next one, too.
_MAX_GROWTH_BYTES = 32 << 20
_MEMORY_ERROR = f"takes more than {MAX_COMPILATION_BYTES >> 20} MiB of memory to compile"
_ERRORS: dict[int, str] = {
    signal.SIGSEGV: f"takes more than {_STACK_BYTES >> 20} MiB of stack to compile: its references,"
    " rules or groups are too many behind or within each other",
    signal.SIGABRT: _MEMORY_ERROR,
}


@dataclass(slots=True, eq=False)
class Compiler:
    """Compiles one grammar after the other in a fork of this process. The fork may die.

    Attributes:
        vocabulary: tokens of the model.
        cpu_s: limit of one grammar's CPU seconds.
        memory_bytes: limit of one grammar's memory.
        wall_s: limit of one grammar's seconds.
        pid: process id of the fork. 0 if there is no fork.
    """

    vocabulary: Vocabulary
    cpu_s: float = LANES[SLOW_LANE].cpu_s
    memory_bytes: int = MAX_COMPILATION_BYTES
    wall_s: float = _WALL_S
    pid: int = 0
    _charged_s: float = 0.0  # CPU time of the fork for earlier grammars
    _channel: EngineChannel[Verdict] | None = None

    def compile(self, source: GrammarSource) -> Verdict:
        """Compiles a grammar and returns the verdict. Never raises."""
        for _ in range(2):  # a fork may have ended while it was idle
            if self._channel is None:
                self._fork()
            assert self._channel is not None
            with suppress(ChannelClosed):
                self._channel.send(source)
                break
            self._reap()
        answers, patience_s = list[Verdict](), _MOMENT_S
        try:
            answers = self._channel.receive(self.wall_s) if self._channel is not None else []
        except ChannelClosed:
            patience_s = _ENDING_S  # the signal that ends the fork tells the reason
        if answers:
            self._charged_s += answers[0].cpu_s
            if answers[0].is_last:
                self._reap()
            return answers[0]
        status, used_s = self._reap(patience_s)
        cpu_s = used_s - self._charged_s
        timed_out = status == signal.SIGPROF
        error = _ERRORS.get(status, "takes too much time or memory to compile")
        if timed_out:
            error = f"takes more than {self.cpu_s:g} s of CPU time to compile"
        error = f"{error}; it {described(source)}"
        return Verdict(error, cpu_s, died=True, timed_out=timed_out)

    def close(self) -> None:
        """Ends the fork."""
        if self._channel is not None:
            self._reap()

    def _reap(self, patience_s: float = _MOMENT_S) -> tuple[int, float]:
        """Ends the fork, after `patience_s` seconds by SIGKILL. Returns the signal that ended the
        fork (or 0) and its CPU seconds.
        """
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        deadline = time.monotonic() + patience_s
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                _, status, usage = os.wait4(self.pid, 0)
                break
            time.sleep(0.001)
        self.pid = 0
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return ended_by, usage.ru_utime + usage.ru_stime

    def _fork(self) -> None:
        mine, theirs = create_socket_pair()
        self._charged_s, parent = 0.0, os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            try:
                end_with_parent(parent)
                self._serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._channel = EngineChannel[Verdict](mine, Verdict)

    def _serve(self, end: socket.socket) -> None:
        """Compiles grammars in the fork."""
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.RLIM_INFINITY))
        prefer_oom_kill()
        channel = EngineChannel[GrammarSource](end, GrammarSource)
        first = mapped_bytes()
        charged_s = 0.0
        while True:
            for source in channel.receive(None):
                error = self._error(source, first)
                used_s = time.process_time()
                is_last = mapped_bytes() > first + _MAX_GROWTH_BYTES
                channel.send(Verdict(error, used_s - charged_s, is_last=is_last))
                charged_s = used_s

    def _error(self, source: GrammarSource, first: int) -> str:
        """Returns the reason why the grammar cannot be compiled. Empty if it can be compiled.

        Args:
            source: text of the grammar.
            first: bytes of address space of the fork before its first grammar.
        """
        with limited(self.cpu_s, self.memory_bytes, first):
            try:
                compile_grammar(self.vocabulary, source)
            except InvalidGrammar as refused:
                return refused.message
            except MemoryError:
                error = _MEMORY_ERROR
            except BaseException as panic:
                return f"cannot be compiled: {type(panic).__name__}"
            else:
                return ""
        return f"{error}; it {described(source)}"


def main() -> int:
    """Compiles until the front closes a lane's channel. Returns the exit status."""
    data, ends = children.begin()
    settings = msgspec.json.decode(data, type=MaskSettings)
    setup_logging("decoder-compiler", settings.log_level)
    vocabulary = Vocabulary.read(Path(settings.directory), settings.vocab_size, settings.end_ids)
    parent = os.getpid()
    for lane, own in zip(LANES, ends, strict=True):
        if os.fork() == 0:
            end_with_parent(parent)
            for end in ends:
                if end != own:
                    os.close(end)
            _serve(vocabulary, lane, own)
            return 0
    for end in ends:
        os.close(end)
    os.wait()  # the lanes end together
    return 0


def _serve(vocabulary: Vocabulary, lane: Lane, end: int) -> None:
    """Compiles a lane's grammars until the front closes its channel."""
    os.nice(lane.niceness)
    channel = EngineChannel[GrammarSource](socket.socket(fileno=end), GrammarSource)
    compiler = Compiler(vocabulary, lane.cpu_s)
    with suppress(ChannelClosed):
        while True:
            for source in channel.receive(None):
                channel.send(compiler.compile(source))
    compiler.close()


if __name__ == "__main__":
    sys.exit(main())
