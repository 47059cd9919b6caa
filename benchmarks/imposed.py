"""Milliseconds a token through HTTP, with drafts that are right with a stated probability.

    python -m benchmarks.imposed --shape 27b --speculation mtp --rate 0.853 --streams 1,16

A gateway and a decoder of random weights in a shape of `mtp_shapes` serve streaming chats. Only the
engine process differs from `triptych serve`, see `imposed_engine`: the model computes each step,
and answers and drafts are imposed. With `--speculation off`, answers are imposed alone.

Two kinds of first tokens are told apart. In the *steady* part of a row, each stream sends a request
when it has the answer to the last one. The first answers have different lengths, so that the
streams do not begin together later, and they do not count. In a *burst* all streams send a request
at once, and nothing else runs. The median of both together would say little: it lies between them.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple
from urllib.request import urlopen

import uvloop

from benchmarks import imposed_engine
from benchmarks.client import Connection, Sample, Target
from benchmarks.gateway import free_ports
from benchmarks.mtp_shapes import write_shape
from benchmarks.serve import run_row
from benchmarks.workloads import WORDS, Row, chat_body, request_bodies
from services.common.process.service_process import serve
from services.common.security.credentials import Credentials
from services.decoder.__main__ import DECODER

_TOKENIZER = Path(__file__).resolve().parents[1] / "demo" / "model"
_FILES = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SHORT = 8  # tokens of an answer of a burst, and of the warm-up
_COUNTERS = "draft_verifications", "drafted_tokens", "accepted_drafts"


def _write_model(shape: str, directory: Path) -> Path:
    """Writes a shape's configuration with the demonstration model's tokenizer and its end."""
    model = write_shape(shape, directory / shape)
    for name in _FILES:
        shutil.copy(_TOKENIZER / name, model / name)
    config = json.loads((model / "config.json").read_text())
    own = json.loads((_TOKENIZER / "generation_config.json").read_text())
    config["eos_token_id"] = own["eos_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    return model


def _token_ids() -> list[int]:
    """Returns tokens of one letter, so that each is a piece of text of its own."""
    vocabulary = json.loads((_TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[chr(code)] for code in range(ord("a"), ord("z") + 1)]


def start_stack(options: argparse.Namespace, directory: Path, children: ExitStack) -> list[int]:
    """Starts a decoder and a gateway.

    Args:
        options: the command line.
        directory: directory for the model.
        children: ends the processes.

    Returns:
        Ports of the gateway and of the decoder's metrics.
    """
    model = _write_model(options.shape, directory)
    port, decoder_port, decoder_metrics = free_ports(3)
    address = f"127.0.0.1:{decoder_port}"
    settings = imposed_engine.ImposedSettings(
        model=model, address=address, metrics_port=decoder_metrics, load_format="dummy",
        shutdown_grace_s=0, log_level="INFO", rate=options.rate,
        token_ids=json.dumps(_token_ids()), max_num_sequences=options.max_num_seqs,
        max_model_len=options.max_model_len, kv_cache_bytes=int(options.kv_gib * (1 << 30)),
        speculation=options.speculation, speculation_tokens=options.drafts,
    )  # fmt: skip

    def start(module: str, *arguments: str, **variables: str) -> None:
        environment = [f"{name}={value}" for name, value in variables.items()]
        command = ["env", *environment, sys.executable, "-m", module, *arguments]
        process = Popen(command, stdout=options.log, stderr=options.log)
        children.callback(process.wait)
        children.callback(process.terminate)

    start("benchmarks.imposed", "--decoder", settings.model_dump_json())
    start(
        "services.gateway", GATEWAY_MODEL=str(model), GATEWAY_SERVED_MODEL_NAME="imposed",
        GATEWAY_PORT=str(port), GATEWAY_METRICS_PORT="0", GATEWAY_ENCODER_ADDRESSES="127.0.0.1:1",
        GATEWAY_SHUTDOWN_GRACE_S="0", GATEWAY_DECODER_ADDRESSES=address, GATEWAY_LOG_LEVEL="ERROR",
    )  # fmt: skip
    return [port, decoder_metrics]


async def wait_ready(target: Target, seconds: float) -> None:
    """Waits until an answer comes.

    Raises:
        SystemExit: there was none in so many seconds.
    """
    row = Row("probe", 1, 1, 1, 1)
    deadline = time.monotonic() + seconds
    while True:
        connection = Connection(target)
        body = next(iter(request_bodies(row, "imposed", 0, WORDS)))
        error = (await connection.post(body, seconds)).error
        connection.close()
        await asyncio.sleep(0.2)
        if not error:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the server is not ready: {error}")


def counters(port: int) -> list[float]:
    """Reads the totals of drafts from the decoder's metrics."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = [f"triptych_decoder_{name}_total" for name in _COUNTERS]
    return [sum(float(x.split()[-1]) for x in lines if x.split(" ")[0] == n) for n in names]


def staggered(tokens: int, streams: int) -> list[int]:
    """Returns the tokens of each stream's first answer, after which the streams' requests begin at
    different times.
    """
    return [max(1, -(-tokens * (1 + place) // streams)) for place in range(streams)]


class Steady(NamedTuple):
    """The steady part of a row.

    Attributes:
        waits_ms: milliseconds to the first token of each request, ascending.
        gaps_ms: milliseconds a token of each request.
        tokens_s: tokens a second while all streams had a request.
    """

    waits_ms: list[float]
    gaps_ms: list[float]
    tokens_s: float


def steady(samples: Sequence[Sample], streams: int) -> Steady:
    """Returns the figures of a closed loop without its first requests, one for each stream.

    Args:
        samples: the requests, at least two for each stream.
        streams: number of streams.
    """
    ordered = sorted(samples, key=lambda sample: sample.start)
    part = ordered[streams:]
    start, end = part[0].start, part[-1].start  # until then every stream had a request
    tokens = 0.0
    for sample in ordered:
        lasted = max(1e-9, sample.last - sample.first)
        inside = max(0.0, min(sample.last, end) - max(sample.first, start))
        tokens += sample.completion_tokens * inside / lasted
    return Steady(
        sorted(1e3 * (sample.first - sample.start) for sample in part),
        [1e3 * (s.last - s.first) / max(1, s.completion_tokens - 1) for s in part],
        tokens / max(1e-9, end - start),
    )


def _body(options: argparse.Namespace, *seed: int, tokens: int = _SHORT) -> bytes:
    text = " ".join(random.Random(repr(seed)).choices(WORDS, k=options.words))
    return chat_body("imposed", text, tokens)


def _closed_loop(options: argparse.Namespace, target: Target, streams: int) -> list[Sample]:
    """Runs a warm-up of short answers, the first answers of all streams, and the steady part."""
    waves = options.waves if streams > 1 else min(2, options.waves)
    row = Row(f"c{streams}", streams, streams * (1 + waves), options.words, options.tokens)
    first = [_SHORT] * row.num_warmup + staggered(options.tokens, streams)
    counts = first + [options.tokens] * (row.num_requests - streams)
    bodies = [_body(options, streams, i, tokens=count) for i, count in enumerate(counts)]
    samples, _ = run_row(row, target, bodies, options.patience)
    return _checked(samples)


async def _burst(target: Target, bodies: Sequence[bytes], timeout_s: float) -> list[float]:
    """Sends requests at once, and returns their milliseconds to the first token, ascending."""
    connections = [Connection(target) for _ in bodies]
    samples = await asyncio.gather(
        *(each.post(body, timeout_s) for each, body in zip(connections, bodies, strict=True))
    )
    for connection in connections:
        connection.close()
    return sorted(1e3 * (sample.first - sample.start) for sample in _checked(samples))


def _checked(samples: list[Sample]) -> list[Sample]:
    if errors := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"{len(errors)} of {len(samples)} requests failed: {errors[0]}")
    return samples


def measure(options: argparse.Namespace) -> None:
    """Prints a row for each number of streams, and one for its bursts."""
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory,
        ExitStack() as children,
    ):
        port, metrics = start_stack(options, Path(directory), children)
        target = Target.from_url(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        asyncio.run(wait_ready(target, options.patience))
        print(f"{options.shape} ready after {time.monotonic() - began:.0f} s", flush=True)
        for streams in options.streams:
            label = f"{options.shape} {options.speculation} {options.rate:g}, {streams:3} streams"
            before = counters(metrics)
            found = steady(_closed_loop(options, target, streams), streams)
            chunks, drafts, accepted = (
                after - start for after, start in zip(counters(metrics), before, strict=True)
            )
            print(
                f"{label}: {statistics.median(found.gaps_ms):7.3f} ms a token, first token "
                f"{_quantile(found.waits_ms, 0.5):7.1f} ms (p90"
                f" {_quantile(found.waits_ms, 0.9):7.1f} of {len(found.waits_ms)}), "
                f"{found.tokens_s:7.0f} tokens a second, {drafts:6.0f} drafts, "
                f"{1 + accepted / max(1, chunks):4.2f} tokens a verification",
                flush=True,
            )
            if streams == 1 or not options.bursts:
                continue
            medians, lasts = list[float](), list[float]()
            for number in range(options.bursts):
                bodies = [_body(options, streams, number, i) for i in range(streams)]
                waits = asyncio.run(_burst(target, bodies, options.patience))
                medians.append(_quantile(waits, 0.5))
                lasts.append(waits[-1])
            print(
                f"{label}, {options.bursts} bursts: first token p50"
                f" {statistics.median(medians):7.1f} ms, the last {statistics.median(lasts):7.1f}"
                f" ms (medians; p50 from {min(medians):.1f} to {max(medians):.1f})",
                flush=True,
            )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_decoder(settings_json: str) -> int:
    """Runs the decoder's front."""
    settings = imposed_engine.ImposedSettings.model_validate_json(settings_json)
    decoder = replace(DECODER, engine_module=imposed_engine.__name__)
    return uvloop.run(serve(decoder, settings, 1 << 20, Credentials.from_settings(settings)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--shape", default="27b", help="a shape of mtp_shapes, with -fp8 behind it for FP8")
    add("--speculation", default="mtp", choices=("off", "lookup", "mtp"))
    add("--rate", type=float, default=0.853, help="probability that a draft is right")
    add("--drafts", type=int, default=3, help="most drafts of a step")
    add("--streams", default="1", type=lambda text: [int(n) for n in text.split(",")])
    add("--words", type=int, default=64, help="words of a prompt")
    add("--tokens", type=int, default=160, help="tokens of an answer")
    add("--waves", type=int, default=10, help="requests of each stream that count")
    add("--bursts", type=int, default=5, help="bursts of requests that begin together")
    add("--max-num-seqs", type=int, default=64)
    add("--max-model-len", type=int, default=1024, help="shorter contexts start sooner")
    add("--kv-gib", type=float, default=2.0)
    add("--patience", type=float, default=300, help="seconds until an answer has to come")
    add("--log", type=argparse.FileType("w"), default=None, help="file of the services' log lines")
    add("--decoder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.decoder:
        return run_decoder(options.decoder)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
