"""Notices that an engine process hangs: it runs, and nothing comes of it.

A front pings its engine while there is work; an engine answers between two steps. On a GPU a step
takes a second at most. On a CPU it may take minutes, but then the process uses the CPU.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from services.common.engine_process import EngineProcess
from services.common.heartbeat import Ping

MAX_SILENCE_S = 8.0
_PERIOD_S = 1.0
_MIN_TICKS = 2  # of CPU time, between two looks


class EngineWatch:
    """Watches one engine.

    Args:
        engine: that has said it is ready.
        is_busy: whether the engine has work.
        on_gpu: whether the engine computes on a GPU.
    """

    def __init__(
        self, engine: EngineProcess[object], is_busy: Callable[[], bool], *, on_gpu: bool
    ) -> None:
        self._engine = engine
        self._is_busy = is_busy
        self._on_gpu = on_gpu
        self._ticks = 0
        self._seen_at = time.monotonic()  # the last sign of progress, or without work

    async def hangs(self) -> None:
        """Returns when the engine hangs; never if it does not."""
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            now = time.monotonic()
            stood_still = now - looked_at > 2 * _PERIOD_S  # this process itself
            if stood_still or not self._is_busy() or self._computes():
                self._seen_at = now
            self._seen_at = max(self._seen_at, self._engine.channel.received_at)
            if now - self._seen_at > MAX_SILENCE_S:
                return
            if self._is_busy():
                self._engine.channel.send(Ping())

    def _computes(self) -> bool:
        """Whether an engine on a CPU has used it since the last look."""
        if self._on_gpu:
            return False  # waiting for a device may use the CPU, too
        before, self._ticks = self._ticks, _cpu_ticks(self._engine.process.pid)
        return self._ticks - before >= _MIN_TICKS


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0  # it has ended, which shows elsewhere
    user, system = fields[11:13]
    return int(user) + int(system)


def kill(engine: EngineProcess[object]) -> None:
    """Ends an engine that hangs. A process in a driver's call may outlive the signal, so the
    channel is closed as well.
    """
    if engine.process.returncode is None:
        engine.process.kill()
    engine.channel.close()


__all__ = ["MAX_SILENCE_S", "EngineWatch", "kill"]
