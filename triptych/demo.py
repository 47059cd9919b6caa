"""`make demo`: starts the stack with the demonstration model, and asks about images and clips.

The encoder's own metric counts its work: an image or clip of an earlier question must not be
encoded again. The exit status is 1 if it was, or if a question was not answered.
"""

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych import ROOT
from triptych.client import Answer, AskError, Server, ask, question_message
from triptych.options import LOOPBACK, ServeOptions
from triptych.plan import Plan
from triptych.serve import READY_TIMEOUT_S, prepare, private_directory
from triptych.stack import Quiet, Stack, StackError, end_signals
from triptych.stats import Scraper

SAMPLES = ROOT / "demo" / "samples"
_ENCODED = "triptych_encoder_images_encoded_total"
# Exported variables for the address and the keys of a server are ignored: only this process asks.
_OPTIONS = ServeOptions(host=LOOPBACK, port=0, api_key="")


@dataclass(frozen=True, slots=True)
class Sample:
    """Some images or a clip, or no file at all, and the questions about these."""

    files: tuple[Path, ...]
    questions: tuple[str, ...]


def load_samples(directory: Path = SAMPLES) -> list[Sample]:
    """The samples that `samples.json` lists."""
    return [
        Sample(tuple(directory / name for name in entry["files"]), tuple(entry["questions"]))
        for entry in json.loads((directory / "samples.json").read_text())
    ]


@dataclass(slots=True)
class Totals:
    """Counts of the demonstration.

    Attributes:
        files: distinct images and clips.
        questions: questions that were answered.
        encodes: images and pairs of frames that the vision tower computed, by the encoders'
            counters.
        repeats: questions about images and clips of earlier questions.
        repeat_encodes: encodes during repeated questions. Must be zero.
    """

    files: int = 0
    questions: int = 0
    encodes: int = 0
    repeats: int = 0
    repeat_encodes: int = 0


def demo() -> int:
    """Starts the stack, asks and stops. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    for number in end_signals():  # SystemExit stops the stack and removes its directory
        signal.signal(number, lambda ended_by, _: sys.exit(128 + ended_by))
    try:
        with private_directory() as directory:
            samples = load_samples()
            _introduce(console)
            totals = asyncio.run(_serve_and_ask(console, samples, Path(directory)))
    except (StackError, AskError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return error.status if isinstance(error, StackError) else 1
    _conclude(console, totals, time.monotonic() - start)
    return 1 if totals.repeat_encodes else 0


async def _serve_and_ask(console: Console, samples: list[Sample], directory: Path) -> Totals:
    def report(line: str) -> None:
        console.print(f"  [dim]{escape(line)}[/]")

    plan, specs = prepare(_OPTIONS, directory, report)
    async with Stack(Quiet(report), plan.grace_s) as stack:
        await stack.start(specs, READY_TIMEOUT_S)
        console.print(f"\nReady at [cyan]{plan.url}[/]")
        watch = asyncio.create_task(stack.watch())
        asking = asyncio.create_task(asyncio.to_thread(_ask_all, console, samples, plan))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({watch, asking}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():  # a child has ended, which is the cause of a failed question
            await watch
        watch.cancel()
        return asking.result()


def _ask_all(console: Console, samples: Iterable[Sample], plan: Plan) -> Totals:
    totals, scraper = Totals(), Scraper(plan.metrics_urls)
    seen: set[Path] = set()
    for sample in samples:
        names = " + ".join(path.name for path in sample.files) or "no image"
        console.print(f"\n[bold]{escape(names)}[/]")
        for question in sample.questions:
            new = [path for path in sample.files if path not in seen]
            before = scraper.sums()[_ENCODED]
            answer = _ask_one(console, sample, question, plan)
            encodes = round(scraper.sums()[_ENCODED] - before)
            for video in _videos(answer) if new else ():
                console.print(f"    [dim]{_as_sampled(video)}[/]")
            work = _encoder_work(encodes) if sample.files else "the encoder was not used"
            console.print(f"    [dim]{_times(answer)}; {work}[/]")
            seen.update(sample.files)
            totals.files += len(new)
            totals.questions += 1
            totals.encodes += encodes
            if sample.files and not new:
                totals.repeats += 1
                totals.repeat_encodes += encodes
    return totals


def _ask_one(console: Console, sample: Sample, question: str, plan: Plan) -> Answer:
    console.print(f"  [cyan]{escape(question)}[/]\n    ", end="")
    body = {
        "model": plan.model_name,
        "messages": [question_message([str(path) for path in sample.files], question)],
        "temperature": 0,
        "include_stage_times": True,
    }
    answer = ask(Server(plan.url, ""), body, lambda text: console.print(escape(text), end=""))
    console.print()
    return answer


def _videos(answer: Answer) -> list[dict[str, Any]]:
    """The server's usage details of each clip."""
    return (answer.usage.get("prompt_tokens_details") or {}).get("videos") or []


def _as_sampled(video: dict[str, Any]) -> str:
    """Describes the sampled frames of a clip, their times and their number of tokens."""
    height, width = video["size"]
    times = ", ".join(f"{time:.1f}" for time in video["times"])
    return (
        f"{video['frames']} frames of {width}x{height} as sampled, {video['fps']:.1f} a second, "
        f"in pairs at {times} s: {video['tokens']} tokens"
    )


def _times(answer: Answer) -> str:
    first = f"{1e3 * answer.ttft_s:.0f} ms to the first word, " if answer.ttft_s else ""
    encode = answer.stage_times_ms.get("encode")
    stages = f" (encode {encode:.0f} ms)" if encode is not None else ""
    return f"{first}{1e3 * answer.total_s:.0f} ms in total{stages}"


def _encoder_work(encodes: int) -> str:
    if encodes:
        return f"the encoder ran {encodes} time{'s' if encodes > 1 else ''}"
    return "[green]the encoder was skipped[/]: all embeddings were cached"


def _introduce(console: Console) -> None:
    console.print("[bold]Triptych[/]: gateway, encoder and decoder as separate processes\n")
    console.print(
        "The model is a tiny Qwen3-VL, trained for this repository on coloured shapes, numbers,\n"
        "short words and clips of moving shapes. Real checkpoints load through the same code.\n"
    )


def _conclude(console: Console, totals: Totals, elapsed_s: float) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("questions answered", str(totals.questions))
    table.add_row("distinct images and clips", str(totals.files))
    table.add_row("images and frame pairs encoded", f"{totals.encodes} (counted by the encoder)")
    table.add_row("repeated questions about a file", str(totals.repeats))
    table.add_row("encodes for repeated questions", str(totals.repeat_encodes))
    console.print("\n", table, f"\nStopped. {elapsed_s:.1f} s in total.", sep="")
    if totals.repeat_encodes:
        console.print("[red]an image or clip with a cached embedding was encoded again[/]")
    else:
        console.print(f"Serve it yourself: [cyan]{_program()} serve[/], then open the chat page.")


def _program() -> str:
    """Returns how the user can call the program, whose environment may not be active."""
    own = Path(sys.executable).with_name("triptych")
    if not own.exists() or shutil.which("triptych") == str(own):
        return "triptych"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)
