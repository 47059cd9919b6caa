"""Clients of the gateways: they ask, read slowly or leave, and note what came."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.chaos.history import Ask, History
from benchmarks.chaos.questions import Question
from benchmarks.chaos.stack import Pod, Stack
from benchmarks.client import Connection, Sample, Target

PATIENCE_S = 90.0
_CONNECT_PATIENCE_S = 20.0
_LOGPROB_TOLERANCE = 1e-3
_SMALL_BUFFER = 2048
_LEAVES, _READS_SLOWLY, _WHOLE, _SALTED = 0.04, 0.03, 0.25, 0.15


@dataclass
class Answer:
    """What came, streamed or whole."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    tokens: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    logprobs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    completion_tokens: int = 0
    error_code: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Adds an event of a stream, or a whole answer."""
        if error := event.get("error"):
            self.error_code = str(error.get("code"))
            return
        for choice in event["choices"]:
            index = choice["index"]
            part = choice.get("delta") or choice.get("message") or {}
            self.texts[index] = self.texts.get(index, "") + (part.get("content") or "")
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.setdefault(index, []).append(entry["token"])
                self.logprobs.setdefault(index, []).append(entry["logprob"])
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
        if usage := event.get("usage"):
            self.completion_tokens = usage["completion_tokens"]

    def differs_from(self, other: "Answer") -> str:
        """What differs first; empty: nothing that a client could tell."""
        for name in ("texts", "reasons", "tokens", "completion_tokens"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)!r} is not {getattr(other, name)!r}"
        for choice, found in self.logprobs.items():
            if not np.allclose(found, other.logprobs[choice], atol=_LOGPROB_TOLERANCE):
                return f"log-probabilities of choice {choice}"
        return ""


class ChaosConnection(Connection):
    """Keeps the answer; may read slowly."""

    def __init__(self, target: Target, pod: Pod | None = None) -> None:
        super().__init__(target)
        self.pod = pod
        self.answer = Answer()

    async def ask(self, body: bytes, timeout_s: float, pause_s: float = 0.0) -> Sample:
        """`post`; after the first bytes nothing is read for `pause_s`."""
        self.answer = Answer()
        self._pause_s = pause_s
        return await self.post(body, timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._pause_s and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause_s, self._resume, self._transport)
            self._pause_s = 0.0
        super().data_received(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._pause_s:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)

    @staticmethod
    def _resume(transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()

    def _read_events(self, now: float, complete: bool) -> None:
        if self._status != 200 or self._chunked:
            if self._status != 200 and complete:
                self._take_error(bytes(self._text))
            super()._read_events(now, complete)
        elif complete:
            self._read_event(json.loads(bytes(self._text)), now)

    def _read_event(self, event: dict[str, Any], now: float) -> None:
        self.answer.take(event)
        super()._read_event(event, now)

    def _take_error(self, body: bytes) -> None:
        try:
            self.answer.take(json.loads(body))
        except ValueError:
            self.answer.error_code = f"not JSON: {body[:100]!r}"


def target_of(pod: Pod) -> Target:
    """Where a gateway is asked."""
    return Target.from_url(f"http://{pod.service.address}")


class Client:
    """Asks one question after another, until told to stop.

    Args:
        known: the right answers, by the question's number.
    """

    def __init__(
        self,
        stack: Stack,
        catalogue: Sequence[Question],
        known: Sequence[Answer],
        history: History,
        seed: str,
    ) -> None:
        self._stack = stack
        self._catalogue, self._known = catalogue, known
        self._history = history
        self._rng = random.Random(seed)
        self._connections: dict[Pod, ChaosConnection] = {}

    async def keep_asking(self, stopping: asyncio.Event, think_s: float) -> None:
        """One request at a time."""
        while not stopping.is_set():
            question = self._rng.choice(self._catalogue)
            await self._ask(question)
            self._connections = {
                p: c for p, c in self._connections.items() if p.service.is_running()
            }
            if think_s:
                await asyncio.sleep(self._rng.expovariate(1 / think_s))
        for connection in self._connections.values():
            connection.close()

    async def _ask(self, question: Question) -> None:
        rng = self._rng
        behaviour = rng.random()
        leaves = behaviour < _LEAVES
        slow = not leaves and behaviour < _LEAVES + _READS_SLOWLY
        stream = slow or rng.random() > _WHOLE
        salt = f"{rng.getrandbits(64):x}" if rng.random() < _SALTED else ""
        body = question.body(stream=stream, salt=salt)
        patience_s = rng.expovariate(1 / 0.1) if leaves else PATIENCE_S
        pause_s = rng.uniform(0.1, 3.0) if slow else 0.0
        start = time.monotonic()
        while True:
            pod = await self._gateway(start)
            if pod is None:
                self._history.add(Ask(start, time.monotonic(), 0.0, "", "lost", "no gateway"))
                return
            connection = self._connections.get(pod)
            if connection is None or slow:
                connection = ChaosConnection(target_of(pod), pod)
            if not slow:
                self._connections[pod] = connection
            # Before the answer: a slow reader sees the loss after the pod's next process began.
            name = f"{pod.name}/{pod.service.pid}"
            sample = await connection.ask(body, patience_s, pause_s)
            if slow:
                connection.close()
            if sample.status or not sample.error.startswith("ConnectionRefusedError"):
                break
            await asyncio.sleep(0.01)
        outcome, detail = self._judge(question, sample, connection.answer, leaves=leaves)
        ttft = sample.first - start if stream and sample.first and not leaves else 0.0
        note = f"question {question.number}{' streamed' if stream else ''}: {detail}"
        self._history.add(Ask(start, sample.end, ttft, name, outcome, note if detail else ""))

    async def _gateway(self, start: float) -> Pod | None:
        while not (ready := self._stack.ready_gateways()):
            if time.monotonic() - start > _CONNECT_PATIENCE_S:
                return None
            await asyncio.sleep(0.05)
        return self._rng.choice(ready)

    def _judge(
        self, question: Question, sample: Sample, answer: Answer, *, leaves: bool
    ) -> tuple[str, str]:
        """The outcome, and what is to be said of it."""
        error = sample.error
        if error == "the answer had no content":
            error = ""
        if sample.status == 503:
            if answer.error_code in ("unavailable", "overloaded") and sample.retry_after.isdigit():
                return "refused", f"{answer.error_code}: {error}"
            return "wrong status", f"503 {answer.error_code!r} Retry-After {sample.retry_after!r}"
        if sample.status not in (0, question.status):
            return "wrong status", f"{sample.status} instead of {question.status}: {error}"
        if leaves and error.startswith("TimeoutError"):
            return "left", ""
        if answer.error_code and sample.status == 200:
            return "error event", f"{answer.error_code}: {error}"
        if question.status != 200 and sample.status == question.status:
            return "mistake", ""
        if error:
            return "lost", error
        difference = answer.differs_from(self._known[question.number])
        return ("wrong", difference) if difference else ("answered", "")


async def ask_alone(stack: Stack, catalogue: Sequence[Question]) -> list[Answer]:
    """The right answers: each question on its own.

    Raises:
        RuntimeError: one has no answer although nothing is wrong.
    """
    (pod, *_) = stack.ready_gateways()
    connection = ChaosConnection(target_of(pod), pod)
    found: list[Answer] = []
    for question in catalogue:
        sample = await connection.ask(question.body(stream=False, salt="alone"), PATIENCE_S)
        if sample.status != question.status:
            raise RuntimeError(f"question {question.number}: {sample.status} {sample.error}")
        found.append(connection.answer)
    connection.close()
    return found
