"""One new clip, or several new images, over one encoder and over two: encode and first token.

    python -m benchmarks.two_encoders --model DIR --seconds 60 --height 1080 --rounds 5 \
        --keep CLIPS --out two_encoders.json --device cuda --load-format dummy

The script starts `triptych serve` with two encoders, which unknown options go to, pins each encoder
to its own cores and everything else to the cores that are left, as pods with requests for CPUs have
them, and starts a second gateway that knows the first encoder alone. It then asks both
gateways in turn, in each round in the other order, and prints the medians with one encoder and with
two, and their ratio. On one card, export ENCODER_MEMORY_FRACTION and DECODER_MEMORY_FRACTION so
that all three fit (0.12 and 0.5 for a 2B on an H200).

A clip is H.264 at 30 frames a second, made before the server starts. `g250` and `g60` are files
with x264's defaults and a key frame each 250 or 60 frames; `u250` has the preset `ultrafast`, which
has no B-frames. Each question gets a copy with a note of its own in each key frame, so that the
pixels are equal and no cache knows the clip.

Nothing else may run on these cores, neither other tests nor the unpacking of files: a clip is as
late as its slowest lane, and another process on one core delays that lane. Look at the single times
before the medians.
"""

import argparse
import base64
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.client import Target
from benchmarks.clips import ask, mp4
from benchmarks.startup import serving
from benchmarks.worker import model_name
from benchmarks.workloads import data_url, random_image
from triptych.ports import Ports

_HOST = "127.0.0.1"
_PRESETS = {"g": "medium", "u": "ultrafast"}
_WARM_UPS = 2
_READY_TIMEOUT_S = 60.0
_NOTE_ID = b"triptych-measure"  # the 16 bytes that tell whose user data an SEI message has


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's times.

    Attributes:
        kind: kind of the clip, or `images`.
        encoders: number of encoders that the gateway knows.
        ttft_ms: milliseconds to the first token.
        encode_ms: milliseconds of the stage "encode".
        tokens: number of tokens of the prompt.
        cpu_s: CPU seconds of each encoder with its processes, the first encoder first.
    """

    kind: str
    encoders: int
    ttft_ms: float
    encode_ms: float
    tokens: int
    cpu_s: list[float]

    def __str__(self) -> str:
        used = ", ".join(f"{seconds:.2f}" for seconds in self.cpu_s)
        return (
            f"{self.kind}, encoders {self.encoders}: encode {self.encode_ms:.0f} ms, "
            f"TTFT {self.ttft_ms:.0f} ms, {self.tokens} tokens, CPU of the encoders {used} s"
        )


def base_clip(kind: str, seconds: int, height: int, keep: Path | None) -> bytes:
    """Makes a clip of a kind such as `g250`, or reads it from the directory `keep`."""
    path = keep / f"{kind}-{seconds}-{height}.mp4" if keep else None
    if path is not None and path.exists():
        return path.read_bytes()
    distance = kind[1:]
    options = {"preset": _PRESETS[kind[0]], "g": distance, "keyint_min": distance}
    found = mp4(1, seconds, height, options | {"sc_threshold": "0"}, num_threads=0)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found)
    return found


def noted(clip: bytes, number: int) -> bytes:
    """Returns the clip with a note in each key frame: other digests and the same pixels.

    The note is an SEI message of user data (H.264, Annex D), in a NAL unit behind its length, as
    MP4 has it.
    """
    import av

    text = b"clip %08d of the measurement" % number
    unit = b"\x06\x05" + bytes([len(_NOTE_ID) + len(text)]) + _NOTE_ID + text + b"\x80"
    note, file = len(unit).to_bytes(4, "big") + unit, io.BytesIO()
    with av.open(io.BytesIO(clip), "r") as source, av.open(file, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is None:
                continue
            if packet.is_keyframe:
                longer = av.Packet(note + bytes(packet))
                longer.pts, longer.dts = packet.pts, packet.dts
                longer.time_base, longer.duration = packet.time_base, packet.duration
                longer.is_keyframe = True
                packet = longer
            packet.stream = copy
            target.mux(packet)
    return file.getvalue()


def clip_questions(clip: bytes, first: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the parts of questions, each about another copy of the clip.

    Args:
        clip: the clip.
        first: number of the first copy.
    """
    for number in itertools.count(first):
        url = "data:video/mp4;base64," + base64.b64encode(noted(clip, number)).decode()
        yield [{"type": "video_url", "video_url": {"url": url}}]


def image_questions(count: int, edge: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the parts of questions, each about so many new images."""
    rng = np.random.default_rng(1)
    while True:
        urls = [data_url(random_image(rng, edge)) for _ in range(count)]
        yield [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def services(module: str) -> list[psutil.Process]:
    """Returns the processes of a module that this process or its children started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if module in child.cmdline()]


def family(process: psutil.Process) -> list[psutil.Process]:
    """Returns a process and its children, with their children."""
    return [process, *process.children(recursive=True)]


def pin(process: psutil.Process, cores: Sequence[int]) -> None:
    """Pins all threads of a process and its children, and what they start later."""
    for member in family(process):
        for thread in member.threads():
            os.sched_setaffinity(thread.id, cores)


def cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and its children."""
    times = [member.cpu_times() for member in family(process)]
    return sum(time.user + time.system for time in times)


@contextmanager
def gateway_beside(gateway: psutil.Process, encoder_address: str) -> Iterator[str]:
    """Runs a gateway as another one, which knows one encoder alone. Yields its URL."""
    ports = Ports()
    port, metrics_port = (str(ports.claim(_HOST, 0)) for _ in range(2))
    ports.close()
    variables = {
        "GATEWAY_ENCODER_ADDRESSES": encoder_address,
        "GATEWAY_PORT": port,
        "GATEWAY_METRICS_PORT": metrics_port,
    }
    process = subprocess.Popen(
        gateway.cmdline(), env=gateway.environ() | variables, cwd=gateway.cwd()
    )
    try:
        target, end = Target.from_url(f"http://{_HOST}:{port}"), time.monotonic() + _READY_TIMEOUT_S
        while True:
            try:
                model_name(target)
                break
            except ConnectionError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        yield f"http://{_HOST}:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def measure(
    urls: Mapping[int, str],
    encoders: Sequence[psutil.Process],
    questions: Mapping[str, Sequence[list[dict[str, Any]]]],
) -> Iterator[Answer]:
    """Asks the gateways in turn, and yields the answers that count.

    Args:
        urls: URL of each gateway by the number of encoders that it knows.
        encoders: the fronts of the encoders.
        questions: parts of the questions of each kind, first those that warm up.
    """
    model = model_name(Target.from_url(urls[1]))
    left = {kind: iter(parts) for kind, parts in questions.items()}
    num_rounds = min(map(len, questions.values())) // len(urls) - _WARM_UPS
    order = sorted(urls)
    for number in range(-_WARM_UPS, num_rounds):
        for kind, parts in left.items():
            for count in order:
                before = [cpu_s(encoder) for encoder in encoders]
                ttft_ms, stages, tokens = ask(urls[count], model, *next(parts))
                used = [
                    round(cpu_s(encoder) - old, 2)
                    for encoder, old in zip(encoders, before, strict=True)
                ]
                if number >= 0:
                    encode_ms = stages.get("encode", 0.0)
                    yield Answer(kind, count, ttft_ms, encode_ms, tokens, used)
        order.reverse()


def report(answers: Sequence[Answer], kind: str) -> str:
    """Returns the lines of a kind: the medians, their ratio, and all times in their order."""
    lines: list[str] = []
    for name, field in (("encode", "encode_ms"), ("TTFT", "ttft_ms")):
        found = [
            [getattr(a, field) for a in answers if (a.kind, a.encoders) == (kind, count)]
            for count in (1, 2)
        ]
        one, two = map(statistics.median, found)
        times = [", ".join(f"{ms:.0f}" for ms in each) for each in found]
        lines.append(
            f"{kind} {name}, ms: one encoder {one:.0f} ({times[0]}), two {two:.0f} ({times[1]}), "
            f"ratio {two / one:.2f}"
        )
    return "\n".join(lines)


def cores_of(num_encoders: int, wanted: int | None) -> list[list[int]]:
    """Returns the cores of each encoder, and then those of everything else. They are logical ones,
    those of a physical core side by side.

    Args:
        num_encoders: number of encoders.
        wanted: cores of each. None for an equal part of three quarters of this machine's.

    Raises:
        ValueError: the machine has too few cores.
    """
    found = sorted(os.sched_getaffinity(0), key=lambda core: (_physical_core(core), core))
    size = wanted or 3 * len(found) // (8 * num_encoders) * 2  # whole physical cores of two
    rest = found[num_encoders * size :]
    if not size or not rest:
        raise ValueError(
            f"--cores: this machine has {len(found)} cores for {num_encoders} encoders and the rest"
        )
    return [found[i * size : (i + 1) * size] for i in range(num_encoders)] + [rest]


def _physical_core(core: int) -> int:
    """Returns the first logical core of a core's physical one, or the core if it is not known."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(re.split("[,-]", path.read_text())[0])
    except (OSError, ValueError):
        return core


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; other options go to `triptych serve`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory of a checkpoint")
    add("--seconds", type=int, default=60, help="length of a clip")
    add("--height", type=int, default=1080, help="of a clip in pixels; even")
    add("--kinds", default="g250,g60,u250", help="preset and distance of key frames of clips")
    add("--images", type=int, default=16, help="images of a question; 0: none are asked about")
    add("--edge", type=int, default=1024, help="width and height of an image in pixels")
    add("--rounds", type=int, default=5, help="questions of each kind with one and with two")
    add("--cores", type=int, help="of each encoder; default: three eighths of this machine's; 0: "
        "all processes share all cores, to try the script on a small machine")  # fmt: skip
    add("--keep", type=Path, metavar="DIR", help="of clips, for another run")
    add("--out", type=Path, help="JSON file with all answers")
    options, rest = parser.parse_known_args(arguments)
    kinds = options.kinds.split(",")
    if wrong := [kind for kind in kinds if kind[0] not in _PRESETS or not kind[1:].isdecimal()]:
        parser.error(f"--kinds: {wrong[0]} is not a kind such as g250 or u60")
    try:
        cores = [] if options.cores == 0 else cores_of(2, options.cores)
    except ValueError as error:
        parser.error(str(error))
    asked = 2 * (options.rounds + _WARM_UPS)
    questions: dict[str, list[list[dict[str, Any]]]] = {}
    for number, kind in enumerate(kinds):
        clip = base_clip(kind, options.seconds, options.height, options.keep)
        made = clip_questions(clip, number * asked)
        questions[kind] = list(itertools.islice(made, asked))
        print(f"{kind}: {len(clip) / 1e6:.1f} MB", flush=True)
    if options.images:
        made = image_questions(options.images, options.edge)
        questions["images"] = list(itertools.islice(made, asked))
    answers: list[Answer] = []
    command = ["--encoders", "2", "--gateways", "1", *rest]
    num_threads = str(len(cores[0]) if cores else 1)
    with serving(options.model, command, None, OMP_NUM_THREADS=num_threads) as (url, _):
        (gateway,) = services("services.gateway")
        found = {p.environ()["ENCODER_ADDRESS"]: p for p in services("services.encoder")}
        encoders = dict(sorted(found.items()))
        if cores:
            pin(psutil.Process(), cores[-1])  # with its children, and all that they start later
            for process, own in zip(encoders.values(), cores[:-1], strict=True):
                pin(process, own)
        with gateway_beside(gateway, next(iter(encoders))) as one:
            for answer in measure({1: one, 2: url}, list(encoders.values()), questions):
                answers.append(answer)
                print(answer, flush=True)
                if options.out:
                    options.out.write_text(json.dumps([asdict(a) for a in answers], indent=1))
    for kind in questions:
        print(report(answers, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
