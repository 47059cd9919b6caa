"""What people see of a stack: a bar for each process that starts, then its logs as lines of text.

`serve` gives it to the supervisor as the observer. Services log JSON; records about a start
(`stage`, `done`, `total`) become bars on a terminal and a few lines elsewhere. Why a process could
not start is kept, and said once.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_ACCESS_LOGGER = "services.gateway.http.middleware"
_READY = "runner is ready"
# Between two lines about the same stage, where there is no terminal.
_PERIOD_S = 5.0
# Fields of every record, which say nothing that the line does not.
_COMMON = {"time", "level", "service", "logger", "message", "exception"}


def write(text: str, stream: TextIO) -> None:
    """Prints a line. On a full disk, and where the terminal is gone, it is lost: neither what comes
    after it nor who serves ends.
    """
    with suppress(OSError):
        print(text, file=stream, flush=True)


class Console:
    """Shows and filters.

    Args:
        levels: least level of each service's records that is shown; of a child that is not named,
            nothing is, unless it fails.
        access_log: show the gateway's line for each request at any level.
    """

    def __init__(
        self, levels: Mapping[str, str], *, access_log: bool = False, stream: TextIO | None = None
    ) -> None:
        self._levels = {
            name: _LEVELS.get(level.lower(), _LEVELS["warning"]) for name, level in levels.items()
        }
        self._access_log = access_log
        out = stream or sys.stderr
        is_dumb = os.environ.get("TERM") == "dumb"
        self._bars = _TerminalBars() if out.isatty() and not is_dumb else _Lines(out)
        self._lock = threading.Lock()
        self._causes: dict[str, str] = {}
        self._is_ready = False
        self.facts: dict[str, dict[str, Any]] = {}  # of each decoder's engine that is ready

    def report(self, line: str) -> None:
        """Prints a line of `serve` itself."""
        with self._lock:
            self._bars.print(f"triptych: {line}")

    def ready(self) -> None:
        """All have started: no more bars."""
        with self._lock:
            self._is_ready = True
            self._bars.close()

    def close(self) -> None:
        """Gives the terminal back."""
        with self._lock:
            self._bars.close()

    def cause(self, child: str) -> str:
        """The first thing that a service called critical, or what another program said last."""
        return self._causes.get(child, "")

    def output(self, child: str, line: str) -> None:
        """Takes a line that a child wrote; any thread."""
        record = _record(line)
        with self._lock:
            if child not in self._levels:
                self._causes[child] = line  # a program of others: its last words
            elif record is None:
                self._bars.print(f"{child} | {line}")
            elif "stage" in record:
                done, total = int(record.get("done", 0)), int(record.get("total", 0))
                self._bars.show(child, str(record["stage"]), done, total)
            else:
                self._take(child, record)

    def _take(self, child: str, record: dict[str, Any]) -> None:
        if record["message"] == _READY:
            self.facts[child] = record
        level = _LEVELS.get(str(record["level"]), _LEVELS["warning"])
        if level >= _LEVELS["critical"] and not self._is_ready:
            if "exception" in record:
                self._bars.print(f"{child} | {record['exception']}")
            self._causes.setdefault(child, str(record["message"]))
            return  # said once, by whoever ends the stack
        is_access = self._access_log and record["logger"] == _ACCESS_LOGGER
        if is_access or level >= self._levels[child]:
            self._bars.print(_text(child, record))


def _record(line: str) -> dict[str, Any] | None:
    """A record of our services; None: something else."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and {"level", "logger", "message"} <= found.keys()
    return found if is_ours else None


def _text(child: str, record: Mapping[str, Any]) -> str:
    """A record as a line for people."""
    level = str(record["level"]).upper()
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _COMMON)
    text = f"{child} {level} {record['message']}{f'  {fields}' if fields else ''}"
    return f"{text}\n{record['exception']}" if "exception" in record else text


class _Lines:
    """For logs: a line when a stage begins, and every few seconds of a long one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, tuple[str, float]] = {}

    def show(self, child: str, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        last_stage, last_at = self._last.get(child, ("", 0.0))
        if stage == last_stage and now - last_at < _PERIOD_S:
            return
        self._last[child] = (stage, now)
        self.print(f"triptych: {child}: {stage}{f', {done} of {total}' if total else ''}")

    def print(self, text: str) -> None:
        write(text, self._stream)

    def close(self) -> None:
        self._last.clear()


class _TerminalBars:
    """For people: one bar for each process that starts. What a terminal that is gone refuses is
    lost.
    """

    def __init__(self) -> None:
        from rich.console import Console as Terminal
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._terminal = Terminal(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.fields[child]}"), TextColumn("{task.description}"), BarColumn(),
            MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._terminal, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._is_open = True

    def show(self, child: str, stage: str, done: int, total: int) -> None:
        if not self._is_open:
            return
        with suppress(OSError):
            self._progress.start()
            if child not in self._tasks:
                self._tasks[child] = self._progress.add_task(stage, child=child)
            task = self._tasks[child]
            self._progress.update(task, description=stage, completed=done, total=total or None)

    def print(self, text: str) -> None:
        if self._is_open:
            with suppress(OSError):
                self._terminal.print(text)
        else:  # rich would keep what was refused
            write(text, sys.stderr)

    def close(self) -> None:
        self._is_open = False
        with suppress(OSError):
            self._progress.stop()
