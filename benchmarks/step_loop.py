"""The engine and its scheduler with measured times in place of a device: loads by the step's bound.

    python -m benchmarks.step_loop --device 32b --streams 64 --bounds 30,40,default
    python -m benchmarks.step_loop --device 8b --rate 26 --bounds 14,20,30,40

Each bound (`DECODER_STEP_MS`) is a run of the real engine, whose runner computes nothing and lets a
clock pass instead. A closed loop (`--streams`) keeps so many requests in flight, an open loop
(`--rate`) sends so many a second at random times. A request has `--prompt` and `--output` tokens.
The step cost is calibrated at the start and learns from each step, as when the model serves. What
is left out: HTTP but for `--between`, images, prefix hits, and the noise of a device.
"""

import argparse
import heapq
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, EngineInfo, SamplingParams
from services.decoder.engine.step import Int32Array, Step, StepOutput

_GRAPH_TOKENS, _GRAPH_LEAST = 64, 256  # of mixed steps
_TILE = 128  # tokens of a tile of attention of prompts
# A step of an 8B model on an H200 runs without a graph if it has more pairs of a prompt's query and
# a cached key than graphs of our own kernel take, and another size than graphs with FA3 have.
_OWN_PAIRS, _LONG_SIZES = 1_250_000, range(512, 2049)
# Service levels: seconds to the first token, and a token.
LEVELS = ((1.0, 0.03), (2.0, 0.05))


@dataclass(frozen=True, slots=True)
class Device:
    """Times of one model's steps on one kind of GPU, in ms. Rows of `gemms` between two entries are
    interpolated, and those after the last one take as long a token as it.

    Attributes:
        gemms: (tokens, ms) of a step without attention.
        key_ms: time of a key that a decode attends to.
        pair_ms: time of a pair of a prompt's query and key. If `heads` is not 0, while all SMs
            have a tile.
        row_ms: time of a decode beside its token and keys: recurrent states.
        kv_tokens: tokens that fit the KV cache.
        weight_tokens: tokens whose keys and values have as many bytes as the weights.
        heads: number of query heads. Attention of prompts is then divided into tiles of 128 tokens
            of a head, and an SM computes one after the other. 0 if no tiles are simulated.
        sms: number of SMs.
        tile_keys: number of keys in whose time a tile behind cached keys begins and ends.
        several: factor of the time of attention if several chunks are behind cached keys.
    """

    gemms: tuple[tuple[int, float], ...]
    key_ms: float
    pair_ms: float
    row_ms: float = 0.0
    kv_tokens: int = 400_000
    weight_tokens: int = 100_000
    heads: int = 0
    sms: int = 132
    tile_keys: int = 0
    several: float = 1.0

    @property
    def wave_tokens(self) -> int:
        """See `EngineInfo.wave_tokens`."""
        return self.sms // self.heads * _TILE if self.heads else 0

    def pairs(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Pairs that the SMs could compute in the time of the chunks' attention.

        Args:
            chunks: start and length of each chunk.
        """
        if not self.heads:
            return sum(length * (start + length / 2) for start, length in chunks)
        tiles = [
            (start + at + _TILE / 2 + (self.tile_keys if start else 0)) * _TILE
            for start, length in chunks
            for at in range(0, length, _TILE)
        ]
        busy = [0.0] * self.sms
        for tile in sorted(tiles, reverse=True):
            for _ in range(self.heads):
                heapq.heapreplace(busy, busy[0] + tile)
        are_several = sum(start > 0 and length >= _TILE for start, length in chunks) > 1
        return max(busy) * self.sms / self.heads * (self.several if are_several else 1.0)

    def ms(self, tokens: int, keys: int, pairs: float, rows: int) -> float:
        """Milliseconds of a step. Steps with prompts are padded to the sizes of CUDA graphs."""
        if tokens > rows:
            tokens = max(_GRAPH_LEAST if rows else tokens, -(-tokens // 64) * _GRAPH_TOKENS)
        place = bisect_left(self.gemms, (tokens, 0.0))
        last, last_ms = self.gemms[-1]
        if place == len(self.gemms):
            gemms = last_ms * tokens / last
        else:
            high, high_ms = self.gemms[place]
            low, low_ms = self.gemms[max(0, place - 1)]
            gemms = high_ms - (high_ms - low_ms) * (high - tokens) / max(1, high - low)
        return gemms + self.key_ms * keys + self.pair_ms * pairs + self.row_ms * rows


# One H200, random bf16 weights; sources are "Sizes of steps", "Ranks beside vLLM", "Prompts of
# Qwen3.5" and steps of 64 decodes of benchmarks/LOG.md. Entries of the 8B below 960 tokens but for
# 1 and 64 are reckoned, those of the 27B and of two ranks are the 32B's in proportion.
_32B = (
    (1, 16.1), (64, 17.6), (128, 21.5), (192, 26.9), (256, 30.6), (320, 38.5), (384, 42.0),
    (448, 51.0), (512, 54.8), (1008, 111.1), (8192, 890.0),
)  # fmt: skip
_KV_32B, _PAIR_32B = 76e-6, 4.7e-6


def _scaled(factor: float, least_ms: float) -> tuple[tuple[int, float], ...]:
    few = _32B[1][1] - _32B[0][1]
    head = ((1, least_ms), (64, least_ms + few * factor))
    return (*head, *((tokens, factor * ms) for tokens, ms in _32B[2:]))


DEVICES = {
    "8b": Device(
        (
            (1, 4.05), (64, 4.5), (128, 5.0), (256, 6.4), (384, 8.5), (512, 10.9), (640, 13.4),
            (768, 15.7), (896, 18.2), (960, 19.3), (1024, 21.7), (1088, 26.3), (1152, 26.1),
            (1280, 28.9), (1408, 30.2), (1536, 34.3), (1920, 40.0), (2048, 44.5), (4096, 86.0),
        ),
        43e-6, 1.05e-6, kv_tokens=800_000, heads=32,
    ),
    # The same under load, as its closed loops say ("Sizes of steps under load" of the log): what
    # makes steps of up to 960 tokens the fastest when they are timed alone is lost there. The
    # KV cache has 30 GiB.
    "8b-load": Device(
        (
            (1, 4.05), (64, 4.5), (128, 5.1), (256, 6.7), (384, 8.9), (512, 11.4), (640, 14.0),
            (768, 16.4), (896, 19.0), (960, 20.2), (1024, 22.0), (1088, 26.3), (1152, 26.1),
            (1280, 28.9), (1408, 30.4), (1536, 34.3), (1920, 40.0), (2048, 43.2), (4096, 83.4),
        ),
        43e-6, 1.05e-6, kv_tokens=218_000, heads=32, tile_keys=700, several=1.1,
    ),
    "2b": Device(
        (
            (1, 1.13), (64, 1.65), (256, 1.95), (512, 3.2), (960, 6.2), (1024, 6.1), (1088, 6.4),
            (1280, 7.2), (1408, 7.6), (1536, 8.9), (1920, 10.5), (2048, 10.2), (4096, 19.7),
        ),
        28e-6, 0.51e-6, kv_tokens=1_100_000,
    ),
    "8b-fp8": Device(
        (
            (1, 2.85), (64, 3.5), (128, 4.0), (256, 5.2), (512, 8.6), (768, 12.0), (960, 14.5),
            (1024, 15.9), (1088, 19.2), (1152, 19.2), (1280, 20.3), (1408, 24.1), (1536, 23.7),
            (1920, 28.9), (2048, 32.0), (4096, 63.0),
        ),
        43e-6, 1.2e-6, kv_tokens=850_000,
    ),
    "32b": Device(_32B, _KV_32B, _PAIR_32B, kv_tokens=220_000, weight_tokens=250_000),
    "32b-tp2": Device(
        _scaled(0.57, 9.0), _KV_32B / 2, _PAIR_32B / 2, kv_tokens=700_000, weight_tokens=250_000
    ),
    "27b": Device(
        _scaled(0.84, 13.6), 19e-6, 1.2e-6, row_ms=0.11, kv_tokens=900_000, weight_tokens=800_000
    ),
    # Qwen3.5 with 4B and an FP8 cache. A step of 96 decodes at contexts of 5,200 was measured, and
    # prompts of 1,008 and 8,064 tokens; the division into rows, keys and pairs is reckoned.
    "4b-hybrid": Device(
        (
            (1, 2.6), (64, 2.7), (128, 3.0), (256, 4.6), (512, 9.0), (1008, 16.6), (1408, 21.4),
            (2048, 30.6), (4096, 59.0), (8192, 117.0),
        ),
        6.6e-6, 0.47e-6, row_ms=0.028, kv_tokens=1_700_000, weight_tokens=510_000,
    ),
}  # fmt: skip


@dataclass(slots=True)
class _Pending:
    """A launched step of the stand-in."""

    runner: "StandIn"
    done_at: float
    num_samples: int

    def is_computed(self) -> bool:
        return self.runner.now >= self.done_at

    def is_done(self) -> bool:
        return self.runner.now >= self.done_at

    def put_mask(self, index: int, mask: Int32Array) -> None:
        raise NotImplementedError

    def sample(self) -> None:
        raise NotImplementedError

    def result(self) -> StepOutput:
        runner = self.runner
        runner.now = max(runner.now, self.done_at)
        ones = np.ones(self.num_samples, np.int32)
        return StepOutput(ones[:, None], ones, {})

    def drafts(self) -> None:
        """Returns None, because the stand-in drafts nothing."""


@dataclass(slots=True)
class StandIn:
    """A runner that computes nothing, and its device, on which time passes.

    Attributes:
        device: times of steps.
        info: limits of the engine.
        slower: times of steps are multiplied by this, which the calibration does not see.
        launch_ms: milliseconds in which the host launches a step without a graph, likewise.
        now: the clock, in seconds.
    """

    device: Device
    info: EngineInfo
    slower: float = 1.0
    launch_ms: float = 0.0
    now: float = 0.0
    free_at: float = 0.0
    tokens: list[int] = field(default_factory=list[int])

    def clock(self) -> float:
        return self.now

    def prepare(self, step: Step) -> None:
        raise NotImplementedError

    def execute(self, step: Step) -> _Pending:
        compute = step.compute
        lengths, starts = compute.lengths, compute.starts
        is_prompt = (lengths > 1) | (starts == 0)
        keys = int((starts[~is_prompt] + 1).sum())
        chunks = zip(starts[is_prompt].tolist(), lengths[is_prompt].tolist(), strict=True)
        pairs = self.device.pairs(list(chunks))
        tokens, rows = int(lengths.sum()), int((~is_prompt).sum())
        ms = self.slower * self.device.ms(tokens, keys, pairs, rows)
        self.free_at = max(self.free_at, self.now) + ms / 1e3
        pairs_cached = int((starts[is_prompt] * lengths[is_prompt]).sum())
        if pairs_cached > _OWN_PAIRS and tokens not in _LONG_SIZES:
            self.now += self.launch_ms / 1e3
            self.free_at = max(self.free_at, self.now)
        self.tokens.append(tokens)
        return _Pending(self, self.free_at, len(compute.samples))


@dataclass(slots=True)
class Answer:
    """Times of a request in seconds; `gap` is the longest between two of its tokens."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests: `streams` at a time if that is not 0, else `rate` a second, `count` in all.

    Attributes:
        prompt, output: numbers of tokens.
        between: seconds between an answer and the next request of its stream.
    """

    streams: int
    rate: float
    count: int
    prompt: int
    output: int
    between: float


def run(
    device: Device,
    load: Load,
    step_ms: float | None = None,
    slower: float = 1.0,
    launch_ms: float = 0.0,
    size: int | None = None,
) -> tuple[list[Answer], StandIn]:
    """Runs a load, and returns all answers, and the device.

    Args:
        device: times of steps.
        load: the requests.
        step_ms: longest time of a step. Defaults to the engine's default.
        slower: factor of each step's time after the calibration.
        launch_ms: milliseconds in which the host launches a step without a graph.
        size: the most efficient number of tokens of a step. Defaults to what the calibration finds.
    """
    info = EngineInfo(
        model_name="simulated", dtype="bfloat16", num_features=0, hidden=8, vocab_size=1000,
        max_model_len=131072, block_size=16, num_blocks=device.kv_tokens // 16,
        max_num_sequences=256, max_batched_tokens=8192, num_weight_tokens=device.weight_tokens,
        wave_tokens=device.wave_tokens,
    )  # fmt: skip
    runner = StandIn(device, info)
    cost = measured_cost(runner, 1.0, step_ms, runner.clock)
    if size is not None:
        cost.efficient_tokens = size
    runner.slower, runner.launch_ms, runner.tokens = slower, launch_ms, []
    step_ms = cost.default_step_ms if step_ms is None else step_ms
    engine = Engine(runner, overlap=True, step_ms=step_ms, step_cost=cost, clock=runner.clock)
    rng = np.random.default_rng(11)
    start, answers = runner.now, list[Answer]()
    if load.streams:
        due = [start + 0.002 * i for i in range(min(load.streams, load.count))]
    else:
        due = (start + np.cumsum(rng.exponential(1 / load.rate, load.count))).tolist()
    heapq.heapify(due)
    sampling = SamplingParams(max_tokens=load.output)
    left = load.count
    while engine.has_work or due:
        if not engine.has_work:
            runner.now = max(runner.now, due[0])
        while due and due[0] <= runner.now and left:
            ids = rng.integers(0, 1000, load.prompt, dtype=np.int32).tobytes()
            engine.add(AddSequence(len(answers), ids, b"", 0, [], sampling))
            answers.append(Answer(heapq.heappop(due)))
            left -= 1
        done = engine.step()
        for event in done.events if done is not None else ():
            answer, now = answers[event.sequence_id], runner.now
            if event.token_ids:
                if answer.count == 0:
                    answer.first = now
                else:
                    answer.gap = max(answer.gap, now - answer.last)
                answer.last, answer.count = now, answer.count + 1
            if answer.count == load.output and load.streams and left > len(due):
                heapq.heappush(due, now + load.between)
    return answers, runner


def report(answers: Sequence[Answer], load: Load) -> str:
    """One line of figures, without the first and the last requests of a closed loop."""
    edge = load.streams if load.streams and load.count > 3 * load.streams else 0
    part = answers[edge : len(answers) - edge]
    ends = sorted(answer.last for answer in part)
    wall = ends[-1] - ends[0] if edge else max(ends) - part[0].sent
    ttft = np.percentile([a.first - a.sent for a in part], (50, 99)) * 1e3
    tpots = [(a.last - a.first) / max(1, a.count - 1) for a in part]
    both = [(a.first - a.sent, tpot) for a, tpot in zip(part, tpots, strict=True)]
    good = [sum(t <= first and tpot <= token for t, tpot in both) for first, token in LEVELS]
    gap = np.percentile([a.gap for a in part], (50, 99)) * 1e3
    goods = " ".join(f"{count / wall:7.2f}" for count in good)
    return (
        f"{(len(part) - 1) / wall:7.2f} {sum(a.count for a in part) / wall:9.0f} {ttft[0]:8.0f}"
        f" {ttft[1]:8.0f} {1e3 * np.median(tpots):7.1f} {gap[0]:6.0f} {gap[1]:6.0f} {goods}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="8b")
    add("--streams", type=int, default=0, help="requests in flight; 0: an open loop")
    add("--rate", type=float, default=20.0, help="requests a second of an open loop")
    add("--count", type=int, default=640, help="requests")
    add("--prompt", type=int, default=1008, help="tokens")
    add("--output", type=int, default=128, help="tokens")
    add("--between", type=float, default=8.0, help="ms from an answer to the stream's next request")
    add("--slower", type=float, default=1.0, help="factor of each step's time")
    add("--launch", type=float, default=0.0, help="ms of the host for a step without a graph")
    add("--size", type=int, help="most efficient tokens of a step; default: as calibrated")
    add("--bounds", default="default", help="milliseconds of a step, or `default`")
    options = parser.parse_args(arguments)
    load = Load(
        options.streams, options.rate, options.count, options.prompt, options.output,
        options.between / 1e3,
    )  # fmt: skip
    print(f"ms; good: {LEVELS[0]} and {LEVELS[1]} s to the first token and a token")
    print(
        "   bound   req/s     tok/s   TTFT50   TTFT99  TPOT50  gap50  gap99   good1   good2 tokens"
    )
    for bound in options.bounds.split(","):
        step_ms = None if bound == "default" else float(bound)
        device, host_ms = DEVICES[options.device], options.launch
        answers, runner = run(device, load, step_ms, options.slower, host_ms, options.size)
        print(f"{bound:>8} {report(answers, load)} {np.median(runner.tokens):6.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
