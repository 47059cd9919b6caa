"""Detects an engine process that hangs: it still runs, and makes no progress.

A front pings its engine, rarely while there is no work, and the engine answers between two steps. A
step takes a second at most on a GPU. On a CPU it may take minutes; then the process uses the CPU,
or waits for one. Files that the engine loads between two steps may lie on a slow disk.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from services.common.process.engine_process import EngineProcess
from services.common.process.front_process import FrontProcess
from services.common.process.heartbeat import Ping

MAX_SILENCE_S = 8.0
MAX_LOADING_S = 120.0  # as long as gateways wait for the answer
_PERIOD_S = 1.0
_IDLE_PERIOD_S = 5.0  # between pings without work, so that `silence_s` stays small
_MIN_TICKS = 2  # clock ticks of CPU time between two checks that count as computing


class EngineWatch:
    """Watches one engine.

    Args:
        front: front of the engine, which knows whether the engine has work.
        on_gpu: True if the engine computes on a GPU, where using a CPU is no sign of progress.
        max_silence_s: longest time without a sign of life while there is work.
        max_loading_s: the same, while the engine loads files.
        period_s: time between two checks.
        idle_period_s: time between two pings while there is no work.
    """

    def __init__(
        self,
        engine: EngineProcess,
        front: FrontProcess[Any],
        *,
        on_gpu: bool,
        max_silence_s: float = MAX_SILENCE_S,
        max_loading_s: float = MAX_LOADING_S,
        period_s: float = _PERIOD_S,
        idle_period_s: float = _IDLE_PERIOD_S,
    ) -> None:
        self._engine = engine
        self._front = front
        self._on_gpu = on_gpu
        self._max_silence_s, self._max_loading_s = max_silence_s, max_loading_s
        self._period_s = period_s
        self._idle_period_s = idle_period_s
        self._cpu = CpuUse(engine.process.pid)
        self._idle_at = self._pinged_at = time.monotonic()

    async def wait_until_hanging(self) -> None:
        """Returns when the engine hangs, and never if it does not."""
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(self._period_s)
            now = time.monotonic()
            was_stopped = now - looked_at > 2 * self._period_s  # this process, not the engine
            is_busy = self._front.is_busy
            if was_stopped or not is_busy:
                self._idle_at = now
            if not self._on_gpu and self._cpu.is_used():  # waiting for a GPU may use a CPU, too
                self._engine.computed_at = now
            most_s = self._max_loading_s if self._front.is_loading else self._max_silence_s
            if min(self._engine.silence_s, now - self._idle_at) > most_s:
                return
            if is_busy or now - self._pinged_at >= self._idle_period_s:
                self._pinged_at = now
                self._engine.channel.send(Ping())


class CpuUse:
    """Observes the CPU time of a process and its children, which are the other ranks of an engine.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = 0

    def is_used(self) -> bool:
        """Returns whether one of the processes has used a CPU since the last call, or waits for a
        CPU now.
        """
        found = [_stat(pid) for pid in (self._pid, *_children(self._pid))]
        before = self._ticks
        self._ticks = sum(
            int(ticks) for each in found for ticks in each[11:13]
        )  # user and system time
        return self._ticks - before >= _MIN_TICKS or any(each[:1] == ["R"] for each in found)


def _children(pid: int) -> list[int]:
    """Returns the child processes that the first thread of a process has started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process (state T)."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` from the state on, or an empty list if the process has
    ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
