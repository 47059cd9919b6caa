"""Turns of the processes that share a GPU: the encoder's large batches and decoders' steps.

Kernels of two processes on one GPU are time-sliced, which costs a tenth of the GPU while both have
work. Therefore an encoder has the GPU alone for a large batch, and decoders have it between such
batches. Decoders do not exclude each other.

There are two lock files for each GPU, in a folder that the processes of the machine share. `card`
is held while a process has its turn, by an encoder exclusively and by decoders shared. `next` is
held by the one process that waits for `card`: whoever wants a turn takes `next`, then `card`, and
then gives up `next`. The holder of `next` has the next turn, and whoever holds `card` sees by
`next` that another process waits. The locks are those of `flock`. The kernel frees them when their
process ends, in whatever way it ends.

Containers that do not share `/dev/shm` do not see each other's locks, and so take no turns.
"""

import fcntl
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Protocol

from services.common.clock import Clock

log = logging.getLogger(__name__)

# Seconds between two tries of a process that waits for its turn. The GPU is idle for about as long
# when it passes from one process to the next.
TURN_POLL_S = 0.0002
# A process that keeps its turn for so many seconds is stopped or hangs: a large batch takes 0.2 s
# on an H200.
_MAX_WAIT_S = 5.0
# Seconds for which a process takes no turns after such a wait, so that it waits in vain once a
# minute.
_PAUSE_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")


class Turns(Protocol):
    """The turns of one process. One thread calls all methods.

    Attributes:
        num_turns: number of turns so far.
        waited_s: seconds so far in which the process waited for turns that it then had.
    """

    num_turns: int
    waited_s: float

    @property
    def is_waiting(self) -> bool:
        """True if `try_take` was called without success, so that it should be called again soon."""
        ...

    @property
    def is_due(self) -> bool:
        """True if the process has its turn and should give it up: another process waits, and the
        turn has lasted for as long as this process was the next one before the turn.
        """
        ...

    def try_take(self) -> bool:
        """Returns whether the process has its turn, which may begin now. Does not wait."""
        ...

    def release(self) -> None:
        """Ends the turn, or the wait for it."""
        ...


class NoTurns:
    """The turns of a process that shares its device with nobody: it may always begin."""

    num_turns = 0
    waited_s = 0.0
    is_waiting = False
    is_due = False

    def try_take(self) -> bool:
        return True

    def release(self) -> None:
        pass


NO_TURNS = NoTurns()


class DeviceTurns:
    """The turns of one process on one GPU.

    A process that waits for `_MAX_WAIT_S` takes no turns for a minute: the process that has the
    GPU is stopped or hangs, and must not stop others.

    Args:
        gpu: name of the GPU, the same in all processes of the machine.
        exclusive: True if no other process may have its turn at the same time.
        directory: folder of the lock files.
        clock: clock of the waits, in seconds.

    Raises:
        OSError: the files cannot be opened, or belong to another user.
    """

    def __init__(
        self, gpu: str, *, exclusive: bool, directory: Path, clock: Clock = time.monotonic
    ) -> None:
        self.num_turns = 0
        self.waited_s = 0.0
        self._operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        self._clock = clock
        prefix = f"triptych-{os.geteuid()}-{gpu}"
        self._card = _open(directory / f"{prefix}.card")
        try:
            self._next = _open(directory / f"{prefix}.next")
        except OSError:
            os.close(self._card)
            raise
        self._is_next = False  # whether this process holds `next`
        self._is_mine = False  # whether this process has its turn
        self._asked_at: float | None = None  # None while the process does not wait
        self._next_since = self._taken_at = 0.0
        # Seconds after which the turn is due to end: those for which the process held `next`, which
        # are the rest of an encoder's turn. The whole wait may include turns of other decoders. Two
        # decoders would then have longer and longer turns, since each waits for the other one's.
        self._length_s = 0.0
        self._paused_until = 0.0

    @property
    def is_waiting(self) -> bool:
        return self._asked_at is not None

    @property
    def is_due(self) -> bool:
        if not self._is_mine or self._clock() - self._taken_at < self._length_s:
            return False
        # Shared, so that two processes that look at the same time do not see each other.
        if not _lock(self._next, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._next, fcntl.LOCK_UN)
        return False

    def try_take(self) -> bool:
        if self._is_mine:
            return True
        now = self._clock()
        if now < self._paused_until:
            return True
        if self._asked_at is None:
            self._asked_at = now
        if not self._is_next and _lock(self._next, fcntl.LOCK_EX):
            self._is_next, self._next_since = True, now
        if not (self._is_next and _lock(self._card, self._operation)):
            if now - self._asked_at < _MAX_WAIT_S:
                return False
            self.release()
            self._paused_until = now + _PAUSE_S
            log.warning(
                "another process has kept the GPU for %g s: no turns on the GPU for %g s",
                _MAX_WAIT_S,
                _PAUSE_S,
            )
            return True
        fcntl.flock(self._next, fcntl.LOCK_UN)
        self._is_next, self._is_mine = False, True
        self._taken_at, self._length_s = now, now - self._next_since
        self.num_turns += 1
        self.waited_s += now - self._asked_at
        self._asked_at = None
        return True

    def release(self) -> None:
        self._asked_at = None
        if self._is_mine:
            fcntl.flock(self._card, fcntl.LOCK_UN)
        if self._is_next:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._is_mine = self._is_next = False

    def close(self) -> None:
        """Ends the turn, and closes the files."""
        os.close(self._card)
        os.close(self._next)


def open_turns(gpu: str, *, exclusive: bool) -> Turns:
    """Opens the turns of this process on a GPU. Without access to the files, a warning is logged
    and the process takes no turns.

    Args:
        gpu: name of the GPU, the same in all processes of the machine.
        exclusive: True if no other process may have its turn at the same time.
    """
    directory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        return DeviceTurns(gpu, exclusive=exclusive, directory=directory)
    except OSError as error:
        log.warning("no turns on the GPU, since its lock files cannot be opened: %s", error)
        return NO_TURNS


def _open(path: Path) -> int:
    """Opens a lock file of this user. Child processes do not inherit the descriptor, because the
    lock would outlive this process with them.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user")
    return descriptor


def _lock(descriptor: int, operation: int) -> bool:
    """Locks a file if that is possible at once, and returns whether it was."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
