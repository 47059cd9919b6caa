"""Whether token masks keep up with a device: TPOT of the engine and the front around a clock.

    python -m benchmarks.structured_pipeline --tokenizer tokenizer.json --free 48 --constrained 16

The real engine loop in a process of its own, the real channel, the front's masks by the real
matchers. The device is a clock: a step takes `--step-ms`, its sampling `--masked-ms` more where
rows have late masks, and its tokens are random ones that the masks allow. gRPC and the gateway are
not in it; `--front-ms` of other work keeps the front busy in each step.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles

import numpy as np
import torch
import uvloop

from benchmarks.structured import SCHEMAS
from services.common.channel import (
    ChannelClosed,
    EngineChannel,
    FrontChannel,
    create_socket_pair,
)
from services.common.errors import TriptychError
from services.decoder import engine_main
from services.decoder.engine.engine import Engine
from services.decoder.engine.mask_buffer import MaskBuffer
from services.decoder.engine.messages import (
    AddSequence,
    EngineInfo,
    EngineMessage,
    FrontMessage,
    MaskMemoryOpened,
    SamplingParams,
    StepDone,
)
from services.decoder.engine.step import Int32Array, Step, StepOutput
from services.decoder.grammar import Demands, Grammar, Grammars
from services.decoder.mask_rows import MaskRows
from services.decoder.token_masks import SequenceMasks

_ANY_TOKEN = 1000
_TRIES = 20  # to find an allowed token by chance


def work_for(seconds: float) -> None:
    """Keeps the thread busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@dataclass(slots=True)
class ClockStep:
    """A step that is computed at a certain time. `done_at` 0: it waits for its masks."""

    runner: "ClockRunner"
    step: Step
    computed_at: float
    done_at: float
    masks: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])

    def is_computed(self) -> bool:
        return time.monotonic() >= self.computed_at

    def put_mask(self, index: int, mask: Int32Array) -> None:
        self.runner.buffer.put(len(self.step.token_masks) + index, mask)
        self.masks[index] = mask

    def sample(self) -> None:
        self.runner.buffer.upload(len(self.step.token_masks) + len(self.masks))
        now = time.monotonic()
        self.runner.idle_s += max(0.0, now - self.computed_at)
        self.done_at = max(now, self.computed_at) + self.runner.masked_s

    def result(self) -> StepOutput:
        step = self.step
        ids = np.full((len(step.samples), 1), _ANY_TOKEN, np.int32)
        places = [*step.masked.tolist(), *step.late.tolist()]
        late = [self.masks[index] for index in range(len(self.masks))]
        for place, mask in zip(places, [*step.token_masks, *late], strict=True):
            ids[place, 0] = self.runner.choose(mask)
        work_for(self.done_at - time.monotonic())
        return StepOutput(ids, np.ones(len(ids), np.int32), {})


class ClockRunner:
    """A runner whose device is a clock. `idle_s`: the device had nothing to do between steps."""

    def __init__(self, vocab_size: int, options: argparse.Namespace) -> None:
        self.info = EngineInfo(
            model_name="clock", dtype="float32", num_features=0, hidden=1, vocab_size=vocab_size,
            max_model_len=1 << 14, block_size=16, num_blocks=1 << 15, max_num_sequences=64,
            max_batched_tokens=8192,
        )  # fmt: skip
        self.buffer = MaskBuffer(64, -(-vocab_size // 32), torch.device("cpu"))
        self.step_s, self.masked_s = 1e-3 * options.step_ms, 1e-3 * options.masked_ms
        self.launch_s = 1e-3 * options.launch_ms
        self.random = random.Random(0)
        self.last: ClockStep | None = None
        self.idle_s, self.num_steps = 0.0, 0

    def choose(self, mask: Int32Array) -> int:
        """A token that the mask allows; below zero: none is."""
        taken = mask.view(np.uint8)
        place = 0
        for _ in range(_TRIES):
            place = self.random.randrange(len(taken))
            if taken[place]:
                break
        else:
            found = np.flatnonzero(taken)
            if len(found) == 0:
                return -2
            place = int(found[self.random.randrange(len(found))])
        byte = int(taken[place])
        return 8 * place + self.random.choice([bit for bit in range(8) if byte >> bit & 1])

    def prepare(self, step: Step) -> None:
        pass

    def execute(self, step: Step) -> ClockStep:
        work_for(self.launch_s)
        began = time.monotonic()
        if self.last is not None:
            self.idle_s += max(0.0, began - self.last.done_at)
            began = max(began, self.last.done_at)
        computed = began + self.step_s
        self.last = ClockStep(self, step, computed, 0.0 if len(step.late) else computed)
        self.num_steps += 1
        return self.last


def run_engine(channel: EngineChannel[FrontMessage], runner: ClockRunner) -> None:
    """The engine's process, until the front closes the channel."""
    engine = Engine(runner, overlap=True)
    try:
        engine_main.run(engine, channel, lambda: {}, awake_s=0.05)
    except ChannelClosed:
        idle = 1e6 * runner.idle_s / max(1, runner.num_steps)
        late = engine.stats().num_late_masks
        print(f"  {runner.num_steps} steps, device idle {idle:.1f} µs a step, {late} masks late")


async def run_front(
    channel: FrontChannel[EngineMessage], grammars: Grammars, options: argparse.Namespace
) -> None:
    """Sends all sequences, makes their masks, and prints their TPOT."""
    took: list[float] = []
    failures: list[TriptychError] = []
    count = options.free + options.constrained
    rows = MaskRows(count, grammars.num_mask_words)
    masks = SequenceMasks(
        grammars, rows, channel, took.append, lambda _, error: failures.append(error)
    )
    schema = json.dumps(SCHEMAS[options.schema])
    demands = Demands(Grammar("json_schema", schema, (), (options.end_id,)))
    await grammars.matcher(demands)  # reads the vocabulary
    prompt = np.arange(64, dtype=np.int32).tobytes()
    for number in range(count):
        channel.send(
            AddSequence(
                sequence_id=number, prompt_token_ids=prompt, positions=b"", position_delta=0,
                images=[], sampling=SamplingParams(max_tokens=options.tokens),
                token_masks=number >= options.free,
            )
        )  # fmt: skip
        if number >= options.free:
            masks.add(number, demands, [])
    times: dict[int, list[float]] = defaultdict(list)
    live = count
    while live and not failures:
        message = await channel.receive()
        if isinstance(message, MaskMemoryOpened):
            masks.rows_opened()
        if not isinstance(message, StepDone):
            continue
        masks.tokens_arrived(
            (e.sequence_id, e.token_ids) for e in message.events if e.token_ids and e.end is None
        )
        now = time.monotonic()
        for event in message.events:
            if event.token_ids:
                times[event.sequence_id].append(now)
            if event.end is not None:
                live -= 1
                masks.remove(event.sequence_id)
        work_for(1e-3 * options.front_ms)
    channel.close()
    for error in failures:
        print(f"  failed: {error}")
    for name, numbers in (
        ("free", range(options.free)), ("constrained", range(options.free, count)),
    ):  # fmt: skip
        found = [times[n] for n in numbers if len(times[n]) > 1]
        if found:
            tpot = median(1e3 * (each[-1] - each[0]) / (len(each) - 1) for each in found)
            print(f"  {name}: TPOT {tpot:.3f} ms ({len(found)})")
    if len(took) > 1:
        p99 = quantiles(took, n=100)[-1]
        print(f"  masks of a step: mean {1e6 * mean(took):.0f} µs, p99 {1e6 * p99:.0f} µs")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--end-id", type=int, default=151645)
    parser.add_argument("--free", type=int, default=48)
    parser.add_argument("--constrained", type=int, default=16)
    parser.add_argument("--schema", default="bounded", choices=list(SCHEMAS))
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=1.95)
    parser.add_argument("--masked-ms", type=float, default=0.02, help="of sampling under masks")
    parser.add_argument("--launch-ms", type=float, default=0.1, help="of the host, for a launch")
    parser.add_argument("--front-ms", type=float, default=0.3, help="of other work, each step")
    options = parser.parse_args(arguments)
    grammars = Grammars(options.tokenizer.parent, options.vocab_size, lambda _: None)
    front_end, engine_end = create_socket_pair()
    child = os.fork()
    if child == 0:
        front_end.close()
        runner = ClockRunner(options.vocab_size, options)
        run_engine(EngineChannel[FrontMessage](engine_end, FrontMessage), runner)
        sys.stdout.flush()
        os._exit(0)
    engine_end.close()

    async def run() -> None:
        channel = await FrontChannel[EngineMessage].open(front_end, EngineMessage)
        await run_front(channel, grammars, options)

    uvloop.run(run())
    os.waitpid(child, 0)
    grammars.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
