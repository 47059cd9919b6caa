"""Memory settings of a long-running process: Python's garbage collector and glibc's malloc.

Each process calls these functions once, at its start.
"""

import ctypes
import gc

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD_BYTES = 256 << 20
_LARGE_BUFFER_BYTES = 1 << 20
_KEPT_BYTES = 8 << 20
_MMAP_THRESHOLD_BYTES = 32 << 20  # the largest value that glibc accepts


def search_rarely() -> None:
    """Makes the garbage collector run rarely: reference counts free nearly everything, so cycles
    may wait.
    """
    gc.set_threshold(20_000, 20, 50)


def freeze_gc() -> None:
    """Excludes all objects that exist now from garbage collection. It is called once all long-lived
    objects exist, before the first request.

    A model's modules or a tokenizer's tables are many objects that never become garbage. Otherwise
    every full collection would visit them all and stall every request by tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    search_rarely()


def return_large_buffers() -> None:
    """Makes malloc return each buffer of a MiB or more to the kernel when it is freed.

    By default, after the first such buffer is freed, glibc keeps later buffers of up to 32 MiB each
    in heaps that fragment: after some large bodies a gateway holds hundreds of MiB that its bound
    does not count. Up to 8 MiB of smaller buffers stay in the heap. With the 128 KiB that malloc
    keeps otherwise once a threshold is set, each chunk of a body would cause page faults again,
    which took two thirds of the time to read a body. The function does nothing where the C library
    has no such setting.
    """
    _set_malloc(_LARGE_BUFFER_BYTES, _KEPT_BYTES)


def raise_malloc_trim_threshold() -> None:
    """Makes malloc keep up to 256 MiB of freed memory for the process's next buffers.

    By default each MiB that gRPC or Python frees returns to the kernel, and the pages of the next
    buffer are faulted in one by one, which costs more than filling the buffer. The function does
    nothing where the C library has no such setting.
    """
    _set_malloc(_MMAP_THRESHOLD_BYTES, _TRIM_THRESHOLD_BYTES)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)
