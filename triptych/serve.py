"""`triptych serve`: the whole stack on one machine.

From options to a plan, a private Redis and a supervisor; what a process is told is in `plan`, how
it is run in `stack`. A `StackError` carries the exit status: 2 for options or a model that cannot
be served.
"""

import asyncio
import functools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from triptych.plan import Links, Plan, ServeOptions, plan_stack, takes_images
from triptych.probes import redis_ready
from triptych.stack import ChildSpec, Stack, StackError, run_until_signal

# Loading a large checkpoint and capturing graphs takes minutes on a slow disk.
READY_TIMEOUT_S = 900.0
_REDIS_MAX_MEMORY = "1gb"
# The kernel's limit for a socket's path is 108 bytes, with its name and the end.
_MAX_SOCKET_DIRECTORY = 80


def serve(options: ServeOptions) -> int:
    """Runs the stack until a signal or a child's end; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as directory:
        try:
            plan, specs = prepare(options, Path(directory), _say)
            return asyncio.run(_run(plan, specs))
        except StackError as error:
            _say(str(error))
            return error.status


def prepare(
    options: ServeOptions, directory: Path, report: Callable[[str], None], *, log: bool = False
) -> tuple[Plan, Sequence[ChildSpec]]:
    """All processes of a stack, Redis included; nothing is started.

    Args:
        options: of the command line.
        directory: private, for sockets and logs; must outlive the stack.
        report: called with a line for people if there is no encoder or no Redis.
        log: send the children's output to files in `directory`.

    Raises:
        StackError: the options cannot be served.
    """
    logs = directory if log else None
    redis, url = None, options.redis_url
    if not takes_images(options.model):
        report("the model takes text alone: no encoder and no Redis are started")
        url = None
    elif url is None:
        redis = redis_spec(directory, directory / "redis.log")
        url = redis_url(directory) if redis else None
        if redis is None:
            report("no redis-server found: embeddings are cached in memory only")
    links = make_links(options.grpc, directory)
    plan = plan_stack(options, url, os.environ, os.cpu_count() or 1, logs, links)
    return plan, [*([redis] if redis else []), *plan.children]


def make_links(grpc: str, directory: Path) -> Links:
    """Unix sockets in the private directory; or, where they are not wanted or its path does not fit
    into an address, loopback with a token of this start.
    """
    path = str(directory)
    if grpc == "unix" and len(path.encode()) <= _MAX_SOCKET_DIRECTORY and "," not in path:
        return Links(sockets=directory)
    token_file = directory / "token"
    token_file.touch(0o600)
    token_file.write_text(secrets.token_urlsafe(32))
    return Links(token_file=token_file)


def redis_url(directory: Path) -> str:
    """The URL of the server that `redis_spec` runs in this directory."""
    return f"unix://{directory / 'redis.sock'}"


def redis_spec(directory: Path, log_path: Path) -> ChildSpec | None:
    """The server process, or None if `redis-server` is not installed.

    Args:
        directory: private to this user; for the socket. Nothing else is written.
        log_path: for its output.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    socket_path = str(directory / "redis.sock")
    command = [
        binary, "--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700",
        "--dir", str(directory), "--save", "", "--appendonly", "no",
        "--maxmemory", _REDIS_MAX_MEMORY, "--maxmemory-policy", "allkeys-lru",
        "--loglevel", "warning", "--daemonize", "no",
    ]  # fmt: skip
    return ChildSpec("redis", command, {}, functools.partial(redis_ready, socket_path), log_path)


async def _run(plan: Plan, specs: Sequence[ChildSpec]) -> int:
    def on_ready() -> None:
        print(f"Triptych is ready: {plan.url} (model {plan.model_name})", flush=True)

    return await run_until_signal(Stack(_say), specs, READY_TIMEOUT_S, on_ready)


def _say(line: str) -> None:
    print(f"triptych: {line}", file=sys.stderr, flush=True)
