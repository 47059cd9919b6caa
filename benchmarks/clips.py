"""Questions about video clips: time to the first token with its stages, and clips per second.

    python -m benchmarks.clips --url http://127.0.0.1:8000 --seconds 10,60 --concurrency 1,8,32

Each clip is another one, 720p at 30 frames a second (H.264, made by PyAV before the clock starts),
so nothing is cached; then the same clips are asked about again. With `--frames` two frames a second
are sent as JPEGs instead, which needs no PyAV here nor there. Answers have one token, so the whole
time is that of the first token.
"""

import argparse
import base64
import io
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

_SIZE, _RATE = (720, 1280), 30
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Row:
    """What a number of clips at a time showed."""

    label: str
    wall_s: float = 0.0
    first_ms: list[float] = field(default_factory=list[float])
    stages: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    tokens: int = 0

    def __str__(self) -> str:
        ordered = sorted(self.first_ms)
        stages = ", ".join(
            f"{name} {statistics.median(stage.get(name, 0.0) for stage in self.stages):.1f}"
            for name in self.stages[0]
        )
        return (
            f"{self.label}: {self.tokens} tokens, TTFT p50 {statistics.median(ordered):.0f} ms, "
            f"max {ordered[-1]:.0f}, {len(ordered) / self.wall_s:.2f} clips/s; stages: {stages}"
        )


def picture(clip: int, at_s: float) -> np.ndarray:
    """RGB of a clip at a time: bands that move, in colours of the clip's own."""
    height, width = _SIZE
    rows = np.arange(height, dtype=np.float32)[:, None, None]
    columns = np.arange(width, dtype=np.float32)[None, :, None]
    phase = np.arange(3) * (1.0 + clip % 97 / 50) + clip
    wave = np.sin(columns / 90 + rows / 140 + 2 * at_s + phase)
    return (127.5 + 127.5 * wave).astype(np.uint8)


def frames_part(clip: int, seconds: int) -> dict[str, Any]:
    """A part with JPEGs, two a second."""
    files: list[str] = []
    for number in range(2 * seconds):
        file = io.BytesIO()
        Image.fromarray(picture(clip, number / 2)).save(file, "JPEG", quality=85)
        files.append(base64.b64encode(file.getvalue()).decode())
    url = "data:video/jpeg;base64," + ",".join(files)
    return {"type": "video_url", "video_url": {"url": url, "fps": 2}}


def file_part(clip: int, seconds: int) -> dict[str, Any]:
    """A part with an MP4. Eight pictures a second, so that making it takes less than showing it."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_RATE, options={"preset": "ultrafast"})
        stream.height, stream.width = _SIZE
        stream.pix_fmt = "yuv420p"
        frame = None
        for number in range(_RATE * seconds):
            if number % 4 == 0:
                frame = av.VideoFrame.from_ndarray(picture(clip, number / _RATE), format="rgb24")
            assert frame is not None
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    url = "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def ask(url: str, part: dict[str, Any]) -> tuple[float, dict[str, float], int]:
    """Milliseconds of one question, its stages, and the prompt's tokens."""
    body = json.dumps({
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}],
        "max_tokens": 1, "include_stage_times": True,
    }).encode()  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        answer = json.load(response)
    taken_ms = 1000 * (time.monotonic() - start)
    return taken_ms, answer["stage_times_ms"], answer["usage"]["prompt_tokens"]


def measure(url: str, label: str, parts: Sequence[dict[str, Any]], concurrency: int) -> Row:
    """Asks about each part once, so many at a time."""
    row = Row(label)
    start = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        for taken_ms, stages, row.tokens in threads.map(lambda part: ask(url, part), parts):
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
    parser.add_argument("--frames", action="store_true", help="send JPEGs instead of a file")
    arguments = parser.parse_args()
    make: Callable[[int, int], dict[str, Any]] = frames_part if arguments.frames else file_part
    ask(arguments.url, make(0, 2))  # starts the processes that decode
    made = 1
    for seconds in map(int, arguments.seconds.split(",")):
        for concurrency in map(int, arguments.concurrency.split(",")):
            count = max(3, arguments.rounds * concurrency)
            with ThreadPoolExecutor() as threads:
                parts = list(threads.map(make, range(made, made + count), [seconds] * count))
            made += count
            label = f"{seconds} s, {concurrency} at a time"
            print(measure(arguments.url, label, parts, concurrency), flush=True)
            print(measure(arguments.url, f"{label}, again", parts, concurrency), flush=True)


if __name__ == "__main__":
    main()
