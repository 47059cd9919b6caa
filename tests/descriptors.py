"""This process's descriptors of anonymous shared memory, of which tests look for leaks."""

import os
from contextlib import suppress


def num_memories() -> int:
    """Returns the number of open descriptors of memory that `memfd_create` has made.

    Other descriptors are not counted: threads of gRPC and of servers that other tests have left
    open and close sockets at any time.
    """
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself has been closed
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
    return found
