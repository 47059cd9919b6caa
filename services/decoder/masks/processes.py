"""The front's side of the processes that compile grammars and fill token masks.

The front's interpreter streams every token of every sequence, so masks that are filled in it would
wait for it, and it for them; and what strangers' grammars do to llguidance ends no front. A process
that ends is replaced, and its sequences go on in the next one, from their tokens; only a sequence
that was in work when a process ended, twice, fails. A process whose thread is taken by work that
takes too long is not ended: it goes on with the sequences that it fills masks of, and all others go
on in its successor.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from services.common.errors import InvalidGrammar, TriptychError, Unavailable, from_code
from services.common.process import children
from services.common.process.channel import ChannelClosed, FrontChannel, create_socket_pair
from services.common.process.pod_limits import num_cpus
from services.decoder.engine.messages import EngineMessage, MaskLink, NewTokens, TokenMasks
from services.decoder.input_listener import InputListener
from services.decoder.masks.compile_pool import CompilePool
from services.decoder.masks.compile_process import CompileProcess
from services.decoder.masks.grammar import Demands, GrammarSource
from services.decoder.masks.messages import (
    CannotFollow,
    Follow,
    Forget,
    FromProcess,
    MaskSettings,
    MaskTimes,
    ThreadTaken,
)
from services.decoder.masks.rows import Marks, create_mask_memory, num_mask_words
from services.decoder.masks.verdicts import Verdicts
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

_MODULE = "services.decoder.masks.main"
# Each process has the vocabulary, 150 MB.
_LEAST_CORES = 8
_CORES_PER_PROCESS = 2
_MAX_PROCESSES = 8
_MAX_SHARES = 4  # of the memory for grammars; more processes have as much each
_MAX_DEATHS = 2  # of processes, while they worked on one sequence
_EXIT_S = 5.0
_WATCH_PERIOD_S = 1.0
_HANG_S = 15.0  # a process says every second that it runs
_START_S = 60.0
_MAX_FAILED_STARTS = 3
_PAUSE_S = 5.0  # behind these
_MAX_LEAVING = 2  # processes whose threads are taken; beyond, the first of them is ended


def num_mask_processes() -> int:
    """As many as this pod has cores for."""
    cores = num_cpus()
    return 1 if cores < _LEAST_CORES else min(_MAX_PROCESSES, cores // _CORES_PER_PROCESS)


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence.

    Attributes:
        number: the engine's id of it.
        process: that fills its masks; None: its grammar is being checked.
        checking: the task that does so.
        num_deaths: of processes that worked on it.
        is_slow: whether its grammar takes long to compile.
        is_renewed: the process may not get all tokens from the engine.
    """

    number: int
    demands: Demands
    generated: list[int]
    process: "_Process | None" = None
    checking: asyncio.Task[None] | None = None
    num_deaths: int = 0
    is_slow: bool = False
    is_renewed: bool = False

    @property
    def source(self) -> GrammarSource | None:
        """The sequence's grammar."""
        return self.demands.grammar.source if self.demands.grammar is not None else None

    @property
    def follow(self) -> Follow:
        """The message with which a process starts on the sequence."""
        return Follow(self.number, self.demands, self.generated, self.is_slow)


@dataclass(slots=True, eq=False)
class _Process:
    """A process and those that follow it.

    Attributes:
        sequences: whose masks it fills.
        link: its number, see `MaskLink`.
        channel: None: it is being started.
        num_failed_starts: since it last ran; one with fewer gets what comes.
        is_leaving: whether it ends with the last of its sequences.
    """

    sequences: dict[int, _Followed] = field(default_factory=dict[int, _Followed])
    link: int = -1
    process: asyncio.subprocess.Process | None = None
    channel: FrontChannel[FromProcess] | None = None
    marks: Marks | None = None
    started_at: float = 0.0
    is_ready: bool = False
    num_failed_starts: int = 0
    is_leaving: bool = False


@dataclass(eq=False)
class MaskProcesses:
    """Owner of the processes; each sequence is one's.

    Attributes:
        link: to the engine, takes descriptors; closed with this.
        count: number of processes that fill masks. 0 if the number of cores decides.
    """

    settings: MaskSettings
    link: socket.socket
    engine: FrontChannel[EngineMessage]
    metrics: DecoderMetrics
    count: int = 0
    _listener: InputListener | None = None
    _num_started: int = 0
    _sequences: dict[int, _Followed] = field(default_factory=dict[int, _Followed])
    _leaving: list[_Process] = field(default_factory=list[_Process])

    def __post_init__(self) -> None:
        self._num_words = num_mask_words(self.settings.vocab_size)
        self.compilers = CompilePool(
            CompileProcess(self.settings), self.metrics.grammar_compile.observe, Verdicts()
        )
        self.processes = [_Process() for _ in range(self.count or num_mask_processes())]
        shares = min(len(self.processes), _MAX_SHARES)
        self._grammar_bytes = self.settings.grammar_bytes // shares
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End tokens of the model."""
        return self.settings.end_ids

    def start(self, listener: InputListener) -> None:
        """Starts the processes. Sequences that cannot continue are reported to the listener."""
        self._listener = listener
        self._tasks = [asyncio.create_task(self._keep(process)) for process in self.processes]
        self._tasks.append(asyncio.create_task(self._watch()))

    def add(self, number: int, demands: Demands, generated: list[int], tenant: str) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows.

        Args:
            generated: completion tokens that another decoder has sampled.
            tenant: whose turn it takes.
        """
        sequence = self._sequences[number] = _Followed(number, demands, generated)
        if demands.grammar is None:
            self._follow(sequence)
        else:
            sequence.checking = asyncio.create_task(self._check(sequence, tenant))

    def tokens_arrived(self, tokens: Iterable[tuple[int, list[int]]]) -> None:
        """Tokens of sequences that go on. The engine has sent them to the processes already, but
        perhaps before a process had taken over the sequence.
        """
        if not self._sequences:
            return
        for number, token_ids in tokens:
            sequence = self._sequences.get(number)
            if sequence is None:
                continue
            sequence.generated += token_ids
            process = sequence.process
            if sequence.is_renewed and process is not None and process.channel is not None:
                count = len(sequence.generated)
                process.channel.send(NewTokens([number], [token_ids], [count]))

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        if (sequence := self._sequences.pop(number, None)) is None:
            return
        if sequence.checking is not None:
            sequence.checking.cancel()
        if (process := sequence.process) is not None:
            del process.sequences[number]
            if process.channel is not None:
                process.channel.send(Forget(number))
            self._let_go(process)

    async def close(self) -> None:
        checking = [s.checking for s in self._sequences.values() if s.checking is not None]
        for task in (*self._tasks, *checking):
            task.cancel()
        await asyncio.gather(*self._tasks, *checking, return_exceptions=True)
        await self.compilers.close()
        processes = self.processes + self._leaving
        for process in processes:
            if process.channel is not None:
                process.channel.close()
        for process in processes:
            await children.end(process.process, _EXIT_S)
        self.link.close()

    def _fail(self, number: int, error: TriptychError) -> None:
        assert self._listener is not None, "the processes have not been started"
        self._listener.input_failed(number, error)

    async def _check(self, sequence: _Followed, tenant: str) -> None:
        grammar = sequence.demands.grammar
        assert grammar is not None
        try:
            sequence.is_slow = await self.compilers.check(grammar.source, tenant)
        except TriptychError as error:
            self._fail(sequence.number, error)
        else:
            self._follow(sequence)
        finally:
            sequence.checking = None

    def _follow(self, sequence: _Followed) -> None:
        process = min(
            self.processes, key=lambda each: (each.num_failed_starts, len(each.sequences))
        )
        process.sequences[sequence.number] = sequence
        sequence.process = process
        if process.channel is not None:
            process.channel.send(sequence.follow)

    async def _keep(self, process: _Process) -> None:
        """Starts the process, again whenever it has ended or could not be started, unless it is to
        end with its sequences.
        """
        while not process.is_leaving:
            try:
                channel = await self._start(process)
            except OSError as error:
                log.error("a process that fills token masks was not started: %s", error)
                process.num_failed_starts += 1
                await asyncio.sleep(children.RETRY_S)
            else:
                with suppress(ChannelClosed):
                    while True:
                        self._handle(process, await channel.receive())
                        process.is_ready, process.num_failed_starts = True, 0
                channel.close()
                await children.end(process.process, 0.1)
                process.channel = None
                self._has_ended(process)
            if process.num_failed_starts >= _MAX_FAILED_STARTS:
                self._hand_over(process)
                await asyncio.sleep(_PAUSE_S)
        self._leaving.remove(process)
        self._hand_over(process)

    def _hand_over(self, process: _Process) -> None:
        """The sequences of one that cannot be started, or has left, go on in another; where none
        runs or may be started, they fail.
        """
        can_go_on = any(p.num_failed_starts < _MAX_FAILED_STARTS for p in self.processes)
        for sequence in list(process.sequences.values()):
            if can_go_on:
                del process.sequences[sequence.number]
                sequence.is_renewed = True
                self._follow(sequence)
            else:
                self._fail(sequence.number, Unavailable("token masks cannot be filled"))

    def _leave(self, process: _Process, taken: ThreadTaken) -> None:
        """A thread of the process is taken: what waits for it, and what comes, goes on in another
        process; sequences with the grammar that took it fail.
        """
        error = InvalidGrammar("it takes too much work to follow")
        if taken.source is not None:
            self.compilers.refuse(taken.source, error)
        if not process.is_leaving:
            process.is_leaving = True
            self._leaving.append(process)
            successor = self.processes[self.processes.index(process)] = _Process()
            self._tasks.append(asyncio.create_task(self._keep(successor)))
            if len(self._leaving) > _MAX_LEAVING:
                _kill(self._leaving[0])
        for number in taken.sequence_ids:
            if (sequence := process.sequences.pop(number, None)) is None:
                continue
            sequence.process = None
            if sequence.source == taken.source:
                self._fail(number, error)
            else:
                sequence.is_renewed = True
                self._follow(sequence)
        self._let_go(process)

    def _let_go(self, process: _Process) -> None:
        """Ends a process that leaves, once it has no sequence any more."""
        if process.is_leaving and not process.sequences and process.channel is not None:
            process.channel.close()

    def _has_ended(self, process: _Process) -> None:
        if process.is_leaving and not process.sequences:
            return
        process.num_failed_starts += not process.is_ready
        assert process.marks is not None and process.process is not None
        in_work = [number for number, _ in process.marks.get()]
        log.error(
            "a process that fills token masks has ended",
            extra={"fields": {"status": process.process.returncode, "in_work": in_work}},
        )
        for number in in_work:
            if (sequence := process.sequences.get(number)) is None:
                continue
            sequence.num_deaths += 1
            if sequence.num_deaths >= _MAX_DEATHS:
                del process.sequences[number]
                sequence.process = None
                error = InvalidGrammar("it takes too much work to follow")
                if sequence.source is not None:
                    self.compilers.refuse(sequence.source, error)
                self._fail(number, error)

    async def _start(self, process: _Process) -> FrontChannel[FromProcess]:
        """Raises OSError, as `children.start` does."""
        settings = self.settings
        self._num_started += 1
        process.link, process.is_ready = self._num_started, False
        process.started_at = time.monotonic()
        memory = create_mask_memory(settings.num_rows, self._num_words)
        try:
            process.marks = Marks(memory)
            front_end, end, engine_end, link = create_socket_pair() + create_socket_pair()
            try:
                with end, link, engine_end:
                    own = msgspec.structs.replace(
                        settings, link=process.link, grammar_bytes=self._grammar_bytes
                    )
                    process.process = await children.start(
                        _MODULE, msgspec.json.encode(own), end.fileno(), link.fileno(), memory
                    )
                    socket.send_fds(self.link, [b"l"], [engine_end.fileno(), memory])
                self.engine.send(MaskLink(process.link, settings.num_rows, self._num_words))
                channel = await FrontChannel[FromProcess].open(front_end, FromProcess)
            except BaseException:  # closed during a start, too
                front_end.close()
                raise
        finally:
            os.close(memory)
        process.channel = channel
        for sequence in process.sequences.values():
            sequence.is_renewed = True
            channel.send(sequence.follow)
        return channel

    def _handle(self, process: _Process, message: FromProcess) -> None:
        match message:
            case CannotFollow():
                if message.sequence_id in self._sequences:
                    self._fail(message.sequence_id, from_code(message.code, message.message))
            case ThreadTaken():
                self._leave(process, message)
            case MaskTimes():
                for seconds in message.seconds:
                    self.metrics.token_mask.observe(seconds)
            case TokenMasks():
                self.engine.send(message)

    async def _watch(self) -> None:
        """Ends processes that hang: those that say nothing, although they should every second."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            now = time.monotonic()
            for process in self.processes + self._leaving:
                if process.channel is None:
                    continue
                heard = process.started_at + _START_S - _HANG_S
                if process.is_ready:
                    heard = process.channel.received_at
                if now - heard >= _HANG_S:
                    log.error("a process that fills token masks hangs; ending it")
                    _kill(process)


def _kill(process: _Process) -> None:
    """Ends a process at once, if it runs."""
    if process.process is not None and process.process.returncode is None:
        with suppress(ProcessLookupError):
            process.process.kill()
