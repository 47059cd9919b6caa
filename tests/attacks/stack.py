"""Gateway, encoder and decoder with their pods' memory, an honest client, and what a row costs."""

import http.client
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.attacks.attacker import Attacker
from tests.attacks.images import small
from tests.attacks.origin import IMAGE, IMAGE_NAMES, Origin
from tests.attacks.pod import Pod, manifest_limits, manifest_settings
from tests.attacks.rows import ATTACKER, HONEST, PATH, Row, with_images, with_urls
from tests.e2e.cluster import Cluster
from tests.noise import PATIENCE_S

_CONTEXT = multiprocessing.get_context("spawn")
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Times:
    """What honest clients saw, in seconds.

    Attributes:
        chats: of whole answers about images that nobody has sent before.
        health: of `/health`.
        statuses: of all chats, refused ones included.
    """

    chats: Sequence[float]
    health: Sequence[float]
    statuses: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one row cost.

    Attributes:
        statuses: of the attack's requests.
        peak_bytes, cpu_s: by service.
        quiet, during: the honest clients.
    """

    row: Row
    statuses: Mapping[int, int]
    seconds: float
    peak_bytes: Mapping[str, int]
    cpu_s: Mapping[str, float]
    quiet: Times
    during: Times


class Stack:
    """Use as a context manager; one row at a time."""

    def __init__(self, directory: Path) -> None:
        limits = manifest_limits()
        self._cluster = Cluster(
            directory,
            encoder=manifest_settings("encoder"),
            decoder=manifest_settings("decoder"),
            gateway={
                "api_keys": f"{ATTACKER},{HONEST}", "allowed_media": "private",
            },
        )  # fmt: skip
        self._cluster.gateway.wrapper = [sys.executable, "-m", "tests.attacks.origin"]
        self.pods = {s.kind: Pod(s, limits[s.kind]) for s in self._cluster.services}
        self._number = 0

    def __enter__(self) -> "Stack":
        with ExitStack() as stack:
            for pod in self.pods.values():
                stack.callback(pod.close)
            stack.enter_context(self._cluster)
            for pod in self.pods.values():
                pod.watch()
            port = self._cluster.gateway.port
            self._attacker = stack.enter_context(Attacker(port))
            self._honest = stack.enter_context(Honest(port))
            self._started = self._pids()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def quiet(self, seconds: float, *, by_url: bool = False) -> Times:
        """Honest clients alone."""
        self._honest.start(by_url=by_url)
        time.sleep(seconds)
        return self._honest.stop()

    def run(self, row: Row, seconds: float, quiet_s: float = 0.5) -> Cost:
        """One row: quiet, then the attack for `seconds` or one round."""
        self._attacker.prepare(row, seconds)
        quiet = self.quiet(quiet_s, by_url=row.by_url)
        cpu_s = {kind: pod.cpu_s() for kind, pod in self.pods.items()}
        for pod in self.pods.values():
            pod.peak_bytes = 0
        self._honest.start(by_url=row.by_url)
        start = time.monotonic()
        statuses = self._attacker.attack(row, seconds)
        taken = time.monotonic() - start
        time.sleep(max(0.0, quiet_s - taken))
        during = self._honest.stop()
        return Cost(
            row, statuses, taken,
            {kind: pod.peak_bytes for kind, pod in self.pods.items()},
            {kind: pod.cpu_s() - cpu_s[kind] for kind, pod in self.pods.items()},
            quiet, during,
        )  # fmt: skip

    def settled(self) -> bool:
        """Whether nothing is left of the requests before."""
        gateway = self._cluster.gateway
        return gateway.metric("triptych_gateway_requests_running") == 0

    def num_deaths(self) -> int:
        """Processes that were there at the start and are not any more, and those killed since."""
        killed = sum(pod.num_kills() for pod in self.pods.values())
        return killed + len(self._started - self._pids())

    def _pids(self) -> set[int]:
        return {process.pid for pod in self.pods.values() for process in pod.processes()}


class Honest:
    """Clients in a process of their own: one asks about new images, one asks for `/health`."""

    def __init__(self, port: int) -> None:
        self._mine, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_be_honest, args=(theirs, port), daemon=True)

    def __enter__(self) -> "Honest":
        self._process.start()
        assert self._mine.poll(PATIENCE_S)
        self._mine.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def start(self, *, by_url: bool) -> None:
        self._mine.send(by_url)

    def stop(self) -> Times:
        self._mine.send(None)
        assert self._mine.poll(PATIENCE_S)
        return self._mine.recv()


def _be_honest(control: "Connection", port: int) -> None:
    with Origin() as origin, suppress(EOFError):
        _serve_honest(control, port, origin.port)


def _serve_honest(control: "Connection", port: int, origin_port: int) -> None:
    number = 0
    control.send(None)
    while True:
        by_url: bool = control.recv()
        stopped = threading.Event()
        chats: list[float] = []
        health: list[float] = []
        statuses: Counter[int] = Counter()

        def poll(stopped: threading.Event = stopped, health: list[float] = health) -> None:
            while not stopped.wait(_PAUSE_S):
                taken, _ = _timed("GET", port, "/health")
                health.append(taken)

        thread = threading.Thread(target=poll)
        thread.start()
        while not control.poll() or not chats:
            number += 1
            if by_url:
                body = with_urls([f"http://good{IMAGE_NAMES}:{origin_port}{IMAGE}{number}"])
            else:
                body = with_images([small(number)])
            taken, status = _timed("POST", port, PATH, body)
            statuses[status] += 1
            if status == 200:
                chats.append(taken)
            elif sum(statuses.values()) > 1000:
                break
            time.sleep(_PAUSE_S)
        control.recv()
        stopped.set()
        thread.join()
        control.send(Times(chats, health, statuses))


def _timed(method: str, port: int, path: str, body: bytes | None = None) -> tuple[float, int]:
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {HONEST}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return time.monotonic() - start, answer.status
    finally:
        connection.close()
