"""Limits of both generations of cgroups, in containers and outside."""

import os
from pathlib import Path

import pytest

from services.common.process.pod_limits import memory_limit_bytes, num_cpus

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CPUS = len(os.sched_getaffinity(0))


def tree(root: Path, cgroup: str, **files: str) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ROWS = {
    "v2 container": ("0::/\n", {"sys/fs/cgroup/memory.max": "1048576\n",
                                "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1 << 20, 1),
    "v2 ancestor": ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n",
                                  "sys/fs/cgroup/a/memory.max": "2097152\n",
                                  "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2 << 20, CPUS),
    "v1": ("4:memory:/x\n3:cpu,cpuacct:/x\n",
           {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3145728\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 3 << 20, 1),
    "v1 container": ("4:memory:/docker/1\n",
                     {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4194304\n"}, 4 << 20, CPUS),
    "none": ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                              "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, MACHINE, CPUS),
    "nothing": ("", {}, MACHINE, CPUS),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_least_limit_counts(name: str, tmp_path: Path) -> None:
    cgroup, files, memory_bytes, cpus = ROWS[name]
    root = tree(tmp_path, cgroup, **files)
    assert memory_limit_bytes(root) == memory_bytes
    assert num_cpus(root) == cpus


def test_this_machine_has_both() -> None:
    assert 0 < memory_limit_bytes() <= MACHINE
    assert 1 <= num_cpus() <= CPUS
