"""Starts models in processes of their own at the same time, and measures them one after another.

A start is bound by one core, which compiles and captures kernels, so that starts at the same time
take hardly longer than one. While a process measures, no other process computes: those that wait do
nothing, and those that are not ready by then are stopped by a signal until the measurement is over.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple


class Started(NamedTuple):
    """A process that was started.

    Attributes:
        name: name of the model.
        process: the process.
        connection: a pipe, through which the process says that it is ready and is told to measure.
    """

    name: str
    process: BaseProcess
    connection: Connection


class StageLines(logging.Handler):
    """Prints each stage of a start when it begins and ends, with the seconds since the beginning.

    Args:
        name: name of the model, with which each line begins.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self._name, self._began, self._stage = name, time.monotonic(), ""

    def emit(self, record: logging.LogRecord) -> None:
        fields: Any = getattr(record, "fields", {})
        if record.levelno >= logging.WARNING:
            self.print_line(record.getMessage())
        elif "stage" in fields:
            done, total = fields["done"], fields["total"]
            if fields["stage"] != self._stage or 0 < total <= done:
                self._stage = fields["stage"]
                self.print_line(f"{self._stage}, {done} of {total}" if total else self._stage)

    def print_line(self, text: str) -> None:
        """Prints a line of text."""
        print(f"{self._name} {time.monotonic() - self._began:6.1f} s: {text}", flush=True)

    def install(self) -> None:
        """Adds the handler to the root logger."""
        logging.getLogger().addHandler(self)
        logging.getLogger().setLevel(logging.INFO)


def run_side_by_side(
    target: Callable[..., None], arguments: Mapping[str, Any], patience_s: float
) -> None:
    """Starts a process for each model, and lets the processes measure in the order of `arguments`.

    Processes that are not ready after `patience_s` measure after those that are. All processes end
    with this one.

    Args:
        target: function of a process. It gets its argument and a connection, sends a message when
            it is ready, and measures when it gets one.
        arguments: argument of each process, by name of the model.
        patience_s: seconds for which processes that are ready wait for the others.
    """
    context = multiprocessing.get_context("spawn")
    starting: list[Started] = []
    previous = signal.signal(signal.SIGTERM, _exit)  # so that `finally` ends the processes
    try:
        for name, argument in arguments.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(argument, theirs))
            process.start()
            theirs.close()
            starting.append(Started(name, process, ours))
        deadline = time.monotonic() + patience_s
        while starting:
            ready = _ready(starting, deadline)
            others = [each for each in starting if each not in ready]
            _signal(others, signal.SIGSTOP)
            for each in ready:
                each.connection.send(None)
                each.process.join()
                starting.remove(each)
            _signal(others, signal.SIGCONT)
            deadline = time.monotonic()
    finally:
        for each in starting:
            each.process.kill()
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _ready(starting: list[Started], deadline: float) -> list[Started]:
    """Waits for processes, and returns those that are ready, at least one until none is left.

    Processes that have ended are removed from `starting`.
    """
    ready: list[Started] = []
    while len(ready) < len(starting):
        left_s = max(0.0, deadline - time.monotonic()) if ready else None
        open_ones = {each.connection: each for each in starting if each not in ready}
        found = wait(list(open_ones), left_s)
        if not found:
            break
        for connection in found:
            assert isinstance(connection, Connection)
            each = open_ones[connection]
            try:
                connection.recv()
                ready.append(each)
            except EOFError:
                starting.remove(each)
                print(f"{each.name}: the process has ended before it was ready", flush=True)
    return [each for each in starting if each in ready]


def _signal(processes: list[Started], number: signal.Signals) -> None:
    for each in processes:
        if each.process.pid is not None and each.process.is_alive():
            os.kill(each.process.pid, number)
