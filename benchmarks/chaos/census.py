"""What processes hold: memory, descriptors, threads; and what is left when work has ended."""

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.stack import Pod, Stack, metrics, value

_MUST_BE_ZERO = (
    "triptych_gateway_requests_running", "triptych_encoder_queue_images",
    "triptych_decoder_sequences_running", "triptych_decoder_sequences_waiting",
    "triptych_decoder_kv_blocks_used",
)  # fmt: skip
_ARENA = re.compile(r"memfd:triptych-[0-9a-f]+")
_QUIET_S = 15.0  # within which everything that was given up must have ended
_PERIOD_S = 5.0
_MIN_LIFE_S = 60.0
_WARM_S = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one time.

    Attributes:
        anonymous_bytes: resident memory without files and shared memory.
        num_asks: requests of the run so far.
    """

    at: float
    anonymous_bytes: int
    num_descriptors: int
    num_threads: int
    num_asks: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of a process that lived for a while, from when it was warm.

    Attributes:
        peak_descriptors: most at a time.
    """

    name: str
    seconds: float
    num_asks: int
    first_bytes: int
    last_bytes: int
    first_descriptors: int
    last_descriptors: int
    peak_descriptors: int


class Census:
    """Looks at all processes of the stack again and again."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._looks: dict[str, list[Look]] = {}

    async def keep_looking(self, num_asks: Sequence[object]) -> None:
        """Until cancelled. `num_asks`: whose length is the number of requests so far."""
        while True:
            self.look(len(num_asks))
            await asyncio.sleep(_PERIOD_S)

    def look(self, num_asks: int) -> None:
        for pod in self._stack.pods.values():
            for role, pid in _processes(pod):
                if (found := _look(pid, num_asks)) is not None:
                    self._looks.setdefault(f"{pod.name} {role} {pid}", []).append(found)

    def growth(self) -> list[Growth]:
        """Of all processes that were seen long enough."""
        found: list[Growth] = []
        for name, looks in self._looks.items():
            warm = [look for look in looks if look.at - looks[0].at >= _WARM_S]
            if not warm or warm[-1].at - warm[0].at < _MIN_LIFE_S:
                continue
            first, last = warm[0], warm[-1]
            third = max(1, len(warm) // 3)
            found.append(
                Growth(
                    name,
                    last.at - first.at,
                    last.num_asks - first.num_asks,
                    _median([look.anonymous_bytes for look in warm[:third]]),
                    _median([look.anonymous_bytes for look in warm[-third:]]),
                    _median([look.num_descriptors for look in warm[:third]]),
                    _median([look.num_descriptors for look in warm[-third:]]),
                    max(look.num_descriptors for look in looks),
                )
            )
        return found


async def left_in_work(stack: Stack) -> list[str]:
    """Gauges that are not zero, nor become so soon after the last request."""
    deadline = time.monotonic() + _QUIET_S
    while (left := await _gauges(stack)) and time.monotonic() < deadline:  # noqa: ASYNC110 - of others
        await asyncio.sleep(0.3)
    return left


async def _gauges(stack: Stack) -> list[str]:
    left: list[str] = []
    for pod in stack.pods.values():
        page = await metrics(pod)
        if not page:
            left.append(f"{pod.name}: no metrics")
        left += [f"{pod.name}: {n} {v:g}" for n in _MUST_BE_ZERO if (v := value(page, n))]
    return left


def idle_descriptors(stack: Stack) -> dict[str, int]:
    """Of each process, by its pod and role."""
    return {
        f"{pod.name} {role}": len(_names(Path(f"/proc/{pid}/fd")))
        for pod in stack.pods.values()
        for role, pid in _processes(pod)
    }


def dead_arenas(stack: Stack) -> list[str]:
    """Arenas that a process still maps although their owner has ended."""
    processes = [(pod, role, pid) for pod in stack.pods.values() for role, pid in _processes(pod)]
    owned: set[str] = set()
    for _, _, pid in processes:
        for name in _names(Path(f"/proc/{pid}/fd")):
            with suppress(OSError):
                owned.update(_ARENA.findall(os.readlink(f"/proc/{pid}/fd/{name}")))
    found: list[str] = []
    for pod, role, pid in processes:
        with suppress(OSError):
            mapped = set(_ARENA.findall(Path(f"/proc/{pid}/maps").read_text()))
            if dead := mapped - owned:
                found.append(f"{pod.name} {role} maps {len(dead)} arenas of processes that ended")
    return found


def _processes(pod: Pod) -> list[tuple[str, int]]:
    """The front and, if there is one, its engine."""
    if not pod.service.is_running():
        return []
    found = [("front", pod.service.pid)]
    if pod.kind != "gateway":
        with suppress(OSError, ValueError):
            found.append(("engine", pod.service.engine_pid()))
    return found


def _look(pid: int, num_asks: int) -> Look | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in fields:  # it has ended
        return None
    return Look(
        time.monotonic(),
        int(fields["RssAnon"].split()[0]) << 10,
        len(_names(Path(f"/proc/{pid}/fd"))),
        int(fields["Threads"]),
        num_asks,
    )


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
