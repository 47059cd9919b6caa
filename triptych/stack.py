"""A process supervisor for one machine.

It starts separate processes, waits until each is ready, and then watches them. It restarts nothing:
when a child ends, the stack ends with the child's exit status. It leaves no process behind: after a
signal every child ends within `STOP_TIMEOUT_S`, and if the supervisor itself is killed, the kernel
kills its children.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

STOP_TIMEOUT_S = 4.5
# The part of it that is reserved for services, which stop after the gateways.
_SERVICES_STOP_S = 1.5
_POLL_S = 0.05
_PARENT_DEATH = str(Path(__file__).with_name("parent_death.py"))

ReadyCheck = Callable[[], Awaitable[bool]]
Report = Callable[[str], None]


class StackError(Exception):
    """The stack could not start, or a child ended; `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run.

    Attributes:
        name: for people, such as `encoder-0`.
        command: argument vector.
        environment: variables set on top of the supervisor's own.
        is_ready: polled until true; must return soon.
        log_path: for its output; None: the supervisor's standard error.
        is_front: requests arrive here, so it stops before the services it calls.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    is_ready: ReadyCheck
    log_path: Path | None = None
    is_front: bool = False


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    log: TextIO | None
    started: float = field(default_factory=time.monotonic)


def exit_status(returncode: int) -> int:
    """A shell's exit status for a `Popen.returncode` (128 + n for signal n)."""
    return 128 - returncode if returncode < 0 else returncode


def ending(returncode: int) -> str:
    """How a process ended, for people."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


class Stack:
    """The children of one `serve`.

    Use as an async context manager; leaving it stops everything. `start` and `watch` must run in
    the main thread, because a child dies with the thread that started it.

    Args:
        report: receives one line at a time, for people.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._children: list[_Child] = []

    async def __aenter__(self) -> "Stack":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, specs: Sequence[ChildSpec], timeout_s: float) -> None:
        """Starts all children at once and returns when all are ready.

        Raises:
            StackError: a child ended, cannot be run, or is not ready in time.
        """
        for spec in specs:
            self._children.append(_spawn(spec))
        deadline = time.monotonic() + timeout_s
        started = [child for child in self._children if child.spec in specs]
        waiters = [asyncio.create_task(self._wait_ready(child, deadline)) for child in started]
        try:
            await asyncio.gather(*waiters)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    async def watch(self) -> None:
        """Runs until cancelled.

        Raises:
            StackError: a child ended.
        """
        while True:
            self._raise_if_ended(starting=False)
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Ends all children within `STOP_TIMEOUT_S` and leaves no process group alive.

        Gateways stop first, so that running requests can finish while the services still run.
        """
        children, self._children = self._children, []
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for front in (True, False):
            group = [child for child in children if child.spec.is_front == front]
            for child in group:
                if child.process.poll() is None:
                    child.process.terminate()
            await _wait_ended(group, deadline - _SERVICES_STOP_S if front else deadline)
        for child in children:
            if child.process.poll() is None:
                self._report(f"{child.spec.name} did not stop in {STOP_TIMEOUT_S:g} s: killed")
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            if child.log:
                child.log.close()

    async def _wait_ready(self, child: _Child, deadline: float) -> None:
        while not await child.spec.is_ready():
            self._raise_if_ended(starting=True)
            if time.monotonic() > deadline:
                raise StackError(f"{child.spec.name} was not ready in time{_log_tail(child)}")
            await asyncio.sleep(_POLL_S)
        self._report(f"{child.spec.name} ready after {time.monotonic() - child.started:.1f} s")

    def _raise_if_ended(self, *, starting: bool) -> None:
        for child in self._children:
            if (returncode := child.process.poll()) is not None:
                status = exit_status(returncode) or (1 if starting else 0)
                when = "before it was ready" if starting else "while serving"
                raise StackError(
                    f"{child.spec.name} ended {when}: {ending(returncode)}{_log_tail(child)}",
                    status,
                )


async def _wait_ended(children: Sequence[_Child], deadline: float) -> None:
    for _ in range(round((deadline - time.monotonic()) / _POLL_S)):
        if all(child.process.poll() is not None for child in children):
            return
        await asyncio.sleep(_POLL_S)


def _spawn(spec: ChildSpec) -> _Child:
    if shutil.which(spec.command[0]) is None:
        raise StackError(f"{spec.name} cannot be started: there is no {spec.command[0]}")
    log = spec.log_path.open("a", encoding="utf-8") if spec.log_path else None
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _PARENT_DEATH, str(os.getpid()), *spec.command],
        env=os.environ | dict(spec.environment),
        stdin=subprocess.DEVNULL,
        stdout=log or sys.stderr.fileno(),
        stderr=log or sys.stderr.fileno(),
        # In this process's session: Linux shares the cores among sessions first (autogroups), and
        # what gives way in one service would give way to that service alone.
        process_group=0,
    )
    return _Child(spec, process, log)


def _log_tail(child: _Child, num_lines: int = 15) -> str:
    if child.spec.log_path is None:
        return ""
    lines = child.spec.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n" + "\n".join(f"  {child.spec.name} | {line}" for line in lines[-num_lines:])


async def run_until_signal(
    stack: Stack, specs: Sequence[ChildSpec], timeout_s: float, on_ready: Callable[[], None]
) -> int:
    """Runs the stack until SIGINT, SIGTERM or a child's end; returns the exit status.

    A second signal changes nothing: stopping is already bounded.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await _race(stack.start(specs, timeout_s), stopped)
        if not stopped.is_set():
            on_ready()
            await _race(stack.watch(), stopped)
        return 0
    finally:
        await stack.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _race(work: Awaitable[None], stopped: asyncio.Event) -> None:
    """Awaits `work` until it ends (raising what it raises) or `stopped` is set."""
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
