"""Limits of one piece of work in a process that may die of it."""

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

SLACK_BYTES = 64 << 20  # of the allocators


def go_first() -> None:
    """Under memory pressure in the pod this process goes before the others; it leaves no core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where the sandbox has no such file
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextmanager
def limited(cpu_s: float, memory_bytes: int, base_bytes: int | None = None) -> Generator[None]:
    """Within the block the kernel ends the process after `cpu_s` of CPU time (SIGPROF), and it may
    map `memory_bytes` more than `base_bytes`, or than it has now; beyond, allocations fail.
    """
    base = mapped_bytes() if base_bytes is None else base_bytes
    limit = base + memory_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def mapped_bytes() -> int:
    """Of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident_bytes() -> int:
    """Of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
