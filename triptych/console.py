"""Shows a stack to its user: progress bars while processes start, then their logs as text.

`serve` passes a `Console` to the supervisor as its observer. Services log JSON. Records about the
progress of a start (`stage`, `done`, `total`) become bars on a terminal, and a few lines elsewhere.
The reason why a process could not start is stored and printed once, at the end.
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
# Seconds between two lines about the same stage if the output is not a terminal.
_PERIOD_S = 5.0
# Fields of every record that a line does not repeat.
_COMMON = {"time", "level", "service", "logger", "message", "exception"}


def write(text: str, stream: TextIO) -> None:
    """Prints a line. Errors, such as a full disk or a closed terminal, are ignored.

    The server goes on without the line.
    """
    with suppress(OSError):
        print(text, file=stream, flush=True)


class Console:
    """Filters and prints the output of the stack's processes.

    Args:
        levels: lowest level of the records that are shown, by child. The output of other children
            is not shown, except as the cause of a failure.
        access_log: True if the gateway's line for each request is shown at any level.
        stream: stream to print to, whose terminal has the progress bars. Defaults to standard
            error.

    Attributes:
        facts: record of each decoder whose engine is ready, by child.
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
        self._bars = _TerminalBars(out) if out.isatty() and not is_dumb else _Lines(out)
        self._lock = threading.Lock()
        self._causes: dict[str, str] = {}
        self._is_ready = False
        self.facts: dict[str, dict[str, Any]] = {}

    def report(self, line: str) -> None:
        """Prints a message of the `triptych` command itself."""
        with self._lock:
            self._bars.print(f"triptych: {line}")

    def ready(self) -> None:
        """Closes the progress bars, because all processes have started."""
        with self._lock:
            self._is_ready = True
            self._bars.close()

    def close(self) -> None:
        """Closes the progress bars and restores the terminal."""
        with self._lock:
            self._bars.close()

    def cause(self, child: str) -> str:
        """Reason why a child failed: a service's first critical record, or else its last line."""
        return self._causes.get(child, "")

    def output(self, child: str, line: str) -> None:
        """Handles a line that a child has written. Can be called from any thread."""
        record = _record(line)
        with self._lock:
            if child not in self._levels:
                self._causes[child] = line  # not a service: the last line is the cause
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
            return  # the error that ends the stack quotes the cause
        is_access = self._access_log and record["logger"] == _ACCESS_LOGGER
        if is_access or level >= self._levels[child]:
            self._bars.print(_text(child, record))


def _record(line: str) -> dict[str, Any] | None:
    """Parses a log record of a service. None if the line is something else."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and {"level", "logger", "message"} <= found.keys()
    return found if is_ours else None


def _text(child: str, record: Mapping[str, Any]) -> str:
    """Formats a record as a line of text."""
    level = str(record["level"]).upper()
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _COMMON)
    text = f"{child} {level} {record['message']}{f'  {fields}' if fields else ''}"
    return f"{text}\n{record['exception']}" if "exception" in record else text


class _Lines:
    """Progress as lines, for logs: at the beginning of a stage and every few seconds of it."""

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
    """Progress as a bar for each process that starts. Errors of a closed terminal are ignored."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as Terminal
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._stream = stream
        self._terminal = Terminal(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.fields[child]}"),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._terminal,
            transient=True,
        )
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
        else:  # rich would store lines that it could not print
            write(text, self._stream)

    def close(self) -> None:
        self._is_open = False
        with suppress(OSError):
            self._progress.stop()
