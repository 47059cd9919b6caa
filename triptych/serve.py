"""`triptych serve`: runs the whole stack on one machine.

This module checks the options and makes a plan, adds a private Redis and runs the supervisor.
`plan` has the processes' environments, `stack` runs the processes, and `console` shows their
output. `StackError` has the exit status, which is 2 for invalid options and unsupported models.
"""

import asyncio
import functools
import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from triptych import checks
from triptych.adapter_options import resolve_adapters
from triptych.checkpoint import Checkpoint
from triptych.console import Console, View, make_view, write
from triptych.devices import Card, Placement, count_gpus, visible_cards
from triptych.fit import gib
from triptych.hub import resolve_model
from triptych.options import ServeOptions
from triptych.plan import (
    PREFIXES,
    Links,
    Plan,
    RedisUrls,
    devices_of,
    plan_stack,
    ranks_of,
    read_model,
)
from triptych.probes import redis_ready
from triptych.speculation_options import resolve_head
from triptych.stack import ChildSpec, Stack, StackError, end_signals, run_until_signal
from triptych.stats import Scraper, report_stopping, report_throughput, serve_metrics

# Loading a large checkpoint and capturing graphs takes minutes on a slow disk.
READY_TIMEOUT_S = 900.0
_REQUEST_TOKENS = 4096
_REDIS_MAX_MEMORY = "1gb"
# The kernel limits a socket's path, with file name and terminating zero, to 108 bytes.
_MAX_SOCKET_DIRECTORY = 80
# Permissions of the services in Redis: encoders write embeddings and run the script that bounds
# clients' files, decoders read embeddings, and gateways run the scripts for tenants' limits and for
# stored responses and files. deploy/k8s has the same rules.
REDIS_RULES = {
    "encoder": "~triptych:embedding:* -@all +ping +info +getrange +set "
    "(~triptych:file:* -@all +eval +evalsha +time +getrange +set +del +hget +hset +hdel +hincrby "
    "+zadd +zrem +zscore +zincrby +zrange +zrevrange +zrangebyscore)",
    "decoder": "~triptych:embedding:* -@all +ping +getrange",
    "gateway": "~triptych:limits ~triptych:kept:* -@all "
    "+eval +evalsha +time +hget +hmget +hgetall +hkeys +hset +hdel +hincrby "
    "+get +set +del +pexpire +zadd +zrem +zscore +zincrby +zrange +zrevrange +zrangebyscore",
}


def serve(options: ServeOptions, revision: str | None = None) -> int:
    """Runs the stack until a signal or the end of a child, and returns the exit status.

    Args:
        options: options of the command line. The model may be a name on the hub.
        revision: branch, tag or commit of a model on the hub. None for the default branch.
    """
    # These handlers apply until the stack has its own. Without a handler, the kernel ignores the
    # signals for the first process of a container.
    for number in end_signals():
        signal.signal(number, lambda *_: sys.exit(0))
    view = make_view(options.log_format)
    try:
        with private_directory() as directory:
            model, name = resolve_model(options.model, revision)
            options = resolve_head(resolve_adapters(replace(options, model=model, hub_name=name)))
            plan, specs = prepare(options, Path(directory), view.report)
            view.report(configuration(options, os.environ))  # an error before is one line
            return asyncio.run(_run(options, plan, specs, view))
    except StackError as error:
        view.report(str(error))
        return error.status


def configuration(options: ServeOptions, environment: Mapping[str, str]) -> str:
    """Describes the version and what differs from the defaults, for the first line of the log.

    Keys and passwords are not shown.

    Args:
        environment: variables of the command, of which those of the services are shown.
    """
    defaults = ServeOptions(hub_name=options.hub_name)
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) != getattr(defaults, field.name)
    }
    given |= {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    shown = ", ".join(f"{name}={_public(name, value)}" for name, value in sorted(given.items()))
    python = ".".join(map(str, sys.version_info[:3]))
    shown = shown or "all options are the defaults"
    try:
        own = version("triptych")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return f"version {own}, Python {python}; {shown}"


def _public(name: str, value: object) -> str:
    """Returns a value that may be logged: keys are replaced, and passwords of URLs left out."""
    if "api_key" in name.lower() and value != "none":
        return "(not shown)"
    return re.sub(r"(?<=://)[^\s,]*@", "", str(value))


def private_directory() -> "tempfile.TemporaryDirectory[str]":
    """Makes a private directory for sockets and other files of a stack.

    Raises:
        StackError: the directory cannot be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="triptych-")
    except OSError as error:
        raise StackError(
            "no temporary directory can be made, because the disk is full or read-only (see "
            f"TMPDIR): {error.strerror}"
        ) from error


def prepare(
    options: ServeOptions, directory: Path, report: Callable[[str], None]
) -> tuple[Plan, Sequence[ChildSpec]]:
    """Plans all processes of a stack, with Redis. Starts nothing.

    Args:
        directory: private directory for sockets, which must exist until the stack has ended.

    Raises:
        StackError: the options cannot be served.
    """
    environment = os.environ
    # Warnings about the model are not shown here, because the services log the same warnings.
    logging.getLogger("services").addHandler(logging.NullHandler())
    quantization = options.quantization or environment.get("DECODER_QUANTIZATION", "")
    task = options.task or environment.get("DECODER_TASK", "")
    spec = read_model(options.model, quantization, task)
    checks.check_installed(images=spec.vision is not None)
    checks.check_ranks(spec, ranks_of(options, environment))
    gpus = count_gpus(environment)
    devices = devices_of(options, environment)
    wanted = devices if spec.vision is not None else devices[1:]
    checks.check_devices(wanted, gpus, environment)
    load_format = options.load_format or environment.get("DECODER_LOAD_FORMAT", "auto")
    given = environment.get("GATEWAY_CHAT_TEMPLATE")
    template = options.chat_template or (Path(given) if given else None)
    checkpoint = checks.check_files(spec, load_format, template)
    length = options.max_model_len or checks.number(environment, "DECODER_MAX_MODEL_LEN")
    checks.check_length(spec, length)
    own_redis, redis = None, _given_redis(options.redis_url, environment)
    if spec.vision is None:
        report("the model is a text model: no encoder and no Redis are started")
        redis = None
    elif redis is None and len(os.fsencode(directory)) > _MAX_SOCKET_DIRECTORY:
        report(
            f"the path {directory} (TMPDIR) is too long for a socket of Redis: embeddings are "
            "cached in memory only"
        )
    elif redis is None:
        own_redis, redis = redis_spec(directory) or (None, None)
        if own_redis is None:
            report("no redis-server found: embeddings are cached in memory only")
    links = make_links(options.grpc, directory)
    on_cards = gpus and any(device != "cpu" for device in wanted)
    cards = visible_cards(environment) if on_cards else {}
    memory = checks.Memory.requested(options, environment, spec, checkpoint, cards)
    plan = plan_stack(
        options,
        spec,
        redis,
        environment,
        os.cpu_count() or 1,
        links,
        fits_beside=memory.fits_beside(options.memory_share, ranks_of(options, environment)),
    )
    memory.check(plan.encoders, plan.decoders)
    for note in (*plan.notes, *filter(None, [plan.layout])):
        report(note)
    if options.api_key:
        report("all users of this machine can read --api-key, but not GATEWAY_API_KEYS")
    report(_loading(plan, checkpoint, cards))
    return plan, [*([own_redis] if own_redis else []), *plan.children]


def _loading(plan: Plan, checkpoint: Checkpoint | None, cards: Mapping[str, Card]) -> str:
    """Describes the weights that will be loaded and the devices of the engines."""
    what = "random weights"
    if checkpoint is not None:
        stored = checkpoint.text.stored | checkpoint.vision.stored
        count = checkpoint.text.parameters + checkpoint.vision.parameters
        kinds = ", ".join(sorted(stored, key=lambda kind: -stored[kind])[:2])
        files = "1 file" if checkpoint.num_files == 1 else f"{checkpoint.num_files} files"
        size = gib(checkpoint.file_bytes)
        what = f"{_count(count)} parameters ({kinds}), {size} in {files}"
    places = [
        f"{kind} {number} on {_where(place, cards)}"
        for kind, found in (("encoder", plan.encoders), ("decoder", plan.decoders))
        for number, place in enumerate(found)
    ]
    return f"loading {plan.model_name}: {what}; {', '.join(places)}"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:,}"


def _where(place: Placement, cards: Mapping[str, Card]) -> str:
    card = cards.get(place.device)
    if card is None:
        return place.device
    return f"{place.device} ({card.name}, {place.memory_fraction:.0%} of {gib(card.total_bytes)})"


def make_links(grpc: str, directory: Path) -> Links:
    """Chooses the connections between the services.

    They are Unix sockets in the private directory, or TCP on loopback with a new token if the user
    wants TCP or if the directory's path cannot be part of a socket's address.
    """
    path = str(directory)
    if grpc == "unix" and len(path.encode()) <= _MAX_SOCKET_DIRECTORY and "," not in path:
        return Links(sockets=directory)
    token_file = directory / "token"
    token_file.touch(0o600)
    token_file.write_text(secrets.token_urlsafe(32))
    return Links(token_file=token_file)


def _given_redis(url: str | None, environment: Mapping[str, str]) -> RedisUrls | None:
    """URLs of an existing Redis from the command line or the services' variables.

    None if neither has any.
    """
    if url is None:
        urls = {kind: environment.get(f"{kind.upper()}_REDIS_URL", "") for kind in REDIS_RULES}
        return urls if urls["encoder"] or urls["decoder"] else None
    try:
        parts = urlsplit(url)
        scheme, password = parts.scheme, parts.password
    except ValueError:  # is not quoted, because its text may contain a password
        scheme, password = "", None
    if scheme not in ("redis", "rediss", "unix"):
        raise StackError("--redis-url is not a URL of Redis: redis://, rediss:// or unix://", 2)
    if password is not None or "password=" in url:
        raise StackError(
            "all users of this machine can see a password in --redis-url: export "
            "ENCODER_REDIS_URL and DECODER_REDIS_URL (and GATEWAY_REDIS_URL) instead",
            2,
        )
    return dict.fromkeys(REDIS_RULES, url)


def redis_spec(
    directory: Path, max_memory: str = _REDIS_MAX_MEMORY
) -> tuple[ChildSpec, RedisUrls] | None:
    """Plans a private Redis. None if `redis-server` is not installed.

    Args:
        directory: directory for the socket and the ACL file, which only this user can read.
        max_memory: memory of its keys, in Redis' notation.

    Returns:
        The server process, and the URLs with the services' credentials.
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
    # With volatile-lru only keys with a time to live are evicted, and not the tenants' limits.
    command = [
        binary,
        "--aclfile",
        str(users_path),
        "--port",
        "0",
        "--unixsocket",
        socket_path,
        "--unixsocketperm",
        "700",
        "--dir",
        str(directory),
        "--save",
        "",
        "--appendonly",
        "no",
        "--maxmemory",
        max_memory,
        "--maxmemory-policy",
        "volatile-lru",
        "--loglevel",
        "warning",
        "--daemonize",
        "no",
    ]
    is_ready = functools.partial(redis_ready, socket_path)
    return ChildSpec("redis", command, {}, is_ready), urls


async def _run(options: ServeOptions, plan: Plan, specs: Sequence[ChildSpec], view: View) -> int:
    console = Console(plan.log_levels, access_log=options.access_log, view=view)
    scraper = Scraper(plan.metrics_urls)

    def on_ready() -> None:
        console.ready()
        try:
            serve_metrics(scraper, plan.metrics_host, plan.metrics_port)
        except OSError as error:
            console.report(
                f"metrics cannot be served on port {plan.metrics_port}: {error.strerror}"
            )
        for line in _capacity(console):
            console.report(line)
        console.report(f"API {plan.url}/v1, page {plan.url}/, metrics {plan.metrics_url}")
        write(f"Triptych is ready: {plan.url} (model {plan.model_name})", sys.stdout)

    try:
        return await run_until_signal(
            Stack(console, plan.grace_s),
            specs,
            READY_TIMEOUT_S,
            on_ready,
            lambda: report_throughput(scraper, console.report),
            lambda: report_stopping(scraper, console.report, plan.grace_s),
        )
    finally:
        console.close()


def _capacity(console: Console) -> list[str]:
    """Describes the memory and the KV cache of each decoder, from its engine's log record."""
    lines: list[str] = []
    for name, facts in sorted(console.facts.items()):
        tokens = facts["num_blocks"] * facts["block_size"]
        cache = gib(facts["num_blocks"] * facts["block_bytes"])
        lines.append(
            f"{name} on {facts['device']} in {facts['dtype']}: weights "
            f"{gib(facts['weight_bytes'])}, KV cache {cache} = {tokens:,} tokens, "
            f"{tokens // _REQUEST_TOKENS:,} requests of {_REQUEST_TOKENS:,} tokens; "
            f"context of {facts['max_model_len']:,} tokens"
        )
    return lines
