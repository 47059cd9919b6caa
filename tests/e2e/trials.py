"""Pods come and go while clients ask; no answer may break or differ from an undisturbed one.

`python -m tests.e2e.trials --streams 32 --tokens 300` is the long run on processes of this machine;
a test makes a short one, and tests/cluster runs the same trials on a cluster. Streams of all kinds
run one after the other, so that there are always as many; beside them clients that keep their
connections ask about images that no cache has.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx2

from tests.e2e.cluster import message, png, wait_until
from tests.e2e.handover import Answer, Asker
from tests.noise import PATIENCE_S

KINDS = ("decoder", "encoder", "gateway")
# One stream of each kind. Their random numbers lie 9e-6 or more of the mass from a bound between
# two tokens: seed 4's 170th is 5e-7 from one, so that the rounding of another batch (1e-6 in
# float32) sometimes gives its other neighbour.
_SEEDS = (0, 36, 7, 33, 19)
_NUM_IMAGES = 3
_PAUSE_S = 0.05  # of a client between two answers


class Fleet(Protocol):
    """What runs: two of each service, and an embedding cache."""

    model: str

    def gateways(self) -> list[str]:
        """Their URLs, of those that a Service would choose among."""
        ...

    def scale(self, kind: str, count: int) -> list[str]:
        """Has so many pods of a service; returns when they serve and the others are gone, with what
        went wrong.
        """
        ...

    def roll_out(self, kind: str) -> list[str]:
        """Replaces all pods of a service, each by a new one that serves before it goes."""
        ...

    def restart_cache(self) -> list[str]:
        """Ends the embedding cache, which forgets everything, and starts it again."""
        ...


@dataclass
class Outcome:
    """Of one trial."""

    name: str
    mistakes: list[str] = field(default_factory=list[str])
    num_streams: int = 0
    num_handed_over: int = 0
    longest_s: float = 0.0
    num_questions: int = 0  # about images
    slowest_s: float = 0.0  # of these

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_streams} streams of up to {self.longest_s:.0f} s, "
            f"{self.num_handed_over} handed over; {self.num_questions} questions about images of "
            f"up to {self.slowest_s:.1f} s; {len(self.mistakes)} broken or wrong"
        )


class Clients:
    """All clients of a fleet, and what they were answered while nothing happened."""

    def __init__(self, fleet: Fleet, num_streams: int, num_tokens: int, num_askers: int) -> None:
        self._fleet = fleet
        self._num_streams, self._num_askers = num_streams, num_askers
        self._asker = Asker(self._gateway, num_tokens, model=fleet.model)
        self._salts = itertools.count(random.randrange(1 << 40))
        self._lock = threading.Lock()
        self._streams = {seed: self._asker.ask(seed) for seed in _SEEDS}
        with httpx2.Client(base_url=self._gateway(), timeout=PATIENCE_S) as client:
            answers = [self._ask_about(client, n) for n in range(_NUM_IMAGES)]
        broken = [a.error for a in self._streams.values() if a.error]
        broken += [a.text for a in answers if a.status_code != 200]
        assert not broken, broken
        self._answers = [_content(answer) for answer in answers]

    def during(self, name: str, action: Callable[[], list[str]]) -> Outcome:
        """Runs `action` while all clients ask."""
        outcome, over = Outcome(name), threading.Event()
        self._asker.num_chunks.clear()
        with ThreadPoolExecutor(self._num_streams + self._num_askers) as pool:
            running = [
                *(
                    pool.submit(self._keep_streaming, n, over, outcome)
                    for n in range(self._num_streams)
                ),
                *(pool.submit(self._keep_asking, over, outcome) for _ in range(self._num_askers)),
            ]
            try:
                enough = 3 * min(len(_SEEDS), self._num_streams)
                wait_until(
                    lambda: (
                        sum(list(self._asker.num_chunks.values())) > enough
                        and (outcome.num_questions > 0 or not self._num_askers)
                    ),
                    PATIENCE_S,
                    "all clients are answered",
                )
                outcome.mistakes += action()
            finally:
                over.set()
            for each in running:
                each.result()
        return outcome

    def _gateway(self) -> str:
        return random.choice(self._fleet.gateways())

    def _keep_streaming(self, number: int, over: threading.Event, outcome: Outcome) -> None:
        for index in itertools.count(number):
            if over.is_set():
                return
            seed = _SEEDS[index % len(_SEEDS)]
            started = time.monotonic()
            answer = self._asker.ask(seed)
            with self._lock:
                self._note_stream(seed, answer, time.monotonic() - started, outcome)

    def _note_stream(self, seed: int, answer: Answer, seconds: float, outcome: Outcome) -> None:
        outcome.num_streams += 1
        outcome.longest_s = max(outcome.longest_s, seconds)
        outcome.num_handed_over += answer.handover_ms is not None
        if difference := answer.differs_from(self._streams[seed]):
            outcome.mistakes.append(f"stream {seed}: {difference}")

    def _keep_asking(self, over: threading.Event, outcome: Outcome) -> None:
        client: httpx2.Client | None = None
        for number in itertools.count():
            if over.wait(_PAUSE_S):
                break
            # A connection is kept until the gateway closes it: no Service moves it.
            client = client or httpx2.Client(base_url=self._gateway(), timeout=PATIENCE_S)
            started, number = time.monotonic(), number % _NUM_IMAGES
            mistake, is_closed = "", True
            try:
                response = self._ask_about(client, number)
                is_closed = response.headers.get("connection") == "close"
                if response.status_code != 200:
                    mistake = f"{response.status_code} {response.text}"
                elif (found := _content(response)) != self._answers[number]:
                    mistake = f"{found!r} is not {self._answers[number]!r}"
            except httpx2.TransportError as error:
                mistake = repr(error)
            if is_closed:
                client.close()
                client = None
            with self._lock:
                outcome.num_questions += 1
                outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - started)
                if mistake:
                    outcome.mistakes.append(f"image {number}: {mistake}")
        if client is not None:
            client.close()

    def _ask_about(self, client: httpx2.Client, number: int) -> httpx2.Response:
        """A new salt makes the image a new one to all caches."""
        body = {
            "model": self._fleet.model, "temperature": 0, "max_tokens": 8, "ignore_eos": True,
            "messages": [message("What is it?", png(1000 + number))],
            "cache_salt": f"trial-{next(self._salts)}",
        }  # fmt: skip
        return client.post("/v1/chat/completions", json=body)


def _content(response: httpx2.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def scale_down(fleet: Fleet, clients: Clients, kind: str) -> Outcome:
    """Two pods become one."""
    return clients.during(f"{kind}s 2 → 1", lambda: fleet.scale(kind, 1))


def roll_out(fleet: Fleet, clients: Clients, kind: str) -> Outcome:
    return clients.during(f"{kind}s roll out", lambda: fleet.roll_out(kind))


def lose_cache(fleet: Fleet, clients: Clients) -> Outcome:
    return clients.during("Redis restarts", fleet.restart_cache)


def run_all(
    fleet: Fleet, clients: Clients, kinds: Sequence[str], report: Callable[[Outcome], None]
) -> list[str]:
    """All trials, each with two pods of each kind at its start; what went wrong."""
    mistakes: list[str] = []

    def note(outcome: Outcome) -> None:
        report(outcome)
        mistakes.extend(outcome.mistakes)

    for kind in kinds:
        note(scale_down(fleet, clients, kind))
        mistakes += fleet.scale(kind, 2)
        note(roll_out(fleet, clients, kind))
    note(lose_cache(fleet, clients))
    return mistakes


def main() -> int:
    from tests.e2e.fleet import ProcessFleet

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--askers", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--grace", type=float, default=300.0)
    parser.add_argument("--log", type=Path, help="a directory to keep logs in")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def report(outcome: Outcome) -> None:
        print(f"{time.strftime('%H:%M:%S')} {outcome}", flush=True)
        for mistake in outcome.mistakes[:10]:
            print(f"  {mistake[:1000]}", flush=True)

    with tempfile.TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        logs = arguments.log or Path(directory)
        with ProcessFleet(logs, grace_s=arguments.grace) as fleet:
            clients = Clients(fleet, arguments.streams, arguments.tokens, arguments.askers)
            return 1 if run_all(fleet, clients, arguments.kinds, report) else 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
