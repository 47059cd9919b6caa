"""Shows a stack to its user: progress bars while processes start, then their logs.

`serve` passes a `Console` to the supervisor as its observer. Services log JSON. On a terminal the
console shows records as text, and records about the progress of a start (`stage`, `done`, `total`)
as bars. Elsewhere each line begins with its time, and progress is a few lines. With
`--log-format json` each line is a JSON object. The reason why a process could not start is stored
and printed once, at the end.
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
_STARTING = "importing Python packages"
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


def make_view(log_format: str = "text", stream: TextIO | None = None) -> "View":
    """Returns the view of the log for a stream.

    Args:
        log_format: `text` or `json`.
        stream: stream to print to. Defaults to standard error.
    """
    out = stream or sys.stderr
    if log_format == "json":
        return JsonLines(out)
    return TerminalBars(out) if out.isatty() and os.environ.get("TERM") != "dumb" else Lines(out)


class Console:
    """Filters the output of the stack's processes and shows it.

    Args:
        levels: lowest level of the records that are shown, by child. The output of other children
            is not shown, except as the cause of a failure.
        access_log: True if the gateway's line for each request is shown at any level.
        view: form in which lines are shown. Defaults to that of standard error.

    Attributes:
        facts: record of each decoder whose engine is ready, by child.
    """

    def __init__(
        self, levels: Mapping[str, str], *, access_log: bool = False, view: "View | None" = None
    ) -> None:
        self._levels = {
            name: _LEVELS.get(level.lower(), _LEVELS["warning"]) for name, level in levels.items()
        }
        self._access_log = access_log
        self._view = view or make_view()
        self._lock = threading.Lock()
        self._causes: dict[str, str] = {}
        self._is_ready = False
        self.facts: dict[str, dict[str, Any]] = {}

    def report(self, line: str) -> None:
        """Prints a message of the `triptych` command itself."""
        with self._lock:
            self._view.report(line)

    def started(self, child: str) -> None:
        """Shows that a process runs, though it says nothing before it has imported its packages."""
        if child in self._levels:
            with self._lock:
                self._view.stage(child, _starting())

    def child_ready(self, child: str, seconds: float) -> None:
        """Shows that a process is ready, and after how many seconds."""
        with self._lock:
            self._view.end_stages(child)
            self._view.report(f"{child} ready after {seconds:.1f} s")

    def ready(self) -> None:
        """Closes the progress bars, because all processes have started."""
        with self._lock:
            self._is_ready = True
            self._view.close()

    def close(self) -> None:
        """Closes the progress bars and restores the terminal."""
        with self._lock:
            self._view.close()

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
                self._view.line(child, line)
            elif "stage" in record:
                self._view.stage(child, record)
            else:
                self._take(child, record)

    def _take(self, child: str, record: dict[str, Any]) -> None:
        if record["message"] == _READY:
            self.facts[child] = record
        level = _LEVELS.get(str(record["level"]), _LEVELS["warning"])
        if level >= _LEVELS["critical"] and not self._is_ready:
            if "exception" in record:
                self._view.line(child, str(record["exception"]))
            self._causes.setdefault(child, str(record["message"]))
            return  # the error that ends the stack quotes the cause
        is_access = self._access_log and record["logger"] == _ACCESS_LOGGER
        if is_access or level >= self._levels[child]:
            self._view.record(child, record)


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


def _starting() -> dict[str, Any]:
    """Makes the first record of progress of a process, which the process itself does not write."""
    record = {"time": _now(), "level": "info", "service": "triptych", "logger": "triptych.console"}
    return record | {"message": _STARTING, "stage": _STARTING}


def _now() -> str:
    """Returns the time in UTC with milliseconds, as records have it."""
    now = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return f"{whole}.{int(now % 1 * 1e3):03d}Z"


class Lines:
    """The log as lines of text that begin with their time, for files and other programs.

    A start is a line at the beginning of each stage and every few seconds of it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, tuple[str, float]] = {}

    def report(self, text: str) -> None:
        """Shows a message of the command."""
        self._print(_now(), f"triptych: {text}")

    def line(self, child: str, text: str) -> None:
        """Shows a line of a child that is no record."""
        self._print(_now(), f"{child} | {text}")

    def record(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows a record of a child."""
        self._print(str(record.get("time") or _now()), _text(child, record))

    def stage(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows the progress of a child that starts."""
        stage, done, total = _progress(record)
        if not _is_due(self._last, child, stage):
            return
        self.report(f"{child}: {stage}{f', {done} of {total}' if total else ''}")

    def end_stages(self, child: str) -> None:
        """Ends the report of a child's progress."""
        self._last.pop(child, None)

    def close(self) -> None:
        """Ends the report of progress."""
        self._last.clear()

    def _print(self, at: str, text: str) -> None:
        write(f"{at} {text}", self._stream)


class JsonLines:
    """The log as JSON objects, one a line, for collectors of logs.

    A record of a service is passed on as it is, with the child's name as `process`. Other lines
    have the same fields: `time`, `level`, `service`, `message`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, tuple[str, float]] = {}

    def report(self, text: str) -> None:
        """Shows a message of the command."""
        self._write({"time": _now(), "level": "info", "service": "triptych", "message": text})

    def line(self, child: str, text: str) -> None:
        """Shows a line of a child that is no record."""
        service = child.rpartition("-")[0] or child
        entry = {"time": _now(), "level": "info", "service": service, "message": text}
        self._write(entry | {"process": child})

    def record(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows a record of a child."""
        self._write({**record, "process": child})

    def stage(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows the progress of a child that starts."""
        if _is_due(self._last, child, _progress(record)[0]):
            self.record(child, record)

    def end_stages(self, child: str) -> None:
        """Ends the report of a child's progress."""
        self._last.pop(child, None)

    def close(self) -> None:
        """Ends the report of progress."""
        self._last.clear()

    def _write(self, entry: Mapping[str, Any]) -> None:
        write(json.dumps(entry), self._stream)


def _progress(record: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(record["stage"]), int(record.get("done", 0)), int(record.get("total", 0))


def _is_due(last: dict[str, tuple[str, float]], child: str, stage: str) -> bool:
    """Returns whether the progress of a child is shown now: when a stage begins, and then at most
    once in `_PERIOD_S`.
    """
    now = time.monotonic()
    last_stage, last_at = last.get(child, ("", 0.0))
    if stage == last_stage and now - last_at < _PERIOD_S:
        return False
    last[child] = (stage, now)
    return True


class TerminalBars:
    """The log as text on a terminal, with a bar for each process that starts. Errors of a closed
    terminal are ignored.
    """

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

    def report(self, text: str) -> None:
        """Shows a message of the command."""
        self._print(f"triptych: {text}")

    def line(self, child: str, text: str) -> None:
        """Shows a line of a child that is no record."""
        self._print(f"{child} | {text}")

    def record(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows a record of a child."""
        self._print(_text(child, record))

    def stage(self, child: str, record: Mapping[str, Any]) -> None:
        """Shows the progress of a child that starts."""
        if not self._is_open:
            return
        stage, done, total = _progress(record)
        with suppress(OSError):
            self._progress.start()
            if child not in self._tasks:
                self._tasks[child] = self._progress.add_task(stage, child=child)
            task = self._tasks[child]
            self._progress.update(task, description=stage, completed=done, total=total or None)

    def end_stages(self, child: str) -> None:
        """Removes a child's bar."""
        if (task := self._tasks.pop(child, None)) is not None:
            self._progress.remove_task(task)

    def _print(self, text: str) -> None:
        if self._is_open:
            with suppress(OSError):
                self._terminal.print(text)
        else:  # rich would store lines that it could not print
            write(text, self._stream)

    def close(self) -> None:
        """Ends the report of progress and restores the terminal."""
        self._is_open = False
        with suppress(OSError):
            self._progress.stop()


View = Lines | JsonLines | TerminalBars  # a form in which the log is shown
