"""What malloc keeps of a process's freed memory. In a process of its own: settings are for good."""

import platform
import subprocess
import sys

import pytest

_BUFFERS = """
import resource
from services.common.process.process_memory import return_large_buffers

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

return_large_buffers()
bytes(1 << 18), bytes(1 << 18)
before = faults()
for _ in range(100):
    chunk = b"x" * (1 << 18)
    other = chunk + b"y"
    del chunk, other
small = faults() - before
large = b"x" * (32 << 20)
before = faults()
del large
large = b"x" * (32 << 20)
print(small, faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_chunks_are_kept_and_large_buffers_are_not() -> None:
    command = [sys.executable, "-c", _BUFFERS]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    small, large = map(int, found.stdout.split())
    assert small < 1000, "faults of 100 chunks, which have 12,800 pages"
    assert large > 4000, "of a buffer of 8,192 pages, which had been returned"
