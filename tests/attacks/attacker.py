"""The attacker: a process of its own with its bodies made ahead, and the origin of its images.

It stands for machines elsewhere, so its work must not delay the services that share this machine's
cores: it runs only while nothing else is ready to (SCHED_IDLE, which counts within a session where
the kernel groups processes by session, and the least weight for a session of its own). A service
that an attack keeps busy is still kept busy: the attacker's part of a request is to send bytes that
are there already.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.attacks.origin import Origin
from tests.attacks.rows import ROWS, Posting, Row, Target
from tests.noise import PATIENCE_S

_CONTEXT = multiprocessing.get_context("spawn")
_ATTACK_TIMEOUT_S = 300.0  # it runs behind all others


class Attacker:
    """Use as a context manager; one row at a time."""

    def __init__(self, port: int) -> None:
        self._mine, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_be_attacker, args=(theirs, port), daemon=True)

    def __enter__(self) -> "Attacker":
        self._process.start()
        self._ask(None, PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def prepare(self, row: Row, seconds: float) -> None:
        """Makes the bodies of the row's next attack."""
        self._ask((row.name, seconds, True), _ATTACK_TIMEOUT_S)

    def attack(self, row: Row, seconds: float) -> Mapping[int, int]:
        """The statuses of the attack's requests, once all have ended."""
        return self._ask((row.name, seconds, False), seconds + _ATTACK_TIMEOUT_S)

    def _ask(self, order: "tuple[str, float, bool] | None", timeout_s: float) -> Counter[int]:
        self._mine.send(order)
        assert self._mine.poll(timeout_s), "the attacker does not answer"
        return self._mine.recv()


def _run_behind_all_others() -> None:
    with suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _be_attacker(control: "Connection", port: int) -> None:
    _run_behind_all_others()
    rows = {row.name: row for row in ROWS}
    with Origin() as origin, suppress(EOFError):
        while True:
            order: tuple[str, float, bool] | None = control.recv()
            statuses: Counter[int] = Counter()
            if order is not None:
                name, seconds, prepares = order
                attack = rows[name].attack
                if not prepares:
                    statuses = attack(Target("127.0.0.1", port, origin.port, seconds))
                elif isinstance(attack, Posting):
                    attack.prepare(seconds)
            control.send(statuses)
