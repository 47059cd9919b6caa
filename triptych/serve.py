"""`triptych serve`: the whole stack on one machine.

From options to a plan, a private Redis and a supervisor; what a process is told is in `plan`, how
it is run in `stack`. A `StackError` carries the exit status: 2 for options or a model that cannot
be served.
"""

import asyncio
import functools
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from triptych.plan import Links, Plan, RedisUrls, ServeOptions, plan_stack, takes_images
from triptych.probes import redis_ready
from triptych.stack import ChildSpec, Stack, StackError, run_until_signal

# Loading a large checkpoint and capturing graphs takes minutes on a slow disk.
READY_TIMEOUT_S = 900.0
_REDIS_MAX_MEMORY = "1gb"
# The kernel's limit for a socket's path is 108 bytes, with its name and the end.
_MAX_SOCKET_DIRECTORY = 80
# What the services may do: encoders write, decoders read. deploy/k8s/README.md has the same rules.
REDIS_RULES = {
    "encoder": "~triptych:embedding:* -@all +ping +getrange +set",
    "decoder": "~triptych:embedding:* -@all +ping +getrange",
}


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
    spec, redis = None, _given_redis(options.redis_url, os.environ)
    if not takes_images(options.model):
        report("the model takes text alone: no encoder and no Redis are started")
        redis = None
    elif redis is None:
        spec, redis = redis_spec(directory, directory / "redis.log") or (None, None)
        if spec is None:
            report("no redis-server found: embeddings are cached in memory only")
    links = make_links(options.grpc, directory)
    plan = plan_stack(options, redis, os.environ, os.cpu_count() or 1, logs, links)
    return plan, [*([spec] if spec else []), *plan.children]


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


def _given_redis(url: str | None, environment: Mapping[str, str]) -> RedisUrls | None:
    """A Redis that others run: of the command line, or of the services' variables."""
    if url is None:
        exported = [environment.get(f"{kind}_REDIS_URL", "") for kind in ("ENCODER", "DECODER")]
        return RedisUrls(*exported) if any(exported) else None
    if urlsplit(url).password is not None or "password=" in url:
        raise StackError(
            "all users of this machine see a password in --redis-url: export ENCODER_REDIS_URL "
            "and DECODER_REDIS_URL instead",
            2,
        )
    return RedisUrls(url, url)


def redis_spec(directory: Path, log_path: Path) -> tuple[ChildSpec, RedisUrls] | None:
    """The server process and how services log in; None if `redis-server` is not installed.

    Args:
        directory: private to this user; for the socket and the users.
        log_path: for its output.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    socket_path = str(directory / "redis.sock")
    passwords = {user: secrets.token_hex(24) for user in REDIS_RULES}
    users_path = directory / "users.acl"
    users_path.write_text(
        "user default off\n"
        + "".join(
            f"user {user} on #{hashlib.sha256(password.encode()).hexdigest()} {REDIS_RULES[user]}\n"
            for user, password in passwords.items()
        )
    )
    users_path.chmod(0o600)
    urls = {user: f"unix://{user}:{password}@{socket_path}" for user, password in passwords.items()}
    command = [
        binary, "--aclfile", str(users_path),
        "--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700",
        "--dir", str(directory), "--save", "", "--appendonly", "no",
        "--maxmemory", _REDIS_MAX_MEMORY, "--maxmemory-policy", "allkeys-lru",
        "--loglevel", "warning", "--daemonize", "no",
    ]  # fmt: skip
    is_ready = functools.partial(redis_ready, socket_path)
    return ChildSpec("redis", command, {}, is_ready, log_path), RedisUrls(**urls)


async def _run(plan: Plan, specs: Sequence[ChildSpec]) -> int:
    def on_ready() -> None:
        print(f"Triptych is ready: {plan.url} (model {plan.model_name})", flush=True)

    return await run_until_signal(Stack(_say), specs, READY_TIMEOUT_S, on_ready)


def _say(line: str) -> None:
    print(f"triptych: {line}", file=sys.stderr, flush=True)
