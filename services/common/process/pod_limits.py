"""Limits of this process: the memory and the CPUs of its cgroup, not those of the machine.

Both generations of cgroups are read, with all ancestors that the process can see. Without a limit
there, the machine's own memory and CPUs count. Each service reads the limits once, at its start.
"""

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = "sys/fs/cgroup"


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the lowest memory limit that applies, or the machine's memory.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [number for number in _numbers(folder / name)[:1] if number > 0]
    return min(limits)


def num_cpus(root: Path = Path("/")) -> int:
    """Returns the lowest CPU quota that applies, rounded up, or the number of CPUs that the process
    may run on.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    counts = [len(os.sched_getaffinity(0))]
    for folder in _folders(root, "cpu"):
        older = (_numbers(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota = _numbers(folder / "cpu.max") or sum(older, list[int]())
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            counts.append(max(1, math.ceil(quota[0] / quota[1])))
    return min(counts)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the directories of the process's cgroups that may limit `controller`, and of their
    ancestors.

    A container sees its own cgroup as the mount's root, whatever path `/proc` says.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / _CGROUPS / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        while folder != mount and folder.is_relative_to(mount):
            yield folder
            folder = folder.parent
        yield mount


def _numbers(file: Path) -> list[int]:
    """Returns the numbers in a file. The list is empty if the file is missing or contains `max`."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard limit: each client and each stored video
    takes a descriptor, and systemd's soft limit is 1024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
