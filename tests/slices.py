"""How long a slice of the CPU a thread asks the kernel for."""

import ctypes
import platform
import struct
import threading

import pytest

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_ATTR = struct.Struct("=IIQiIQQQ")


def slice_ns(thread: int | None = None) -> int:
    """Of a thread or a process's first one; None: the calling thread's.

    Skips the test where the kernel does not say (before Linux 6.12).
    """
    buffer = ctypes.create_string_buffer(_ATTR.size)
    number = _SCHED_GETATTR.get(platform.machine())
    thread = thread or threading.get_native_id()
    if number is None or ctypes.CDLL(None).syscall(number, thread, buffer, _ATTR.size, 0):
        pytest.skip("no sched_getattr here")
    found = _ATTR.unpack(buffer.raw)[5]
    if not found:
        pytest.skip("slices are not a thread's own here")
    return found
