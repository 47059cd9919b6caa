"""How glibc's allocator treats large buffers, which come and go with every embedding and image."""

import ctypes

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20
_LARGEST_THRESHOLD_BYTES = 32 << 20  # that glibc accepts


def keep_freed_memory() -> None:
    """Has this process keep what is freed, up to 256 MiB, for its next buffers.

    Otherwise each MiB that gRPC or Python frees goes back to the kernel, and the next one is
    faulted in again page by page, which costs more than filling it. Called once, at the start.
    Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
