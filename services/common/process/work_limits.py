"""Limits of CPU time and memory for one piece of work, at which its process is ended."""

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

SLACK_BYTES = 64 << 20  # memory that allocators take beyond what the work asks for


def prefer_oom_kill(score: int = 1000) -> None:
    """Makes the kernel kill this process before the others when the pod runs out of memory, and
    disables core dumps.

    Args:
        score: share of the memory, in thousandths, that counts as this process's beside its own.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # some sandboxes have no such file
        Path("/proc/self/oom_score_adj").write_text(str(score))


@contextmanager
def limited(cpu_s: float, memory_bytes: int, base_bytes: int | None = None) -> Generator[None]:
    """Limits the process within the block. The kernel ends the process with SIGPROF after `cpu_s`,
    and allocations beyond the memory limit fail.

    Args:
        cpu_s: seconds of CPU time.
        memory_bytes: bytes of address space that the block may map in addition to `base_bytes`.
        base_bytes: bytes of address space that are not counted. Defaults to what is mapped now.
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
    """Returns the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident_bytes(pid: int | None = None) -> int:
    """Returns the size of a process's resident memory. Defaults to this process."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * resource.getpagesize()
