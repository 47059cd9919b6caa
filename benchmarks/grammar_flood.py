"""What random grammars of many clients cost an honest one.

    python -m benchmarks.grammar_flood --url http://127.0.0.1:8000 --seconds 30 --attackers 8

The honest client streams short answers one after the other, alone and then beside attackers that
send the cases of `benchmarks.grammar_fuzz` as response formats or tools. Prints its times to the
first token and how its requests and the attackers' ended. A stream that breaks is an error.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.grammar_fuzz import case

_TIMEOUT_S = 60.0
_BEGIN_S = 5.0  # until all attackers send


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)


def _post(url: str, body: dict[str, Any]) -> tuple[int, bytes, float]:
    """Status, body, and seconds until its first content."""
    connection, start = _connection(url), time.monotonic()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    first, text = 0.0, b""
    for line in answer:
        text += line
        if not first and b'"content":"' in line and b'"content":""' not in line:
            first = time.monotonic() - start
    connection.close()
    return answer.status, text, first


def _honest(url: str, model: str, seconds: float) -> dict[str, Any]:
    times: list[float] = []
    errors: Counter[str] = Counter()
    end = time.monotonic() + seconds
    messages = [{"role": "user", "content": "What can you do?"}]
    body = {"model": model, "messages": messages, "max_tokens": 16, "stream": True}
    while time.monotonic() < end:
        try:
            status, text, first = _post(url, body)
        except OSError as error:
            errors[type(error).__name__] += 1
            continue
        if status != 200 or b"data: [DONE]" not in text or b'"error"' in text:
            errors[f"{status} {text[-120:]!r}"] += 1
        elif first:
            times.append(first)
    p50, p99 = (round(1e3 * float(v), 1) for v in np.percentile(times, (50, 99)))
    return {"requests": len(times), "ttft_ms": [p50, p99], "errors": dict(errors)}


def _attack(
    url: str, model: str, first: int, step: int, stop: Event, ended: "Queue[Counter[str]]"
) -> None:
    counts: Counter[str] = Counter()
    for number in itertools.count(first, step):
        if stop.is_set():
            break
        task = case(number)
        structured: dict[str, Any] = {
            "json_schema": {"json": task.text}, "regex": {"regex": task.text},
            "grammar": {"grammar": task.text},
        }.get(task.kind, {"choice": ["a", "b"]})  # fmt: skip
        messages = [{"role": "user", "content": "hello"}]
        body = {
            "model": model, "messages": messages, "max_tokens": 24,
            "structured_outputs": structured,
        }  # fmt: skip
        try:
            status, _, _ = _post(url, body)
            counts[str(status)] += 1
        except OSError as error:
            counts[type(error).__name__] += 1
    ended.put(counts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both halves and prints the result as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--url", required=True)
    add("--seconds", type=float, default=30.0)
    add("--attackers", type=int, default=8)
    options = parser.parse_args(arguments)
    connection = _connection(options.url)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    _honest(options.url, model, 3.0)
    quiet = _honest(options.url, model, options.seconds)
    # Processes: threads would share the interpreter lock with the client that is measured.
    context = multiprocessing.get_context("spawn")
    stop, ended = context.Event(), context.Queue()
    attackers = [
        context.Process(
            target=_attack,
            args=(options.url, model, first, options.attackers, stop, ended),
            daemon=True,
        )
        for first in range(options.attackers)
    ]
    for attacker in attackers:
        attacker.start()
    time.sleep(_BEGIN_S)
    beside = _honest(options.url, model, options.seconds)
    stop.set()
    counts = sum((ended.get() for _ in attackers), Counter[str]())
    for attacker in attackers:
        attacker.join()
    print(json.dumps({"quiet": quiet, "beside": beside, "attackers": dict(counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
