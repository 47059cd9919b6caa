"""Supervises the processes of a stack on one machine.

`Stack` starts the processes, waits until each is ready, and then watches them. It restarts nothing:
when a child ends, the stack ends with the child's exit status. An observer gets each line that a
child writes. No process is left behind: after a signal every child ends within a stated time, and
if the supervisor itself is killed, the kernel kills its children.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from triptych import ROOT
from triptych.console import Console

# Added to the grace period of running requests, because services stop after the gateways.
_SERVICES_STOP_S = 1.5
_CLEANUP_S = 0.5
_POLL_S = 0.05
_READY_POLL_S = 0.2  # longer than _POLL_S because each check opens a connection
_NUM_LAST_LINES = 15
_PARENT_DEATH = str(ROOT / "services" / "common" / "process" / "parent_death.py")

ReadyCheck = Callable[[], Awaitable[bool]]


class Quiet:
    """An observer that passes reports on, and stores each child's last lines for error messages."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._last: dict[str, deque[str]] = {}

    def report(self, line: str) -> None:
        self._report(line)

    def started(self, child: str) -> None: ...

    def child_ready(self, child: str, seconds: float) -> None:
        self._report(f"{child} ready after {seconds:.1f} s")

    def output(self, child: str, line: str) -> None:
        self._last.setdefault(child, deque(maxlen=_NUM_LAST_LINES)).append(line)

    def cause(self, child: str) -> str:
        return "".join(f"\n  {child} | {line}" for line in self._last.get(child, ()))


Observer = Console | Quiet  # receives reports and the children's output, from several threads


class StackError(Exception):
    """The stack could not start, or a child ended. `status` is the exit status of the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to run.

    Attributes:
        name: name in logs, such as `encoder-0`.
        command: program and arguments.
        environment: variables that are added to those of the supervisor.
        is_ready: readiness check, which is polled until it returns True and must return quickly.
        is_front: True for a gateway, which stops before the services that it calls.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    is_ready: ReadyCheck
    is_front: bool = False


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    started: float = field(default_factory=time.monotonic)


def end_signals() -> list[signal.Signals]:
    """Signals besides SIGINT that stop the stack: SIGTERM, and SIGHUP unless it is ignored."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def exit_status(returncode: int) -> int:
    """Converts a `Popen.returncode` to a shell's exit status (128 + n for signal n)."""
    return 128 - returncode if returncode < 0 else returncode


def ending(returncode: int) -> str:
    """Describes how a process ended."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


class Stack:
    """The child processes of a stack. The async context manager stops them when it exits.

    `start` and `watch` must run in the main thread, because a child is killed when the thread that
    started it ends.

    Args:
        observer: receives reports and the children's output.
        grace_s: seconds for which the gateways' running requests may continue during a stop.
    """

    def __init__(self, observer: Observer, grace_s: float = 2.5) -> None:
        self._observer = observer
        self._children: list[_Child] = []
        self._is_ready = False
        self._hurried = False
        self.stop_timeout_s = grace_s + _SERVICES_STOP_S + _CLEANUP_S

    async def __aenter__(self) -> "Stack":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, specs: Sequence[ChildSpec], timeout_s: float) -> None:
        """Starts all children at the same time and returns when all are ready.

        Raises:
            StackError: a child has ended, cannot be run, or is not ready in time.
        """
        for spec in specs:
            self._children.append(_spawn(spec, self._observer))
            self._observer.started(spec.name)
        deadline = time.monotonic() + timeout_s
        waiters = [
            asyncio.create_task(self._wait_ready(child, deadline)) for child in self._children
        ]
        try:
            await asyncio.gather(*waiters)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)
        self._is_ready = True

    def report(self, line: str) -> None:
        """Passes a line to the observer."""
        self._observer.report(line)

    def hurry(self) -> None:
        """Makes `stop` kill the children without further waiting."""
        self._hurried = True

    async def watch(self) -> None:
        """Watches the children until it is cancelled.

        Raises:
            StackError: a child has ended.
        """
        while True:
            self._raise_if_ended(starting=False)
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Ends all children within `stop_timeout_s` and kills what is left of their process groups.

        Gateways stop first, so that running requests can finish while the services still run. If
        the stack has not been ready yet, children are killed without waiting.
        """
        children, self._children = self._children, []
        deadline = time.monotonic() + (self.stop_timeout_s if self._is_ready else 0.0)
        for front in (True, False):
            group = [child for child in children if child.spec.is_front == front]
            for child in group:
                if child.process.poll() is None:
                    child.process.terminate()
            await self._wait_ended(group, deadline - _SERVICES_STOP_S if front else deadline)
        for child in children:
            if child.process.poll() is None and self._is_ready and not self._hurried:
                self._observer.report(
                    f"{child.spec.name} did not stop within {self.stop_timeout_s:g} s: killed"
                )
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.reader.join(_CLEANUP_S)

    async def _wait_ended(self, children: Sequence[_Child], deadline: float) -> None:
        while time.monotonic() < deadline and not self._hurried:
            if all(child.process.poll() is not None for child in children):
                return
            await asyncio.sleep(_POLL_S)

    async def _wait_ready(self, child: _Child, deadline: float) -> None:
        while not await child.spec.is_ready():
            self._raise_if_ended(starting=True)
            if time.monotonic() > deadline:
                cause = self._observer.cause(child.spec.name)
                raise StackError(f"{child.spec.name} was not ready in time{_colon(cause)}")
            await asyncio.sleep(_READY_POLL_S)
        self._observer.child_ready(child.spec.name, time.monotonic() - child.started)

    def _raise_if_ended(self, *, starting: bool) -> None:
        for child in self._children:
            if (returncode := child.process.poll()) is not None:
                status = exit_status(returncode) or (1 if starting else 0)
                when = "before it was ready" if starting else "while serving"
                child.reader.join(_CLEANUP_S)  # so that the observer has the last lines
                # The output of a killed process does not explain its end.
                is_killed = returncode == -signal.SIGKILL
                cause = "" if is_killed else self._observer.cause(child.spec.name)
                raise StackError(
                    f"{child.spec.name} ended {when}: {ending(returncode)}{_colon(cause)}", status
                )


def _colon(cause: str) -> str:
    """Adds a colon before a cause, unless the cause begins on a new line."""
    return cause if not cause or cause.startswith("\n") else f": {cause}"


def _spawn(spec: ChildSpec, observer: Observer) -> _Child:
    if shutil.which(spec.command[0]) is None:
        raise StackError(f"{spec.name} cannot be started: there is no {spec.command[0]}")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _PARENT_DEATH, str(os.getpid()), *spec.command],
        env=os.environ | dict(spec.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Children stay in this session. Linux first divides CPU time among sessions (autogroups),
        # so with a session each, niceness would only have effect within a service.
        process_group=0,
    )
    # Each child's output is read by a thread, so that no child waits for the event loop.
    reader = threading.Thread(
        target=_read, args=(process, spec.name, observer), name=f"log of {spec.name}", daemon=True
    )
    reader.start()
    return _Child(spec, process, reader)


def _read(process: subprocess.Popen[bytes], name: str, observer: Observer) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            observer.output(name, line.decode(errors="replace").rstrip())


async def run_until_signal(
    stack: Stack,
    specs: Sequence[ChildSpec],
    timeout_s: float,
    on_ready: Callable[[], None],
    while_ready: Callable[[], Awaitable[None]],
    while_stopping: Callable[[], Awaitable[None]],
) -> int:
    """Runs a stack until a signal (SIGINT, SIGTERM, SIGHUP) and returns the exit status.

    A second signal kills all processes immediately.

    Args:
        stack: stack that has not been started.
        specs: processes to start.
        timeout_s: seconds within which all processes must be ready.
        on_ready: called once when all processes are ready.
        while_ready: coroutine function that runs from then on until the stack has stopped.
        while_stopping: coroutine function that runs while the stack stops after a signal.

    Raises:
        StackError: the stack could not start, or a child has ended.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            stack.hurry()
        stopped.set()

    numbers = [signal.SIGINT, *end_signals()]
    for number in numbers:
        loop.add_signal_handler(number, stop)
    beside: list[asyncio.Task[None]] = []
    try:
        await _race(stack.start(specs, timeout_s), stopped)
        if not stopped.is_set():
            on_ready()
            beside.append(asyncio.ensure_future(while_ready()))
            await _race(stack.watch(), stopped)
            beside.append(asyncio.ensure_future(while_stopping()))
        else:
            stack.report("stopped before all were ready")
        return 0
    finally:
        await stack.stop()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for number in numbers:
            loop.remove_signal_handler(number)


async def _race(work: Awaitable[None], stopped: asyncio.Event) -> None:
    """Awaits `work` until it ends or `stopped` is set. Exceptions of `work` are raised."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.create_task(stopped.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
