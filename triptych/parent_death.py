"""Runs a command that dies with its parent: `python parent_death.py PARENT_PID COMMAND…`.

A program of its own, because code between fork and exec is not safe once a library has started
threads. It becomes the command (exec), so it does not appear in the process tree. Standard library
only, so that it starts in a few milliseconds without site-packages.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the parent-death signal to SIGKILL, then executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It writes to the terminal from the background, which `stty tostop` would stop it for.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
