"""The front's side of the mask processes, which fill token masks, and of the compile process.

Masks are not filled in the front, for two reasons. The front streams every token of every sequence,
so masks and streams would wait for each other. And a grammar that crashes llguidance must not end
the front.

A process that ends is replaced, and its sequences continue in the next process from their tokens.
A sequence fails only if two processes have ended while they worked on it. A process with a stuck
thread, whose work takes too long, retires: its other threads continue with their sequences, and all
other sequences continue in the successor.
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
from services.decoder.masks.compile_pool import MAX_WAIT_S, CompilePool
from services.decoder.masks.compile_process import CompileProcess
from services.decoder.masks.grammar import GrammarSource, TokenConstraints
from services.decoder.masks.messages import (
    CannotFollow,
    Follow,
    Forget,
    FromProcess,
    MaskSettings,
    MaskTimes,
    ThreadStuck,
)
from services.decoder.masks.rows import Marks, create_mask_memory, num_mask_words
from services.decoder.masks.verdicts import Verdicts
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

_MODULE = "services.decoder.masks.main"
# Each process needs 150 MB for the vocabulary, so small machines have one process.
_LEAST_CORES = 8
_CORES_PER_PROCESS = 2
_MAX_PROCESSES = 8
_MAX_SHARES = 4  # the memory for grammars is divided among at most this number of processes
_MAX_DEATHS = 2  # deaths of processes that worked on a sequence until the sequence fails
_EXIT_S = 5.0
_WATCH_PERIOD_S = 1.0
_HANG_S = 15.0
_START_S = 60.0
_MAX_FAILED_STARTS = 3
_PAUSE_S = 5.0  # pause after the last of these
_MAX_RETIRING = 2  # retiring processes; if there are more, the oldest is killed


def num_mask_processes() -> int:
    """Returns the number of mask processes that this pod has cores for."""
    cores = num_cpus()
    return 1 if cores < _LEAST_CORES else min(_MAX_PROCESSES, cores // _CORES_PER_PROCESS)


@dataclass(slots=True, eq=False)
class _MaskedSequence:
    """A sequence with token masks.

    Attributes:
        number: the engine's number of the sequence.
        constraints: constraints on the tokens of the sequence.
        generated: completion tokens so far.
        tenant: tenant that is charged for the compilations of the grammar.
        background: True if the sequence runs only where no other sequence waits.
        process: process that fills the masks. None while the grammar is being checked.
        checking: task that checks the grammar. None if the grammar is not being checked.
        num_deaths: number of processes that have ended while they worked on the sequence.
        is_slow: True if the grammar takes long to compile.
        is_renewed: True if the sequence has moved to another process, which may have missed tokens
            that the engine sent before.
    """

    number: int
    constraints: TokenConstraints
    generated: list[int]
    tenant: str
    background: bool
    process: "_Process | None" = None
    checking: asyncio.Task[None] | None = None
    num_deaths: int = 0
    is_slow: bool = False
    is_renewed: bool = False

    @property
    def source(self) -> GrammarSource | None:
        """The sequence's grammar."""
        return self.constraints.grammar.source if self.constraints.grammar is not None else None

    @property
    def start_message(self) -> Follow:
        """The message that adds the sequence to a process."""
        return Follow(
            self.number,
            self.constraints,
            self.generated,
            self.is_slow,
            self.tenant,
            self.background,
        )


@dataclass(slots=True, eq=False)
class _Process:
    """A mask process, which is started again when it ends.

    Attributes:
        sequences: sequences whose masks the process fills, by number.
        link: number of the process; see `MaskLink`.
        process: the running process. None before the first start.
        channel: channel to the process. None while the process is being started.
        marks: marks of the sequences that the process works on. None before the first start.
        started_at: time of the last start, as `time.monotonic()`.
        is_ready: True once the process has sent a message.
        num_failed_starts: number of failed starts since the process last ran. New sequences go to a
            process with the fewest.
        is_retiring: True if the process ends with the last of its sequences.
    """

    sequences: dict[int, _MaskedSequence] = field(default_factory=dict[int, _MaskedSequence])
    link: int = -1
    process: asyncio.subprocess.Process | None = None
    channel: FrontChannel[FromProcess] | None = None
    marks: Marks | None = None
    started_at: float = 0.0
    is_ready: bool = False
    num_failed_starts: int = 0
    is_retiring: bool = False


@dataclass(eq=False)
class MaskProcesses:
    """Owner of the mask processes and the compile process. Each sequence belongs to one process.

    Attributes:
        settings: settings of the processes.
        link: socket to the engine for descriptors. It is closed with this object.
        engine: channel to the engine.
        metrics: metrics of the decoder.
        count: number of processes that fill masks. 0 if the number of cores decides.
        launcher: starts the processes.
        hang_s: seconds without a report after which a process is killed. A process reports every
            second.
        max_wait_s: longest time that a sequence waits for the verdict on its grammar.
    """

    settings: MaskSettings
    link: socket.socket
    engine: FrontChannel[EngineMessage]
    metrics: DecoderMetrics
    count: int = 0
    launcher: children.Launcher = field(default_factory=children.Launcher)
    hang_s: float = _HANG_S
    max_wait_s: float = MAX_WAIT_S
    _listener: InputListener | None = None
    _num_started: int = 0
    _sequences: dict[int, _MaskedSequence] = field(default_factory=dict[int, _MaskedSequence])
    _retiring: list[_Process] = field(default_factory=list[_Process])

    def __post_init__(self) -> None:
        self._num_words = num_mask_words(self.settings.vocab_size)
        self.compilers = CompilePool(
            CompileProcess(self.settings, self.launcher),
            self.metrics.grammar_compile,
            Verdicts(),
            self.max_wait_s,
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

    def add(
        self,
        number: int,
        constraints: TokenConstraints,
        generated: list[int],
        tenant: str,
        *,
        background: bool = False,
    ) -> None:
        """Adds a sequence, which the engine must know already. The engine receives its next mask.

        Args:
            number: the engine's number of the sequence.
            constraints: constraints on the tokens of the sequence.
            generated: completion tokens that another decoder has sampled.
            tenant: tenant that is charged for the compilations of the grammar.
            background: True if the sequence runs only where no other sequence waits. Its
                compilations come behind those of other sequences.
        """
        sequence = self._sequences[number] = _MaskedSequence(
            number, constraints, generated, tenant, background
        )
        if constraints.grammar is None:
            self._follow(sequence)
        else:
            sequence.checking = asyncio.create_task(self._check(sequence))

    def tokens_arrived(self, tokens: Iterable[tuple[int, list[int]]]) -> None:
        """Records tokens of running sequences. The engine has sent the tokens to the processes. The
        tokens are sent again to a process that has taken over a sequence and may have missed them.

        Args:
            tokens: number and new tokens of each sequence. Sequences without masks are ignored.
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
        """Removes a sequence that has ended. Does nothing if the sequence has no masks."""
        if (sequence := self._sequences.pop(number, None)) is None:
            return
        if sequence.checking is not None:
            sequence.checking.cancel()
        if (process := sequence.process) is not None:
            del process.sequences[number]
            if process.channel is not None:
                process.channel.send(Forget(number))
            self._close_if_idle(process)

    async def close(self) -> None:
        """Ends all processes."""
        checking = [s.checking for s in self._sequences.values() if s.checking is not None]
        for task in (*self._tasks, *checking):
            task.cancel()
        await asyncio.gather(*self._tasks, *checking, return_exceptions=True)
        await self.compilers.close()
        processes = self.processes + self._retiring
        for process in processes:
            if process.channel is not None:
                process.channel.close()
        for process in processes:
            await children.end(process.process, _EXIT_S)
        self.link.close()

    def _fail(self, number: int, error: TriptychError) -> None:
        assert self._listener is not None, "the processes have not been started"
        self._listener.input_failed(number, error)

    async def _check(self, sequence: _MaskedSequence) -> None:
        grammar = sequence.constraints.grammar
        assert grammar is not None
        try:
            sequence.is_slow = await self.compilers.check(
                grammar.source, sequence.tenant, background=sequence.background
            )
        except TriptychError as error:
            self._fail(sequence.number, error)
        else:
            self._follow(sequence)
        finally:
            sequence.checking = None

    def _follow(self, sequence: _MaskedSequence) -> None:
        process = min(
            self.processes, key=lambda each: (each.num_failed_starts, len(each.sequences))
        )
        process.sequences[sequence.number] = sequence
        sequence.process = process
        if process.channel is not None:
            process.channel.send(sequence.start_message)

    async def _keep(self, process: _Process) -> None:
        """Runs a process. Restarts the process whenever it has ended or could not be started, until
        the process retires.
        """
        while not process.is_retiring:
            try:
                channel = await self._start(process)
            except OSError as error:
                log.error("a mask process could not be started: %s", error)
                process.num_failed_starts += 1
                await asyncio.sleep(self.launcher.retry_s)
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
        self._retiring.remove(process)
        self._hand_over(process)

    def _hand_over(self, process: _Process) -> None:
        """Moves the sequences of a process that has retired or cannot be started to other
        processes. The sequences fail if no process can be started.
        """
        can_go_on = any(p.num_failed_starts < _MAX_FAILED_STARTS for p in self.processes)
        for sequence in list(process.sequences.values()):
            if can_go_on:
                del process.sequences[sequence.number]
                sequence.is_renewed = True
                self._follow(sequence)
            else:
                self._fail(
                    sequence.number,
                    Unavailable(
                        "token masks cannot be filled, because no mask process could be started"
                    ),
                )

    def _retire(self, process: _Process, stuck: ThreadStuck) -> None:
        """Retires a process with a stuck thread. Sequences that wait for the thread move to other
        processes, which also get new sequences. Sequences with the grammar of the stuck work fail.
        """
        error = InvalidGrammar("it takes too much work to follow")
        if stuck.source is not None:
            self.compilers.refuse(stuck.source, error)
        if not process.is_retiring:
            process.is_retiring = True
            self._retiring.append(process)
            successor = self.processes[self.processes.index(process)] = _Process()
            self._tasks.append(asyncio.create_task(self._keep(successor)))
            if len(self._retiring) > _MAX_RETIRING:
                _kill(self._retiring[0])
        for number in stuck.sequence_ids:
            if (sequence := process.sequences.pop(number, None)) is None:
                continue
            sequence.process = None
            if sequence.source == stuck.source:
                self._fail(number, error)
            else:
                sequence.is_renewed = True
                self._follow(sequence)
        self._close_if_idle(process)

    def _close_if_idle(self, process: _Process) -> None:
        """Closes the channel of a retiring process that has no sequences left, which ends it."""
        if process.is_retiring and not process.sequences and process.channel is not None:
            process.channel.close()

    def _has_ended(self, process: _Process) -> None:
        if process.is_retiring and not process.sequences:
            return
        process.num_failed_starts += not process.is_ready
        assert process.marks is not None and process.process is not None
        in_work = [number for number, _ in process.marks.get()]
        log.error(
            "a mask process has ended",
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
        """Starts a process, and sends it its sequences. Returns the channel to the process.

        Raises:
            OSError: the machine has no memory, processes or descriptors left.
        """
        settings = self.settings
        self._num_started += 1
        process.link, process.is_ready = self._num_started, False
        process.started_at = time.monotonic()
        num_rows = settings.num_rows * (1 + settings.max_drafts)
        memory = create_mask_memory(num_rows, self._num_words)
        try:
            process.marks = Marks(memory)
            front_end, end, engine_end, link = create_socket_pair() + create_socket_pair()
            try:
                with end, link, engine_end:
                    own = msgspec.structs.replace(
                        settings, link=process.link, grammar_bytes=self._grammar_bytes
                    )
                    process.process = await self.launcher.start(
                        _MODULE, msgspec.json.encode(own), end.fileno(), link.fileno(), memory
                    )
                    socket.send_fds(self.link, [b"l"], [engine_end.fileno(), memory])
                self.engine.send(MaskLink(process.link, num_rows, self._num_words))
                channel = await FrontChannel[FromProcess].open(front_end, FromProcess)
            except BaseException:  # also if this task is cancelled during the start
                front_end.close()
                raise
        finally:
            os.close(memory)
        process.channel = channel
        for sequence in process.sequences.values():
            sequence.is_renewed = True
            channel.send(sequence.start_message)
        return channel

    def _handle(self, process: _Process, message: FromProcess) -> None:
        match message:
            case CannotFollow():
                if message.sequence_id in self._sequences:
                    self._fail(message.sequence_id, from_code(message.code, message.message))
            case ThreadStuck():
                self._retire(process, message)
            case MaskTimes():
                for seconds in message.seconds:
                    self.metrics.token_mask.observe(seconds)
            case TokenMasks():
                self.engine.send(message)

    async def _watch(self) -> None:
        """Kills processes that hang. A process should send a report every second."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            now = time.monotonic()
            for process in self.processes + self._retiring:
                if process.channel is None:
                    continue
                last_report_at = process.started_at + _START_S - self.hang_s
                if process.is_ready:
                    last_report_at = process.channel.received_at
                if now - last_report_at >= self.hang_s:
                    log.error("a mask process hangs and is killed")
                    _kill(process)


def _kill(process: _Process) -> None:
    """Kills a process, if it is running."""
    if process.process is not None and process.process.returncode is None:
        with suppress(ProcessLookupError):
            process.process.kill()
