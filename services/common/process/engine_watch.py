"""Notices that an engine process hangs: it runs, and nothing comes of it.

A front pings its engine, seldom while there is no work; an engine answers between two steps. On a
GPU a step takes a second at most. On a CPU it may take minutes, but then the process uses the CPU,
or would if others let it.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from services.common.process.engine_process import EngineProcess
from services.common.process.heartbeat import Ping

MAX_SILENCE_S = 8.0
_PERIOD_S = 1.0
_IDLE_PERIOD_S = 5.0  # between pings without work, so that `silence_s` stays small
_MIN_TICKS = 2  # of CPU time, between two looks


class EngineWatch:
    """Watches one engine."""

    def __init__(self, engine: EngineProcess, is_busy: Callable[[], bool], *, on_gpu: bool) -> None:
        self._engine = engine
        self._is_busy = is_busy
        self._on_gpu = on_gpu
        self._cpu = CpuUse(engine.process.pid)
        self._idle_at = self._computed_at = self._pinged_at = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last showed that it works."""
        return time.monotonic() - max(self._computed_at, self._engine.channel.received_at)

    async def hangs(self) -> None:
        """Returns when the engine hangs; never if it does not."""
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            now = time.monotonic()
            stood_still = now - looked_at > 2 * _PERIOD_S  # this process itself
            is_busy = self._is_busy()
            if stood_still or not is_busy:
                self._idle_at = now
            if not self._on_gpu and self._cpu.is_used():  # waiting for a device may use it, too
                self._computed_at = now
            if min(self.silence_s, now - self._idle_at) > MAX_SILENCE_S:
                return
            if is_busy or now - self._pinged_at >= _IDLE_PERIOD_S:
                self._pinged_at = now
                self._engine.channel.send(Ping())


class CpuUse:
    """Whether a process or one of its children uses a CPU: an engine's other ranks compute, too."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = 0

    def is_used(self) -> bool:
        """Whether it did since the last look, or waits for a CPU now."""
        found = [_stat(pid) for pid in (self._pid, *_children(self._pid))]
        before = self._ticks
        self._ticks = sum(int(ticks) for each in found for ticks in each[11:13])  # user's, system's
        return self._ticks - before >= _MIN_TICKS or any(each[:1] == ["R"] for each in found)


def _children(pid: int) -> list[int]:
    """Those that its first thread has started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, so that it does not run."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty: it has ended, which shows
    elsewhere.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
