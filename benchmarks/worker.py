"""A process that keeps its share of a row's requests in flight.

Parsing 15,000 events a second fills a core, so several processes share a row. They take requests
from one counter: the concurrency stays what the row says until the requests run out.
"""

import asyncio
import http.client
import json
import mmap
import signal
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.client import Connection, Sample, Target
from services.common.process.parent_death import end_with_parent


@dataclass(frozen=True, slots=True)
class Job:
    """The same for all workers of a row.

    Attributes:
        bodies_path: all request bodies, one after the other.
        spans: start and end of each body.
        timeout_s: for one request.
    """

    target: Target
    bodies_path: Path
    spans: tuple[tuple[int, int], ...]
    timeout_s: float


def write_bodies(path: Path, bodies: list[bytes]) -> tuple[tuple[int, int], ...]:
    """Writes the bodies where workers can map them; returns their spans."""
    spans: list[tuple[int, int]] = []
    with path.open("wb") as file:
        for body in bodies:
            start = file.tell()
            file.write(body)
            spans.append((start, file.tell()))
    return tuple(spans)


def run_worker(
    job: Job,
    num_connections: int,
    next_index: "Synchronized[int]",
    barrier: Barrier,
    results: "Queue[Sample]",
) -> None:
    """Entry point of the process: sends requests until the counter is past the last one.

    All workers begin in the same instant, when the last of them has reached the barrier. Ctrl-C
    reaches the process that started them, which ends them; so does its own end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := parent_process()) is not None and parent.pid is not None:
        end_with_parent(parent.pid)
    with job.bodies_path.open("rb") as file:
        bodies = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    barrier.wait()
    asyncio.run(_run(job, bodies, num_connections, next_index, results))


async def _run(
    job: Job,
    bodies: mmap.mmap,
    num_connections: int,
    next_index: "Synchronized[int]",
    results: "Queue[Sample]",
) -> None:
    async def keep_one_in_flight() -> None:
        connection = Connection(job.target)
        while True:
            with next_index.get_lock():
                index = next_index.value
                next_index.value += 1
            if index >= len(job.spans):
                break
            start, end = job.spans[index]
            results.put(await connection.post(bodies[start:end], job.timeout_s))
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_connections):
            tasks.create_task(keep_one_in_flight())


def model_name(target: Target, timeout_s: float = 30.0) -> str:
    """The first model that the server lists.

    Raises:
        ConnectionError: nobody answers, or with something else than a list of models.
    """
    kind = http.client.HTTPSConnection if target.tls else http.client.HTTPConnection
    connection = kind(target.host, target.port, timeout=timeout_s)
    headers = dict(line.split(": ", 1) for line in target.headers.decode().splitlines())
    try:
        path = target.path.removesuffix("/chat/completions") + "/models"
        connection.request("GET", path, headers=headers)
        return json.loads(connection.getresponse().read())["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise ConnectionError(f"no models at {target.host}:{target.port} ({error})") from error
    finally:
        connection.close()
