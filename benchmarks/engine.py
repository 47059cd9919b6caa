"""The decoder's engine alone: no gRPC, no HTTP, no text. Prints each figure with its floor.

    python -m benchmarks.engine --model DIR --load-format dummy --batches 1,64,256

Decode: a step's wall time is the mean over many steps of the real engine (schedule, run, sample,
postprocess), with the context as the mean over its sequences, and beside it the device's own time
for one captured step and the host's time in each part. Prefill: prompts of several lengths, one at
a time, or several at once (`--prompts 1008,8x1008`). `--profile` adds where the time goes, by
kernel. `--sizes 960,1024` times steps of so many tokens, of 63 decodes and a prompt, and says which
size the decoder would choose.
"""

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner

# Measured on an H200 with large copies and GEMMs; see benchmarks/LOG.md.
BANDWIDTH = 4.3e12  # bytes/s
FLOPS = 790e12  # bf16
_PROFILED = 16  # kernels of a profile
_SETTLE_STEPS = 10  # decodes before the first that is timed
_BESIDE = 63  # decodes beside a prompt


def weight_elements(config: ModelSpec, tokens: int = 1, *, used: bool = False) -> float:
    """Elements that a step reads: all layers and the head; of experts, as many as its tokens touch
    if each goes to any with the same probability. `used`: what one token is multiplied with.
    """
    text, moe, linear = config.text, config.text.moe, config.text.linear_attention
    num_queries = text.num_heads * (3 if text.output_gate else 2)  # with the output projection's
    found = text.vocab_size * text.hidden_size
    for layer in range(text.num_layers):
        mixer = text.head_dim * (num_queries + 2 * text.num_kv_heads)
        if linear is not None and layer in text.linear_layers:
            mixer = linear.num_channels + 2 * linear.value_size + 2 * linear.num_value_heads
        width = float(text.intermediate_size)
        if moe is not None and text.has_experts(layer):
            missed = (1 - moe.top_k / moe.num_experts) ** tokens
            width = moe.intermediate_size * moe.num_experts * (1 - missed)
            if used:
                width = moe.intermediate_size * moe.top_k
            width += moe.shared_intermediate_size + moe.num_experts / 3
        found += text.hidden_size * (mixer + 3 * width)
    return found


def decode_floor_s(config: ModelSpec, batch: int, context: int) -> float:
    """Bytes that a step must read, over the bandwidth (bf16); recurrent states are written, too."""
    text, linear = config.text, config.text.linear_attention
    per_token = 2 * 2 * text.num_kv_heads * text.head_dim * len(text.attention_layers)
    states = 0
    if linear is not None:
        states = 2 * 4 * linear.value_size * linear.key_head_dim * len(text.linear_layers)
    per_sequence = context * per_token + states
    return (2 * weight_elements(config, batch) + batch * per_sequence) / BANDWIDTH


def prefill_floor_s(config: ModelSpec, tokens: int) -> float:
    """Operations of the layers for one prompt, over the rate; the head sees one row, and the delta
    rule's own few are left out. Where that is
    longer, as with experts, bytes of the weights over the bandwidth.
    """
    text = config.text
    head = text.vocab_size * text.hidden_size
    linear = 2 * tokens * (weight_elements(config, used=True) - head)
    attention = 2 * tokens**2 * text.num_heads * text.head_dim * len(text.attention_layers)
    return max((linear + attention) / FLOPS, 2 * weight_elements(config, tokens) / BANDWIDTH)


def sequence(
    number: int, prompt: int, completion: int, vocab: int, adapter: int = -1
) -> AddSequence:
    """Returns a greedy sequence of random tokens, which shares no cached prefix with others.

    Args:
        number: id of the sequence, and seed of its tokens.
        prompt: number of tokens of the prompt.
        completion: number of tokens of the answer.
        vocab: size of the vocabulary.
        adapter: slot of the adapter; -1 for the base model alone.
    """
    ids = np.random.default_rng(number).integers(0, vocab, prompt, dtype=np.int32)
    return AddSequence(
        number, ids.tobytes(), b"", 0, [], SamplingParams(max_tokens=completion),
        adapter=adapter, cache_salt=os.urandom(8),
    )  # fmt: skip


def add(engine: Engine, number: int, prompt: int, completion: int, vocab: int) -> None:
    """Queues a `sequence` of the base model."""
    engine.add(sequence(number, prompt, completion, vocab))


class Waiting:
    """A context that counts the seconds for which this process waits for the device's events.

    Attributes:
        seconds: seconds since the context was entered.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._original = torch.cuda.Event.synchronize

    def __enter__(self) -> "Waiting":
        original = self._original

        def timed(event: torch.cuda.Event) -> None:
            begin = time.perf_counter()
            original(event)
            self.seconds += time.perf_counter() - begin

        torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.Event.synchronize = self._original  # type: ignore[method-assign]


def freeze_garbage() -> None:
    """Sets the garbage collection as the engine process does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def measure_decode(
    runner: ModelRunner, batch: int, context: int, steps: int
) -> tuple[float, float]:
    """Seconds of a step, and of those the host's in `Engine.step` without the wait for the ids.

    The context is the mean over sequences and timed steps: sequences that started first are longer.
    """
    engine = Engine(runner, overlap=torch.cuda.is_available())
    vocab = runner.info.vocab_size
    to_start = batch * context / runner.info.max_batched_tokens
    prompt = max(1, round(context - to_start / 2 - _SETTLE_STEPS - steps / 2))
    for number in range(batch):
        add(engine, number, prompt, steps + batch + 4 * _SETTLE_STEPS, vocab)
    started = 0
    while started < batch:
        done = engine.step()
        assert done is not None
        started += sum(1 for event in done.events if event.start is not None)
    for _ in range(_SETTLE_STEPS):
        engine.step()
    with Waiting() as waiting:
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall = time.perf_counter() - begin
    for number in range(batch):
        engine.abort(number)
    while engine.has_work:
        engine.step()
    return wall / steps, (wall - waiting.seconds) / steps


def measure_prefill(runner: ModelRunner, count: int, prompt: int, repeats: int) -> float:
    """Median seconds from the arrival of `count` prompts at an idle engine to all their first
    tokens.
    """
    engine = Engine(runner, overlap=torch.cuda.is_available())
    taken = []
    for repeat in range(repeats + 2):
        begin = time.perf_counter()
        for number in range(count):
            add(engine, 10_000 + repeat * count + number, prompt, 1, runner.info.vocab_size)
        started = 0
        while started < count:
            done = engine.step()
            started += sum(bool(event.token_ids) for event in done.events) if done else 0
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def measure_sizes(runner: ModelRunner, sizes: list[int], context: int) -> list[float]:
    """Seconds of steps of so many tokens: decodes of the context and one prompt; of four the
    fastest.
    """
    engine = Engine(runner, overlap=False)
    vocab, found = runner.info.vocab_size, []
    for number in range(_BESIDE):
        add(engine, number, context, 16 + 4 * len(sizes), vocab)
    while engine.scheduler.num_waiting or not engine.scheduler.is_steady:
        engine.step()
    for size in sizes:
        taken = []
        for _ in range(4):
            add(engine, _BESIDE + len(found), size - _BESIDE, 1, vocab)
            begin = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - begin)
        found.append(min(taken))
    return found


def print_sizes(runner: ModelRunner, sizes: list[int], context: int) -> None:
    """Prints how long steps of so many tokens take, and which size the decoder would choose."""
    print(f"{_BESIDE} decodes and a prompt")
    print(f"{'tokens':>10} {'ms':>8} {'us/token':>8}")
    for size, taken in zip(sizes, measure_sizes(runner, sizes, context), strict=True):
        print(f"{size:10} {taken * 1e3:8.2f} {taken / size * 1e6:8.2f}")
    cost = measured_cost(runner, 1.0, None)
    chosen = "no bound" if cost.efficient_tokens == sys.maxsize else cost.efficient_tokens
    print(f"within {cost.default_step_ms:.1f} ms: {chosen}")


def print_profile(title: str, work: Callable[[], object]) -> None:
    """Prints the time of each kernel (of each operation, without a GPU)."""
    on_gpu = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        work()
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [(getattr(e, field), e.count, e.key) for e in profile.key_averages()]
    total = sum(micros for micros, _, _ in found) or 1
    print(f"profile of {title}: {total / 1e3:.2f} ms")
    for micros, count, name in sorted(found, reverse=True)[:_PROFILED]:
        print(f"{micros / 1e3:9.2f} ms {100 * micros / total:5.1f} % {count:6} x  {name[:90]}")


def device_step_s(runner: ModelRunner, batch: int, repeats: int = 30) -> float | None:
    """Seconds that the device takes for one captured step, by events; None without graphs."""
    if not runner.computer.graphs:
        return None
    captured = runner.computer.graphs[0]._captured  # type: ignore[attr-defined]
    kinds = [kind for kind in captured if kind.size >= batch]
    graph = captured[min(kinds, key=lambda kind: (kind.size, not kind.fused))].graph
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", default="128,1008,2048,8192")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sizes", default="", help="tokens of steps of decodes and a prompt")
    parser.add_argument("--profile", action="store_true", help="of each prefill and each batch")
    arguments = parser.parse_args()
    prompts = [_counted(part) for part in arguments.prompts.split(",")]
    config = read_spec(arguments.model)
    batches = [int(part) for part in arguments.batches.split(",")]
    sizes = [int(part) for part in arguments.sizes.split(",") if part]
    longest = arguments.context + arguments.steps + max(batches) + 64
    options = RunnerOptions(
        model_directory=arguments.model,
        device=arguments.device,
        load_format=arguments.load_format,
        max_num_sequences=max(batches + [_BESIDE + 1 for _ in sizes[:1]]),
        max_model_len=max(longest, *sizes, *(tokens + 16 for _, tokens in prompts)),
    )
    begin = time.perf_counter()
    runner = create_runner(options)
    freeze_garbage()
    print(f"ready after {time.perf_counter() - begin:.1f} s; {runner.info}")
    print(f"decode, context {arguments.context}: ms per step")
    print(f"{'batch':>6} {'step':>8} {'device':>8} {'host':>8} {'floor':>8} {'x floor':>8}")
    for batch in batches:
        step, host = measure_decode(runner, batch, arguments.context, arguments.steps)
        device = device_step_s(runner, batch)
        floor = decode_floor_s(config, batch, arguments.context)
        shown = f"{device * 1e3:8.3f}" if device else f"{'-':>8}"
        print(
            f"{batch:6} {step * 1e3:8.3f} {shown} {host * 1e3:8.3f} {floor * 1e3:8.3f} "
            f"{step / floor:8.2f}"
        )
    print("prefill: ms to the first token of all prompts")
    print(f"{'prompts':>10} {'time':>8} {'floor':>8} {'x floor':>8}")
    for count, tokens in prompts:
        taken = measure_prefill(runner, count, tokens, 10)
        floor = count * prefill_floor_s(config, tokens)
        figures = f"{taken * 1e3:8.2f} {floor * 1e3:8.2f} {taken / floor:8.2f}"
        print(f"{f'{count} x {tokens}':>10} {figures}")
    if sizes:
        print_sizes(runner, sizes, arguments.context)
    if arguments.profile:
        for count, tokens in prompts:
            title = f"three prefills of {count} x {tokens} tokens"
            print_profile(title, functools.partial(measure_prefill, runner, count, tokens, 1))
        for batch in batches:
            work = functools.partial(measure_decode, runner, batch, arguments.context, 20)
            print_profile(f"{batch} prompts of {arguments.context} tokens, 30 steps", work)


def _counted(text: str) -> tuple[int, int]:
    """Count and tokens: `8x1008` is (8, 1008), and `1008` is (1, 1008)."""
    count, _, tokens = text.rpartition("x")
    return int(count or 1), int(tokens)


if __name__ == "__main__":
    main()
