"""What the gateway and its stream to the decoder sustain by themselves; no model, no device.

    python -m benchmarks.gateway --rates 10000,20000,30000
    python -m benchmarks.gateway --closed 32x8,128x8,128x16 --gateways 1 --gateway-cores 0,1

A real gateway and a real decoder's front serve streaming chats; the engine behind them computes
nothing and gives every sequence a token at each tick. The latency of each token runs from the
engine's `send` to the client that has parsed the event, so it holds two hops between processes,
gRPC, detokenization, HTTP and the client's own work. CPU is per token and process.

With `--closed`, the engine ticks each `--tick` milliseconds, whatever the load, and each client
sends its next request when it has the answer to the last one: how many requests a second the
gateways can answer, and the CPU time of a request. Log lines are written, unlike with `--rates`.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from subprocess import Popen

import psutil
import uvloop

from benchmarks import null_engine
from benchmarks.client import Connection, Sample, Target, TimedConnection
from benchmarks.workloads import WORDS
from services.common.process.service_process import serve
from services.common.security.credentials import Credentials
from services.decoder.__main__ import DECODER

_CONTEXT = multiprocessing.get_context("spawn")
_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
_LETTER = "a"  # one token of the model, so that a text's length is its number of tokens
_READY_S = 60.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the clients, and the processes that send and serve them.

    Attributes:
        streams: number of requests that run at the same time.
        rate: tokens a second over all streams.
        tokens: number of tokens of each answer.
        requests: number of requests in all.
        words: number of words of each prompt.
        clients: number of processes that share the streams.
        gateways: number of gateway processes that share the clients.
        seconds: time after which clients send no further request.
        gateway_cores: cores of the gateways. Empty if they may use all cores.
    """

    streams: int
    rate: float
    tokens: int
    requests: int
    words: int
    clients: int
    gateways: int
    seconds: float = math.inf
    gateway_cores: frozenset[int] = frozenset()

    @property
    def interval_s(self) -> float:
        """Between two ticks of the engine."""
        return self.streams / self.rate


@dataclass(frozen=True, slots=True)
class Link:
    """How gateways and decoder meet.

    Attributes:
        tls: directory of a certificate that has both names; None: plaintext.
        token: file; None: no token.
        unix: a socket instead of loopback.
    """

    tls: Path | None = None
    token: Path | None = None
    unix: bool = False

    def variables(self) -> dict[str, str]:
        """The gateways' settings."""
        found = {"GATEWAY_PEER_TLS_DIRECTORY": self.tls, "GATEWAY_PEER_TOKEN_FILE": self.token}
        return {name: str(value) for name, value in found.items() if value is not None}


Answer = tuple[int, Sample, list[float]]  # seed, what was seen, when each token came


def run_client(
    target: Target,
    load: Load,
    share: int,
    next_seed: "Synchronized[int]",
    barrier: Barrier,
    results: "Queue[tuple[list[Answer], float]]",
) -> None:
    """Entry point of a client process, with `share` streams of its own."""
    end = math.inf

    async def keep_one_in_flight(answers: list[Answer]) -> None:
        connection = TimedConnection(target)
        while True:
            with next_seed.get_lock():
                seed = next_seed.value
                next_seed.value += 1
            if seed > load.requests or time.monotonic() > end:
                connection.close()
                return
            connection.arrivals = []
            sample = await connection.post(_body(load, seed), _TIMEOUT_S)
            # A token is a letter.
            tokens = [now for now, text in connection.arrivals for _ in text]
            answers.append((seed, sample, tokens))

    async def run() -> None:
        answers: list[Answer] = []
        async with asyncio.TaskGroup() as tasks:
            for _ in range(share):
                tasks.create_task(keep_one_in_flight(answers))
        results.put((answers, time.process_time() - cpu_s))

    barrier.wait()
    end, cpu_s = time.monotonic() + load.seconds, time.process_time()
    uvloop.run(run())


def _body(load: Load, seed: int) -> bytes:
    text = " ".join(random.Random(seed).choices(WORDS, k=load.words))
    return json.dumps(
        {
            "model": "null", "messages": [{"role": "user", "content": text}], "seed": seed,
            "max_tokens": load.tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing listens on."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _token_id() -> int:
    vocabulary = json.loads((_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary[_LETTER]


def start_stack(
    load: Load,
    link: Link,
    log: Path,
    children: ExitStack,
    api_key: str = "",
    lines: int | None = None,
    **variables: str,
) -> tuple[Target, list[psutil.Process]]:
    """Starts decoder and gateways; returns once they answer.

    Args:
        load: what will come.
        link: between gateways and decoder.
        log: where the null engine writes when it sent each token.
        children: ends the processes.
        api_key: of the requests, if the gateways need one.
        lines: descriptor of the file for the gateways' log lines. Defaults to standard output.
        variables: further ones of the gateways' environment.

    Returns:
        Where to send requests; the decoder's front, its engine, and the gateways.
    """
    port, decoder_port, *own_ports = free_ports(2 + load.gateways)
    socket = f"unix:{log.with_name('decoder.sock')}"
    decoder_address = socket if link.unix else f"127.0.0.1:{decoder_port}"
    settings = null_engine.NullSettings(
        model=_MODEL, address=decoder_address, metrics_port=0, kv_cache_bytes=4 << 20,
        shutdown_grace_s=0, log_level="ERROR",
        interval_s=load.interval_s, token_id=_token_id(), log=log,
        peer_tls_directory=link.tls, peer_token_file=link.token,
    )  # fmt: skip

    def start(module: str, *arguments: str, **variables: str) -> psutil.Process:
        command = [sys.executable, "-m", module, *arguments]
        process = Popen(command, env=os.environ | variables, stdout=lines, stderr=lines)
        children.callback(process.wait)
        children.callback(process.terminate)
        return psutil.Process(process.pid)

    decoder = start("benchmarks.gateway", "--decoder", settings.model_dump_json())
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, load.gateway_cores or all_cores)
    gateways = [
        start(
            "services.gateway", "--shared-port", str(port),
            GATEWAY_MODEL=str(_MODEL), GATEWAY_SERVED_MODEL_NAME="null",
            GATEWAY_PORT=str(own_port),
            GATEWAY_METRICS_PORT="0",
            GATEWAY_ENCODER_ADDRESSES="127.0.0.1:1", GATEWAY_SHUTDOWN_GRACE_S="0",
            GATEWAY_DECODER_ADDRESSES=decoder_address,
            **({"GATEWAY_LOG_LEVEL": "ERROR"} | link.variables() | variables),
        )
        for own_port in own_ports
    ]  # fmt: skip
    os.sched_setaffinity(0, all_cores)
    for own_port in own_ports:
        asyncio.run(_wait_ready(own_port, api_key))
    (engine,) = (
        p for p in decoder.children() if "services.decoder.masks" not in " ".join(p.cmdline())
    )
    return Target.from_url(f"http://127.0.0.1:{port}", api_key), [decoder, engine, *gateways]


async def _wait_ready(port: int, api_key: str) -> None:
    target = Target.from_url(f"http://127.0.0.1:{port}", api_key)
    probe = Load(streams=1, rate=1, tokens=1, requests=1, words=1, clients=1, gateways=1)
    deadline = time.monotonic() + _READY_S
    connection = Connection(target)
    while (sample := await connection.post(_body(probe, 0), _TIMEOUT_S)).error:
        if time.monotonic() > deadline:
            raise SystemExit(f"the gateway is not ready: {sample.error}")
        await asyncio.sleep(0.1)
    connection.close()
    await asyncio.sleep(0)  # it ends in the loop's next pass


@dataclass(frozen=True, slots=True)
class Sent:
    """Answers of all clients, and seconds of CPU that they took.

    Attributes:
        answers: all answers.
        cpu_s: seconds of CPU of each process of the stack, in the order of `start_stack`.
        client_s: seconds of CPU of each client.
    """

    answers: list[Answer]
    cpu_s: list[float]
    client_s: list[float]

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        samples = [sample for _, sample, _ in self.answers]
        return max(s.end for s in samples) - min(s.start for s in samples)


def _send(target: Target, load: Load, processes: list[psutil.Process]) -> Sent:
    next_seed = _CONTEXT.Value("q", 1)
    barrier = _CONTEXT.Barrier(load.clients + 1)
    results: Queue[tuple[list[Answer], float]] = _CONTEXT.Queue()
    shares = [len(range(i, load.streams, load.clients)) for i in range(load.clients)]
    clients = [
        _CONTEXT.Process(
            target=run_client, args=(target, load, share, next_seed, barrier, results), daemon=True
        )
        for share in shares
    ]
    for client in clients:
        client.start()
    barrier.wait()
    before = [_cpu_s(process) for process in processes]
    found = [results.get() for _ in clients]
    cpu_s = [_cpu_s(process) - s for process, s in zip(processes, before, strict=True)]
    for client in clients:
        client.join()
    answers = [answer for each, _ in found for answer in each]
    failed = [sample.error for _, sample, _ in answers if sample.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return Sent(answers, cpu_s, [s for _, s in found])


def measure(load: Load, link: Link, api_key: str) -> None:
    """Prints the rows of one load; with a key, the gateways ask for it."""
    keys = {"GATEWAY_API_KEYS": api_key} if api_key else {}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory:
        log = Path(directory) / "sent.json"
        with ExitStack() as children:
            target, processes = start_stack(load, link, log, children, api_key, None, **keys)
            found = _send(target, load, processes)
        sent = {int(seed): times for seed, times in json.loads(log.read_text()).items()}
    answers, seconds = found.answers, found.seconds
    front_s, engine_s, *gateway_s = found.cpu_s
    late = sorted(
        arrived - left
        for seed, _, arrivals in answers
        for left, arrived in zip(sent[seed], arrivals, strict=True)
    )
    begins = [arrivals[0] - sample.start for _, sample, arrivals in answers]
    print(
        f"{load.rate:8,.0f} tokens/s asked, {len(late) / seconds:8,.0f} had"
        f" ({load.streams} streams, {load.words} words -> {load.tokens} tokens)\n"
        f"  a token's latency, ms: p50 {_ms(late, 0.5)}  p99 {_ms(late, 0.99)}"
        f"  most {_ms(late, 1)}\n"
        f"  first token after {1e3 * statistics.median(begins):.1f} ms (p50),"
        f" a tick is {1e3 * load.interval_s:.1f} ms\n"
        f"  CPU a token, µs: gateways {1e6 * sum(gateway_s) / len(late):.1f}"
        f" (the busiest {100 * max(gateway_s) / seconds:.0f} % of a core),"
        f" decoder's front {1e6 * front_s / len(late):.1f},"
        f" null engine {1e6 * engine_s / len(late):.1f}",
        flush=True,
    )


def measure_closed(load: Load, link: Link, rows: list[tuple[int, int]]) -> None:
    """Prints a row for each closed loop. All rows have one stack, which 200 requests warm up.

    Args:
        load: the load, but for the numbers of streams and tokens.
        link: the link between gateways and decoder.
        rows: the number of streams, and of tokens of an answer, of each loop.
    """
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory,
        ExitStack() as children,
    ):
        lines = children.enter_context((Path(directory) / "log").open("wb"))
        log = Path(directory) / "sent.json"
        target, processes = start_stack(
            load, link, log, children, lines=lines.fileno(), GATEWAY_LOG_LEVEL="INFO"
        )
        _send(target, replace(load, streams=32, tokens=8, requests=200, clients=1), processes)
        for streams, tokens in rows:
            found = _send(target, replace(load, streams=streams, tokens=tokens), processes)
            num, seconds = len(found.answers), found.seconds
            front_s, engine_s, *gateway_s = found.cpu_s
            begins = sorted(times[0] - sample.start for _, sample, times in found.answers)
            print(
                f"{streams:4} streams of {tokens} tokens: {num / seconds:6,.0f} requests/s,"
                f" first token p50 {_ms(begins, 0.5)}  p99 {_ms(begins, 0.99)} ms;"
                f" CPU a request, µs: gateways {1e6 * sum(gateway_s) / num:,.0f}"
                f" (the busiest {100 * max(gateway_s) / seconds:.0f} % of a core),"
                f" front {1e6 * front_s / num:,.0f}, null engine {1e6 * engine_s / num:,.0f},"
                f" clients {1e6 * sum(found.client_s) / num:,.0f}"
                f" (the busiest {100 * max(found.client_s) / seconds:.0f} %)",
                flush=True,
            )


def _ms(ordered: list[float], quantile: float) -> str:
    return f"{1e3 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]:.2f}"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def run_decoder(settings_json: str) -> int:
    """A decoder whose engine computes nothing."""
    settings = null_engine.NullSettings.model_validate_json(settings_json)
    credentials = Credentials.from_settings(settings)
    decoder = replace(DECODER, engine_module=null_engine.__name__)
    return uvloop.run(serve(decoder, settings, 1 << 20, credentials))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", default="10000,20000,30000", help="tokens a second over all streams")
    add("--streams", type=int, default=256)
    add("--seconds", type=float, default=10, help="of each measurement")
    add("--tokens", type=int, default=0, help="of an answer; 0: the stream's share of the time")
    add("--words", type=int, default=8, help="of a prompt")
    add("--clients", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="processes")
    add("--gateways", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="processes")
    add("--tls", type=Path, default=None, metavar="DIR", help="a certificate of both services")
    add("--token", type=Path, default=None, metavar="FILE", help="a token of both services")
    add("--unix", action="store_true", help="a Unix socket between the services")
    add("--api-key", default="", metavar="KEY", help="of all requests; the gateways ask for it")
    add("--closed", default="", metavar="ROWS", help="closed loops, as 32x8: streams x tokens")
    add("--tick", type=float, default=2, help="milliseconds of the engine's tick (--closed)")
    add("--gateway-cores", default="", metavar="LIST", help="cores of the gateways, as 0,1")
    add("--decoder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.decoder:
        return run_decoder(options.decoder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    link = Link(options.tls, options.token, options.unix)
    cores = frozenset(int(core) for core in options.gateway_cores.split(",") if core)
    if options.closed:
        rows = [tuple(map(int, row.split("x"))) for row in options.closed.split(",")]
        load = Load(
            1, 1e3 / options.tick, 1, sys.maxsize, options.words, options.clients,
            options.gateways, options.seconds, cores,
        )  # fmt: skip
        measure_closed(load, link, [(streams, tokens) for streams, tokens in rows])
        return 0
    for rate in map(float, options.rates.split(",")):
        total = rate * options.seconds
        tokens = options.tokens or max(1, round(total / options.streams))
        requests = options.streams * max(1, round(total / tokens / options.streams))
        load = Load(
            options.streams, rate, tokens, requests, options.words, options.clients,
            options.gateways, gateway_cores=cores,
        )  # fmt: skip
        measure(load, link, options.api_key)
    return 0


if __name__ == "__main__":
    sys.exit(main())
