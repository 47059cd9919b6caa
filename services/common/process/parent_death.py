"""Ends a process together with its parent, in whatever way the parent ends.

The file is also a program, `python parent_death.py PARENT_PID COMMAND…`, because code between fork
and exec is not safe once a library has started threads. The program becomes the command (exec), so
that it does not appear in the process tree. It uses the standard library only and
starts in a few milliseconds without site-packages.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends.

    Args:
        parent: pid of the process that started this process. If it has ended already, this process
            exits now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    # The command may write to the terminal from the background; `stty tostop` would stop it then.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.execvp(sys.argv[2], sys.argv[2:])
