"""CPU time and memory of the encoder's processes under load: `python -m benchmarks.encoder_cpu`.

The script drives a row of `benchmarks.workloads` against a running server and reads `/proc` of the
encoder's front and engine meanwhile. It prints, for each process and each thread, CPU seconds per
second of the load, split into user and system time, and the memory of each process. It decides how
much of a core one process instead of two would need, so the threads that hold Python's interpreter
lock matter: the front's event loop, and the engine's loop, receiver and waiter.

Front and engine run on the same machine as this script. They are found by their command lines, or
named by `--pids FRONT,ENGINE`.
"""

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from benchmarks.client import Sample, Target
from benchmarks.serve import run_row
from benchmarks.workloads import ROWS, Row, request_bodies, scaled
from triptych.client import AskError, Server

_FRONT, _ENGINE = "services.encoder", "services.encoder.engine_main"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PERIOD_S = 0.2  # between two readings of /proc
_MIN_SHARE = 0.001  # of a core, for a thread to have a line of its own


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds of a process or a thread since its start.

    Attributes:
        user_s: seconds in user mode.
        system_s: seconds in the kernel.
    """

    user_s: float = 0.0
    system_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds in both modes."""
        return self.user_s + self.system_s

    def __add__(self, other: Self) -> "CpuTime":
        return CpuTime(self.user_s + other.user_s, self.system_s + other.system_s)

    def __sub__(self, other: Self) -> "CpuTime":
        return CpuTime(self.user_s - other.user_s, self.system_s - other.system_s)

    def per(self, seconds: float) -> "CpuTime":
        """Returns the CPU seconds per second of wall time."""
        return CpuTime(self.user_s / seconds, self.system_s / seconds)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the encoder.

    Attributes:
        name: "front", "engine", or "decode worker" for a child of either.
        pid: process id.
    """

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The CPU times of all observed processes at one moment.

    Attributes:
        at: time of `time.monotonic()`.
        processes: time of each process by pid, with the threads that have ended.
        threads: time of each living thread by pid and thread id.
    """

    at: float
    processes: dict[int, CpuTime]
    threads: dict[tuple[int, int], CpuTime]


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process in MiB. NaN where the kernel does not report a figure.

    Attributes:
        rss: resident pages, each counted in full.
        pss: resident pages, each divided by the number of processes that map it.
        pss_shared: part of `pss` in shared memory, which is mostly the arena.
    """

    rss: float
    pss: float
    pss_shared: float


class Observer:
    """Reads the CPU times of processes in a thread of its own while a load runs.

    Args:
        processes: processes to observe. Those that end are left out from then on.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="observer")
        self.readings: list[Reading] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _observe(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.readings.append(read_cpu_times(self._processes))


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU times of the processes while the row's concurrency was in flight.

    Attributes:
        first: reading at the start of the interval.
        last: reading at its end.
        images_per_s: images that were answered in the interval, per second.
        num_errors: requests of the row that failed.
    """

    first: Reading
    last: Reading
    images_per_s: float
    num_errors: int

    @classmethod
    def of(cls, readings: Sequence[Reading], samples: Sequence[Sample], row: Row) -> "Usage":
        """Cuts the interval of full load out of the readings: from the first answer to the last
        request sent.

        Raises:
            ValueError: there are fewer than two readings in the interval.
        """
        start, end = min(s.end for s in samples), max(s.start for s in samples)
        inside = [reading for reading in readings if start <= reading.at <= end]
        if len(inside) < 2:
            raise ValueError(
                f"{row.name}: the full load lasted {max(0.0, end - start):.2f} s, which is too "
                "short to measure; raise --repeat"
            )
        first, last = inside[0], inside[-1]
        answered = sum(first.at < s.end <= last.at and not s.error for s in samples)
        rate = answered * row.images_per_request / (last.at - first.at)
        return cls(first, last, rate, sum(bool(s.error) for s in samples))

    @property
    def seconds(self) -> float:
        """Length of the interval in seconds."""
        return self.last.at - self.first.at

    def of_process(self, pid: int) -> CpuTime:
        """Returns a process's CPU seconds per second."""
        if pid not in self.first.processes or pid not in self.last.processes:
            return CpuTime(math.nan, math.nan)
        return (self.last.processes[pid] - self.first.processes[pid]).per(self.seconds)

    def of_threads(self, pid: int) -> dict[int, CpuTime]:
        """Returns the CPU seconds per second of a process's living threads by thread id, the
        busiest first. A thread that started in the interval counts from its start.
        """
        used = {
            thread: (now - self.first.threads.get((pid, thread), CpuTime())).per(self.seconds)
            for (owner, thread), now in self.last.threads.items()
            if owner == pid
        }
        return dict(sorted(used.items(), key=lambda item: -item[1].total_s))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows. Exit status: 1 if a request failed, 2 if nothing can be measured."""
    options = _parser().parse_args(arguments)
    known = {row.name: row for row in ROWS}
    try:
        rows = [known[name] for name in options.rows.split(",")]
        processes = named_processes(options.pids) if options.pids else find_processes()
        server = Server(options.url)
        target = Target.from_url(server.url, server.key)
        model = options.model or server.first_model()
        failed = [_measure(row, target, model, processes, options) for row in rows]
    except KeyError as error:
        print(f"encoder_cpu: unknown row {error}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    except (AskError, OSError, ValueError) as error:
        print(f"encoder_cpu: {error}", file=sys.stderr)
        return 2
    return 1 if any(failed) else 0


def _measure(
    row: Row, target: Target, model: str, processes: Sequence[Process], options: argparse.Namespace
) -> int:
    row = scaled(row, options.scale)
    row = replace(row, num_requests=row.num_requests * options.repeat)
    bodies = request_bodies(row, model, time.time_ns() % (1 << 32))
    with Observer(processes) as observer:
        samples, _ = run_row(row, target, bodies, options.timeout_s, options.max_s)
    names = {
        (p.pid, thread): thread_name(p.pid, thread) for p in processes for thread in _tasks(p.pid)
    }
    memory = {process.pid: read_memory(process.pid) for process in processes}
    usage = Usage.of(observer.readings, samples, row)
    for line in report(row, usage, processes, names, memory):
        print(line)
    return usage.num_errors


def report(
    row: Row,
    usage: Usage,
    processes: Sequence[Process],
    names: dict[tuple[int, int], str],
    memory: dict[int, Memory],
) -> Iterator[str]:
    """Yields the lines of a row's report.

    Args:
        row: the row that was sent.
        usage: CPU times of the processes.
        processes: the processes, each front followed by its engine and their children.
        names: name of each thread by pid and thread id, as the kernel has it.
        memory: memory of each process by pid.
    """
    yield (
        f"{row.name}: {usage.images_per_s:.1f} images/s over {usage.seconds:.1f} s at "
        f"{row.concurrency} requests in flight, {usage.num_errors} errors"
    )
    yield ""
    yield (
        f"{'process':<15}{'pid':>8}{'cpu s/s':>9}{'user':>8}{'system':>8}{'ms/image':>10}"
        f"{'RSS MiB':>9}{'PSS MiB':>9}{'shared':>8}"
    )
    for name in ("front", "engine", "decode worker"):
        for process in processes:
            if process.name == name:
                yield _process_line(process, usage, memory[process.pid])
    used = [usage.of_process(process.pid) for process in processes]
    two = sum((u for u, p in zip(used, processes, strict=True) if p.name in ("front", "engine")),
              CpuTime())  # fmt: skip
    yield _line("front + engine", "", two, usage.images_per_s)
    yield _line("all", "", sum(used, CpuTime()), usage.images_per_s)
    yield ""
    yield f"{'thread of':<15}{'tid':>8}{'cpu s/s':>9}{'user':>8}{'system':>8}{'ms/image':>10}  name"
    for process in processes:
        if process.name == "decode worker":
            continue
        rest = usage.of_process(process.pid)
        for thread, time_used in usage.of_threads(process.pid).items():
            if time_used.total_s >= _MIN_SHARE:
                name = names.get((process.pid, thread), "ended")
                name += " (main thread)" if thread == process.pid else ""
                rest -= time_used
                line = _line(process.name, thread, time_used, usage.images_per_s)
                yield f"{line}  {name}"
        yield f"{_line(process.name, '', rest, usage.images_per_s)}  all other threads"


def _process_line(process: Process, usage: Usage, memory: Memory) -> str:
    line = _line(process.name, process.pid, usage.of_process(process.pid), usage.images_per_s)
    return f"{line}{memory.rss:>9.0f}{memory.pss:>9.0f}{memory.pss_shared:>8.0f}"


def _line(name: str, number: int | str, used: CpuTime, images_per_s: float) -> str:
    ms = used.total_s / images_per_s * 1e3 if images_per_s else math.nan
    return (
        f"{name:<15}{number:>8}{used.total_s:>9.3f}{used.user_s:>8.3f}{used.system_s:>8.3f}"
        f"{ms:>10.3f}"
    )


def find_processes() -> list[Process]:
    """Finds the fronts and engines of all encoders on this machine, with their children.

    Raises:
        ValueError: no encoder runs here.
    """
    engines = [pid for pid in _pids() if _ENGINE in _command(pid)]
    pairs = [(_parent(pid), pid) for pid in engines]
    found = [pair for pair in pairs if _FRONT in _command(pair[0])]
    if not found:
        raise ValueError(
            f"no process here runs {_ENGINE}; start the server on this machine, or name the "
            "processes with --pids FRONT,ENGINE"
        )
    return [process for front, engine in found for process in _encoder(front, engine)]


def named_processes(pids: str) -> list[Process]:
    """Returns the processes of `--pids FRONT,ENGINE`, with their children.

    Raises:
        ValueError: the argument does not have two numbers, or a process does not exist.
    """
    numbers = pids.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--pids takes FRONT,ENGINE, not {pids!r}")
    front, engine = map(int, numbers)
    for pid in (front, engine):
        if not _tasks(pid):
            raise ValueError(f"--pids: there is no process {pid}")
    return _encoder(front, engine)


def _encoder(front: int, engine: int) -> list[Process]:
    children = [pid for pid in _pids() if _parent(pid) in (front, engine) and pid != engine]
    own = [Process("front", front), Process("engine", engine)]
    return own + [Process("decode worker", pid) for pid in children]


def read_cpu_times(processes: Sequence[Process]) -> Reading:
    """Reads the CPU times of the processes and of their threads now."""
    times: dict[int, CpuTime] = {}
    threads: dict[tuple[int, int], CpuTime] = {}
    at = time.monotonic()
    for process in processes:
        directory = Path(f"/proc/{process.pid}")
        if (used := _cpu_time(directory / "stat")) is None:
            continue
        times[process.pid] = used
        for thread in _tasks(process.pid):
            if (used := _cpu_time(directory / "task" / str(thread) / "stat")) is not None:
                threads[process.pid, thread] = used
    return Reading(at, times, threads)


def read_memory(pid: int) -> Memory:
    """Reads the resident memory of a process."""
    status = _fields(Path(f"/proc/{pid}/status"))
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return Memory(
        rss=status.get("VmRSS", math.nan),
        pss=rollup.get("Pss", math.nan),
        pss_shared=rollup.get("Pss_Shmem", math.nan),
    )


def _fields(path: Path) -> dict[str, float]:
    """Returns the lines `Name:  NUMBER kB` of a file in MiB. Empty if it cannot be read."""
    fields: dict[str, float] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        match value.split():
            case [number, "kB"]:
                fields[name] = int(number) / 1024
            case _:
                pass
    return fields


def _cpu_time(path: Path) -> CpuTime | None:
    """Reads user and system time from a file `stat`. None if process or thread has ended."""
    fields = _text(path).rpartition(")")[2].split()
    if len(fields) < 13:
        return None
    return CpuTime(int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S)


def _parent(pid: int) -> int:
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _command(pid: int) -> list[str]:
    return _text(Path(f"/proc/{pid}/cmdline")).split("\0")


def thread_name(pid: int, thread: int) -> str:
    """Returns the name that the kernel has for a thread, or "" if the thread has ended."""
    return _text(Path(f"/proc/{pid}/task/{thread}/comm")).strip()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _tasks(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoder_cpu",
        description="Measures CPU time and memory of the encoder's processes under load.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the server; default: %(default)s")
    add("--model", help="name of the model in requests; default: the first that the server lists")
    add("--rows", default="img512_c64", help="comma-separated rows; default: %(default)s")
    add("--pids", metavar="FRONT,ENGINE", help="default: all encoders on this machine")
    add("--repeat", type=int, default=8, help="times the row's requests; default: %(default)s")
    add("--max-s", type=float, default=60.0, help="longest load of a row; default: %(default)s s")
    add("--scale", type=float, default=1.0, help="below 1: smaller rows, for a smoke test")
    add("--timeout-s", type=float, default=60.0, help="limit of one request; default: 60 s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
