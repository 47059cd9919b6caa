"""Held-out accuracy, under HF transformers or through a running server, and their comparison.

With `--clips`, of the held-out clips in place of the images.

python -m demo.evaluate --hf demo/model --dtype float32 --out hf.json
python -m demo.evaluate --url http://127.0.0.1:8000 --out stack.json
python -m demo.evaluate --compare hf.json stack.json
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo.clip_questions import CLIP_TASKS
from demo.clips import Clip, mp4_bytes
from demo.heldout import NUM_CLIPS, NUM_SCENES, TASKS, Item, held_out, held_out_clips, is_right

MAX_TOKENS = 96
ALL_TASKS = (*TASKS, *CLIP_TASKS)
Question = tuple[Sequence[bytes | Clip], str]
Answerer = Callable[[Sequence[Question]], Iterable[str]]


def _part(shown: bytes | Clip) -> dict[str, object]:
    """The content part of a PNG image, or of a clip as an mp4 file."""
    kind, data = ("video", mp4_bytes(shown)) if isinstance(shown, Clip) else ("image", shown)
    media_type = "video/mp4" if kind == "video" else "image/png"
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


class HTTPAnswerer:
    """Greedy answers of an OpenAI-style chat server, with several requests in flight."""

    def __init__(self, url: str, model: str | None, concurrency: int, timeout_s: float) -> None:
        self._url, self._timeout_s, self._concurrency = url.rstrip("/"), timeout_s, concurrency
        self._model = model or self._first_model()

    def _first_model(self) -> str:
        with urllib.request.urlopen(f"{self._url}/v1/models", timeout=self._timeout_s) as reply:
            return json.load(reply)["data"][0]["id"]

    def __call__(self, questions: Sequence[Question]) -> Iterator[str]:
        """One answer for each (PNG images and clips, question), in order."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            yield from pool.map(self._answer, questions)

    def _answer(self, asked: Question) -> str:
        pictures, question = asked
        content: list[dict[str, object]] = [_part(shown) for shown in pictures]
        content.append({"type": "text", "text": question})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]


def evaluate(answerer: Answerer, items: Sequence[Item], show: bool = True) -> dict[str, object]:
    """Ask every item and score the replies: accuracy per task, and every reply by item id."""
    started = time.monotonic()
    replies: dict[str, str] = {}
    right: dict[str, list[bool]] = {}
    answers = answerer([(item.images, item.question) for item in items])
    for item, reply in zip(items, answers, strict=True):
        replies[item.item_id] = reply
        right.setdefault(item.task, []).append(is_right(item, reply))
        if show and len(replies) % 50 == 0:
            rate = len(replies) / (time.monotonic() - started)
            left = (len(items) - len(replies)) / rate
            print(
                f"\r{len(replies)}/{len(items)}  {rate:.1f}/s  {left:.0f} s left ",
                end="",
                file=sys.stderr,
                flush=True,
            )
    if show:
        print(file=sys.stderr)
    accuracy = {task: sum(right[task]) / len(right[task]) for task in ALL_TASKS if task in right}
    return {
        "accuracy": accuracy,
        "questions": {task: len(right[task]) for task in accuracy},
        "seconds": round(time.monotonic() - started, 1),
        "replies": replies,
    }


def table(report: dict[str, object]) -> str:
    """The accuracy per task, one line each."""
    accuracy, questions = report["accuracy"], report["questions"]
    assert isinstance(accuracy, dict) and isinstance(questions, dict)
    lines = [f"{t:<10} {100 * accuracy[t]:6.2f} %  of {questions[t]}" for t in accuracy]
    return "\n".join(lines)


def mistakes(report: dict[str, object], items: Sequence[Item]) -> list[str]:
    """The wrong replies, one line each."""
    replies = report["replies"]
    assert isinstance(replies, dict)
    return [
        f"{item.item_id} {item.task}: {item.question!r} -> {replies[item.item_id]!r}, "
        f"not {item.answer!r}"
        for item in items
        if not is_right(item, replies[item.item_id])
    ]


def compare(first: dict[str, object], second: dict[str, object]) -> str:
    """How many replies are the same text, the accuracy of both, and the first differences."""
    a, b = first["replies"], second["replies"]
    accuracy_a, accuracy_b = first["accuracy"], second["accuracy"]
    assert isinstance(a, dict) and isinstance(b, dict)
    assert isinstance(accuracy_a, dict) and isinstance(accuracy_b, dict)
    common = [key for key in a if key in b]
    different = [key for key in common if a[key] != b[key]]
    lines = [f"{len(common) - len(different)} of {len(common)} answers are identical"]
    for task in accuracy_a:
        if task in accuracy_b:
            x, y = 100 * accuracy_a[task], 100 * accuracy_b[task]
            lines.append(f"{task:<10} {x:6.2f} %  {y:6.2f} %  ({y - x:+.2f})")
    lines += [f"{key}: {a[key]!r} / {b[key]!r}" for key in different[:20]]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf", type=Path, help="model directory to ask through HF transformers")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1, help="questions per HF batch")
    parser.add_argument("--url", help="address of a running server")
    parser.add_argument("--model", help="model name to send; the server's first by default")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--limit", type=int, default=NUM_SCENES, help="held-out scenes or clips")
    parser.add_argument("--clips", action="store_true", help="ask about the 500 clips")
    parser.add_argument("--coded", action="store_true", help="HF sees clips through an mp4 file")
    parser.add_argument("--out", type=Path, help="where to write the report")
    parser.add_argument("--mistakes", action="store_true", help="print the wrong replies")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="REPORT")
    return parser.parse_args()


def main() -> None:
    """Command line."""
    args = _arguments()
    if args.compare:
        first, second = (json.loads(path.read_text(encoding="utf-8")) for path in args.compare)
        print(compare(first, second))
        return
    if args.hf:
        from demo.hf import HFAnswerer  # torch is needed for this way only

        answerer: Answerer = HFAnswerer(args.hf, args.dtype, args.device, args.batch, args.coded)
    elif args.url:
        answerer = HTTPAnswerer(args.url, args.model, args.concurrency, args.timeout)
    else:
        sys.exit("one of --hf, --url and --compare is needed")
    items = list(held_out_clips(min(args.limit, NUM_CLIPS)) if args.clips else held_out(args.limit))
    report = evaluate(answerer, items)
    print(table(report))
    if args.mistakes:
        print("\n".join(mistakes(report, items)))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
