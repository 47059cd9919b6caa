"""What constrained sequences cost the host, in each step; no model, no device.

    python -m benchmarks.structured_host --tokenizer tokenizer.json

The real engine plans and postprocesses decode steps on a runner that computes nothing: a masked row
gets a random token that its mask allows, any other row always the same. The front's part is the
real matchers. CPU time, the least of several runs; the device's work and gRPC are not in it.

- engine: `Engine.step`, with the masks' copy into the upload buffer
- messages: what says which masks are there, written in the front and read in the engine
- masks: taking the tokens and filling the masks, all threads together
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch

from benchmarks.structured import SCHEMA
from services.decoder.engine.engine import Engine
from services.decoder.engine.mask_buffer import MaskBuffer
from services.decoder.engine.messages import (
    AddSequence,
    EngineInfo,
    FrontMessage,
    SamplingParams,
    TokenMasks,
)
from services.decoder.engine.step import Int32Array, Step, StepOutput
from services.decoder.grammar import Demands, Grammar, Grammars
from services.decoder.mask_rows import MaskRows, open_rows
from services.decoder.matcher import Matcher

_MIXES = ((64, 0), (48, 16), (0, 64), (1, 0), (0, 1))
_ANY_TOKEN = 1000
Result = TypeVar("Result")


@dataclass(slots=True)
class NullPending:
    """A step that is never computed."""

    runner: "NullRunner"
    step: Step
    masks: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])

    def is_computed(self) -> bool:
        return False

    def put_mask(self, index: int, mask: Int32Array) -> None:
        self.runner.buffer.put(index, mask)
        self.masks[index] = mask

    def sample(self) -> None:
        self.runner.buffer.upload(len(self.masks))

    def result(self) -> StepOutput:
        started = time.process_time()
        count = len(self.step.samples)
        ids = np.full((count, 1), _ANY_TOKEN, np.int32)
        places = [*self.step.masked.tolist(), *self.step.late.tolist()]
        late = [self.masks[index] for index in range(len(self.masks))]
        for place, mask in zip(places, [*self.step.token_masks, *late], strict=True):
            ids[place, 0] = self.runner.choose(mask)
        self.runner.excluded_s += time.process_time() - started
        return StepOutput(ids, np.ones(count, np.int32), {})


class NullRunner:
    """A runner that computes nothing. `excluded_s`: of choosing tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.info = EngineInfo(
            model_name="null", dtype="float32", num_features=0, hidden=1, vocab_size=vocab_size,
            max_model_len=1 << 14, block_size=16, num_blocks=1 << 15, max_num_sequences=64,
            max_batched_tokens=8192,
        )  # fmt: skip
        words = -(-vocab_size // 32)
        self.buffer = MaskBuffer(64, words, torch.device("cpu"))
        self.random = random.Random(0)
        self.excluded_s = 0.0

    def choose(self, mask: Int32Array) -> int:
        """A token that the mask allows; touches little memory, as a device's sampling does."""
        byte_places = np.flatnonzero(mask.view(np.uint8))
        place = int(byte_places[self.random.randrange(len(byte_places))])
        byte = int(mask.view(np.uint8)[place])
        return 8 * place + self.random.choice([bit for bit in range(8) if byte >> bit & 1])

    def prepare(self, step: Step) -> None:
        pass

    def execute(self, step: Step) -> NullPending:
        return NullPending(self, step)


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of a step."""

    engine: float
    messages: float
    masks: float
    masks_wall: float


def measure(grammars: Grammars, end_id: int, free: int, constrained: int, steps: int) -> Costs:
    """Means over the steps of one batch, all decoding."""
    runner = NullRunner(grammars.vocab_size)
    engine = Engine(runner, overlap=True)
    form = Grammar("json_schema", json.dumps(SCHEMA), (), (end_id,), stop_ids=())
    rows = MaskRows(free + constrained, grammars.num_mask_words)
    engine.mask_rows[-1] = open_rows(rows.message)
    prompt = np.arange(64, dtype=np.int32).tobytes()
    matchers: dict[int, Matcher] = {}
    for number in range(free + constrained):
        engine.add(
            AddSequence(
                sequence_id=number, prompt_token_ids=prompt, positions=b"", position_delta=0,
                images=[], sampling=SamplingParams(max_tokens=steps + 8),
                token_masks=number >= free,
            )
        )  # fmt: skip
        if number >= free:
            matchers[number] = asyncio.run(grammars.matcher(Demands(form)))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FrontMessage)
    spent = {"engine": 0.0, "messages": 0.0, "masks": 0.0}
    wall = 0.0

    def timed(part: str, call: Callable[[], Result]) -> Result:
        started = time.process_time()
        found = call()
        spent[part] += time.process_time() - started
        return found

    work = [(number, matcher, list[int]()) for number, matcher in matchers.items()]
    for _ in range(steps):
        if work:
            wall_started = time.monotonic()
            filled = [(matcher, ids, number - free) for number, matcher, ids in work]
            timed("masks", lambda w=filled: grammars.fill(w, rows.array))
            wall += time.monotonic() - wall_started
            numbers = [number for number, _, _ in work]
            counts = [matcher.num_generated for _, matcher, _ in work]
            message = TokenMasks(numbers, counts, [number - free for number in numbers])
            frame = timed("messages", lambda m=message: encoder.encode(m))
            read = timed("messages", lambda f=frame: decoder.decode(f))
            timed("engine", lambda r=read: engine.handle(r))
        before = runner.excluded_s
        done = timed("engine", engine.step)
        spent["engine"] -= runner.excluded_s - before
        work = [
            (event.sequence_id, matchers[event.sequence_id], event.token_ids)
            for event in (done.events if done else ())
            if event.sequence_id in matchers
        ]
    rows.close()
    micro = {part: 1e6 * seconds / steps for part, seconds in spent.items()}
    return Costs(micro["engine"], micro["messages"], micro["masks"], 1e6 * wall / steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--end-id", type=int, default=151645)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    grammars = Grammars(options.tokenizer.parent, options.vocab_size, lambda _: None)
    print(f"{'free':>5} {'constrained':>12} {'engine':>8} {'messages':>9} {'masks':>8} {'wall':>8}")
    for free, constrained in _MIXES:
        runs = [
            measure(grammars, options.end_id, free, constrained, options.steps)
            for _ in range(options.repeats)
        ]
        least = [min(getattr(run, part) for run in runs) for part in Costs.__slots__]
        print(f"{free:5} {constrained:12} " + " ".join(f"{v:8.1f}" for v in least) + "  µs a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
