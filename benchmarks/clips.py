"""Questions about video clips: time to the first token with its stages, and clips per second.

    python -m benchmarks.clips --url http://127.0.0.1:8000 --seconds 10,60 --concurrency 1,8,32

Each clip is another one, `--height` pixels high at 30 frames a second (H.264, made by PyAV before
the clock starts), so nothing is cached; then the same clips are asked about again. With `--frames`
two frames a second are sent as JPEGs instead, which needs no PyAV here nor there. Answers have one
token, so the whole time is that of the first token. Of another server's requests there are no
stages; `--keep` has it asked about the same files.
"""

import argparse
import base64
import io
import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.client import Target
from benchmarks.worker import model_name

_RATE = 30  # frames a second
_TIMEOUT_S = 300.0
_CIRCLE = 1024  # steps of a wave


@dataclass(slots=True)
class Row:
    """What a number of clips at a time showed."""

    label: str
    wall_s: float = 0.0
    first_ms: list[float] = field(default_factory=list[float])
    stages: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    tokens: int = 0
    refused: int = 0

    def __str__(self) -> str:
        ordered = sorted(self.first_ms)
        stages = ", ".join(
            f"{name} {statistics.median(stage.get(name, 0.0) for stage in self.stages):.1f}"
            for name in (self.stages or [{}])[0]
        )
        return (
            f"{self.label}: {self.tokens} tokens, TTFT p50 {statistics.median(ordered):.0f} ms, "
            f"max {ordered[-1]:.0f}, {len(ordered) / self.wall_s:.2f} clips/s, "
            f"{self.refused} refused; stages: {stages}"
        )


def picture(clip: int, at_s: float, height: int) -> np.ndarray:
    """RGB of a clip at a time, 16 to 9: bands that move, in colours of the clip's own."""
    rgb = np.empty((height, _width(height), 3), np.uint8)
    for channel in range(3):
        phase = channel * (1.0 + clip % 97 / 50) + clip + 2 * at_s
        shift = int(phase / (2 * np.pi) * _CIRCLE)
        rgb[:, :, channel] = _wave()[(_places(height) + shift) % _CIRCLE]
    return rgb


def _width(height: int) -> int:
    return height * 16 // 9 // 2 * 2  # even, as H.264 needs it


@cache
def _places(height: int) -> np.ndarray:
    """Of each pixel in the wave."""
    rows, columns = np.ogrid[:height, : _width(height)]
    return ((columns / 90 + rows / 140) / (2 * np.pi) * _CIRCLE).astype(np.int32)


@cache
def _wave() -> np.ndarray:
    angles = np.arange(_CIRCLE) / _CIRCLE * 2 * np.pi
    return (127.5 + 127.5 * np.sin(angles)).astype(np.uint8)


def frames_part(clip: int, seconds: int, height: int, keep: Path | None = None) -> dict[str, Any]:
    """A part with JPEGs, two a second; none is kept."""
    del keep
    files: list[str] = []
    for number in range(2 * seconds):
        file = io.BytesIO()
        Image.fromarray(picture(clip, number / 2, height)).save(file, "JPEG", quality=85)
        files.append(base64.b64encode(file.getvalue()).decode())
    url = "data:video/jpeg;base64," + ",".join(files)
    return {"type": "video_url", "video_url": {"url": url, "fps": 2}}


def file_part(clip: int, seconds: int, height: int, keep: Path | None = None) -> dict[str, Any]:
    """A part with an MP4, of a file in `keep` if it is there."""
    path = keep / f"{clip}-{seconds}-{height}.mp4" if keep else None
    if path is not None and path.exists():
        content = path.read_bytes()
    else:
        content = mp4(clip, seconds, height)
        if path is not None:
            path.write_bytes(content)
    url = "data:video/mp4;base64," + base64.b64encode(content).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def mp4(
    clip: int,
    seconds: int,
    height: int,
    options: Mapping[str, str] = MappingProxyType({"preset": "ultrafast"}),
    num_threads: int = 1,
) -> bytes:
    """Makes a clip's file. Its pictures change eight times a second, so that making it takes less
    time than showing it.

    Args:
        clip: number of the clip, by which its pictures differ from those of others.
        seconds: length of the clip.
        height: height of the clip in pixels.
        options: options of x264.
        num_threads: threads of x264. 0 if it chooses.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_RATE, options=dict(options))
        stream.height, stream.width = height, _width(height)
        stream.pix_fmt = "yuv420p"
        stream.thread_count = num_threads
        frame = None
        for number in range(_RATE * seconds):
            if number % 4 == 0:
                rgb = picture(clip, number / _RATE, height)
                frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            assert frame is not None
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def ask(url: str, model: str, *parts: dict[str, Any]) -> tuple[float, dict[str, float], int]:
    """Milliseconds of one question, its stages (of our answers), and the prompt's tokens."""
    content = [*parts, {"type": "text", "text": "What moves?"}]
    body = json.dumps({
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1, "include_stage_times": True,
    }).encode()  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        answer = json.load(response)
    taken_ms = 1000 * (time.monotonic() - start)
    return taken_ms, answer.get("stage_times_ms", {}), answer["usage"]["prompt_tokens"]


def measure(
    url: str, model: str, label: str, parts: Sequence[dict[str, Any]], concurrency: int
) -> Row:
    """Asks about each part once, so many at a time."""
    row = Row(label)
    start = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        for asked in [threads.submit(ask, url, model, part) for part in parts]:
            try:
                taken_ms, stages, row.tokens = asked.result()
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                row.refused += 1
                continue
            row.first_ms.append(taken_ms)
            row.stages.append(stages)
    row.wall_s = time.monotonic() - start
    return row


def main() -> None:
    """Prints a line for each row, and those of the second question about the same clips."""
    parser = argparse.ArgumentParser(description="Questions about video clips.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", default="10,60", help="lengths of clips")
    parser.add_argument("--concurrency", default="1,8,32", help="clips at a time")
    parser.add_argument("--rounds", type=int, default=2, help="clips of each row, by concurrency")
    parser.add_argument("--height", type=int, default=720, help="of a clip in pixels; even")
    parser.add_argument("--frames", action="store_true", help="send JPEGs instead of a file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="of files, for another server")
    arguments = parser.parse_args()
    make: Callable[..., dict[str, Any]] = frames_part if arguments.frames else file_part
    url, height, made = arguments.url, arguments.height, 1
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    model = model_name(Target.from_url(url))
    ask(url, model, make(0, 2, height))  # starts the processes that decode
    for seconds in map(int, arguments.seconds.split(",")):
        for concurrency in map(int, arguments.concurrency.split(",")):
            count = max(3, arguments.rounds * concurrency)
            numbers = range(made, made + count)
            with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
                keep = [arguments.keep] * count
                heights = [height] * count
                parts = list(pool.map(make, numbers, [seconds] * count, heights, keep))
            made += count
            label = f"{seconds} s, {concurrency} at a time"
            print(measure(url, model, label, parts, concurrency), flush=True)
            print(measure(url, model, f"{label}, again", parts, concurrency), flush=True)


if __name__ == "__main__":
    main()
