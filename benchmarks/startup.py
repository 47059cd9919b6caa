"""How long a stack takes from its start to its first answers, with a checkpoint on disk.

    python -m benchmarks.startup --shape DIR --work DIR

Writes a checkpoint of random weights in the shape of a model directory (its config and tokenizer),
drops it from the page cache, starts `triptych serve` on it, and asks ten new texts and ten new
images, one after the other: the first should take no longer than the tenth. Each has a connection
of its own, and the client's code has run before, against a local server that answers at once: what
is measured is the server's first time. The last of each kind follows a pause, as the first does,
because an idle machine slows down.
"""

import argparse
import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.client import Connection, Target
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, chat_body, data_url, random_image
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import DONE, ChunkWriter, PromptTokensDetails, Update, Usage

_READY = re.compile(r"Triptych is ready: (\S+)")
_ASKED = 10
_PAUSE_S = 2.0
_TIMEOUT_S = 600.0
_ANSWER_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def write_checkpoint(shape: Path, directory: Path, dtype: str) -> None:
    """Random weights for the configuration in `shape`, in Hugging Face's layout.

    They repeat themselves: to draw billions takes minutes, and nobody reads the answers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    print(f"writing a checkpoint to {directory}", file=sys.stderr)
    config = AutoConfig.from_pretrained(shape)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    model.to_empty(device="cpu")
    model.tie_weights()
    drawn = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(
        model.dtype
    )
    for parameter in model.parameters():
        for part in parameter.data.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])
    model.save_pretrained(directory)
    for path in shape.iterdir():
        if (
            path.is_file()
            and path.suffix != ".safetensors"
            and not (directory / path.name).exists()
        ):
            shutil.copy(path, directory / path.name)


def forget(directory: Path) -> int:
    """Has the kernel drop its copy of the files; their bytes in all."""
    size = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


@contextmanager
def serving(
    directory: Path, options: Sequence[str], errors: IO[str] | None = None, **variables: str
) -> Iterator[tuple[str, float]]:
    """`triptych serve` with these options and environment variables: its URL, and the seconds until
    it was ready. What it reports goes to `errors`, or where ours goes.
    """
    command = [sys.executable, "-m", "triptych", "serve", "--model", str(directory), "--port", "0"]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True,
        env=os.environ | variables,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = _READY.search(process.stdout.readline())
        if found is None:
            raise SystemExit("triptych serve did not become ready; it says why above")
        yield found[1], time.monotonic() - start
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


async def first_tokens_s(url: str) -> dict[str, list[float]]:
    """Seconds to the first token of each request."""
    target = Target.from_url(url)
    model, words, rng = model_name(target), random.Random(0), np.random.default_rng(0)
    async with await asyncio.start_server(_answer_at_once, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        practice = Target.from_url(f"http://{host}:{port}")
        for _ in range(_ASKED):
            await _ask(practice, chat_body(model, "", 4, [data_url(random_image(rng, 512))]))
    times: dict[str, list[float]] = {"text": [], "image": []}
    for kind, taken in times.items():
        for number in range(_ASKED + 1):
            if number == _ASKED:
                await asyncio.sleep(_PAUSE_S)
            text = " ".join(words.choices(WORDS, k=200 if kind == "text" else 10))
            urls = [data_url(random_image(rng, 512))] if kind == "image" else []
            taken.append(await _ask(target, chat_body(model, text, 4, urls)))
    return times


async def _ask(target: Target, body: bytes) -> float:
    """Seconds to the first token, the connection included."""
    begin, connection = time.monotonic(), Connection(target)
    try:
        sample = await connection.post(body, _TIMEOUT_S)
    finally:
        connection.close()
    if sample.error:
        raise SystemExit(f"a request failed: {sample.error}")
    return sample.first - begin


async def _answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request and one answer, with the gateway's own chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
    chunks = ChunkWriter("practice", 0, "practice", usage_field=True)
    events = (
        chunks.role(0),
        chunks.update(Update(0, (Text("word"),), None, None)),
        chunks.update(Update(0, (), None, "length")),
        chunks.closing({"usage": Usage(1, 1, 2, PromptTokensDetails(0, None))}),
        DONE,
    )
    writer.write(_ANSWER_HEAD)
    for event in events:
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; other options go to `triptych serve`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", type=Path, required=True, help="model directory; weights unused")
    parser.add_argument("--work", type=Path, required=True, help="for the checkpoint; kept")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options, rest = parser.parse_known_args(arguments)
    if not any(options.work.glob("*.safetensors")):
        write_checkpoint(options.shape, options.work, options.dtype)
    size = forget(options.work)
    with serving(options.work, rest) as (url, ready_s):
        print(f"ready after {ready_s:.1f} s with {size / 2**30:.2f} GiB of weights")
        for kind, taken in asyncio.run(first_tokens_s(url)).items():
            shown = [f"{1e3 * s:.1f}" for s in taken]
            print(f"first token of a {kind}, ms: {' '.join(shown[:-1])}; rested {shown[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
