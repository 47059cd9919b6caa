"""A fork server for tests: its forks never end by themselves, or it can fork nothing.

    python -m tests.odd_worker SOCKET

With `NO_FORKS` in the environment, each fork fails for lack of processes.
"""

import errno
import os
import time

from services.encoder.decoding import fork_server


class OddWorker:
    """Works without an end, whatever becomes of its descriptors."""

    def serve(self, *descriptors: int) -> None:
        while True:
            time.sleep(0.01)


def _no_fork() -> int:
    raise OSError(errno.EAGAIN, "no processes are left")


if __name__ == "__main__":
    if "NO_FORKS" in os.environ:
        os.fork = _no_fork
    fork_server.run(OddWorker())
