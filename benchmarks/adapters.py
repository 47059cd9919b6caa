"""Steps with adapters beside steps of the base model, on the decoder's engine. Needs a GPU.

    python -m benchmarks.adapters --work DIR [--rank 16] [--rounds 2] [--kernels] [--tiny]

The model has the 8B's shape and random weights. Eight random adapters in PEFT's layout change all
linear layers. One engine has no adapters, and another one has all eight. Both stay alive and are
measured in turn. They take about 65 GB. Each row is printed as soon as it is known, with the time
since the start, and with the most that the time may be of the base engine's time for as many
requests:

- 1.02 for requests without adapter on the engine with adapters,
- 1.11 for 64 requests over eight adapters, which is 90 % of the base model's tokens per second,
- 1.10 for one request with an adapter.

The stages of both starts are printed, too, with the Triton kernels that were compiled. `--kernels`
times shrink and expand alone first, at each of the layer's projections, and prints the time in
which their bytes can be read. `--tiny` runs a small model on any device.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.engine import BANDWIDTH
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.device import DeviceFacts
from kernels.launches import captured_graph
from services.common.model_spec import TextSpec
from services.common.process import progress
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts
from services.decoder.operations.ops import Ops

NUM_ADAPTERS = 8
_STARTED = time.time()
_SETTLE_STEPS = 10


def write_model(directory: Path, text: TextSpec) -> None:
    """Writes the config.json of a text model of this shape, for random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size, "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers, "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads, "head_dim": text.head_dim,
        "rms_norm_eps": text.rms_norm_eps, "rope_theta": text.rope.theta,
        "max_position_embeddings": 65536, "eos_token_id": 0,
        "tie_word_embeddings": text.tie_word_embeddings,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def projections(text: TextSpec) -> dict[str, tuple[int, int]]:
    """Returns (rows, columns) of a layer's linear modules, by name."""
    hidden, inner = text.hidden_size, text.intermediate_size
    query, kv = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    return {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def write_adapter(directory: Path, text: TextSpec, rank: int, seed: int) -> None:
    """Writes a random adapter of all linear layers in PEFT's layout, in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def random(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        return (drawn * 0.3).bfloat16()

    for layer in range(text.num_layers):
        for name, (rows, columns) in projections(text).items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = random(rank, columns)
            tensors[f"{module}.lora_B.weight"] = random(rows, rank)
    save_file(tensors, str(directory / "adapter_model.safetensors"))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode at the same time.

    Attributes:
        name: name of the row.
        slots: slot of each request's adapter, -1 for none.
        limit: wanted ratio to the base engine's time, at most. 0 if nothing is wanted.
    """

    name: str
    slots: list[int]
    limit: float = 0.0


_OVER_EIGHT = [n % NUM_ADAPTERS for n in range(64)]
BASE_LOADS = (Load("base, 1", [-1]), Load("base, 64", [-1] * 64))
LOADS = (
    Load("1 with an adapter", [3], 1.1),
    Load("64 over eight", _OVER_EIGHT, 1 / 0.9),
    Load("1, none in the step", [-1], 1.02),
    Load("64, none in the step", [-1] * 64, 1.02),
    Load("64 with one adapter", [3] * 64),
)


class Clock(logging.Handler):
    """Prints lines with the seconds since the program's start, and the stages of engines' starts.

    Attributes:
        compiled: number of Triton kernels that were compiled since the last stage.
        compiled_s: seconds that their compilation took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled, self.compiled_s = 0, 0.0
        self._stage = ""

    def print(self, line: str) -> None:
        """Prints a line at once."""
        print(f"[{time.time() - _STARTED:5.1f} s] {line}", flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        stage = getattr(record, "fields", {}).get("stage", "")
        if stage and stage != self._stage:
            self.note(f"  {stage}")
            self._stage = stage

    def note(self, line: str) -> None:
        """Prints a line with the kernels that were compiled since the last one."""
        if self.compiled:
            line += f" (before: {self.compiled} kernels compiled in {self.compiled_s:.1f} s)"
        self.compiled, self.compiled_s = 0, 0.0
        self.print(line)

    def count_compilations(self) -> None:
        """Counts compilations from now on."""
        from triton import knobs

        def listen(*, times: Any, cache_hit: bool, **_: object) -> None:  # noqa: ANN401
            if not cache_hit:
                self.compiled += 1
                self.compiled_s += times.total / 1e6

        knobs.compilation.listener = listen


def step_s(runner: ModelRunner, load: Load, context: int, steps: int) -> float:
    """Returns the median seconds of a decode step of a load, whose prompts have been computed."""
    engine = Engine(runner, overlap=torch.cuda.is_available())
    for number, slot in enumerate(load.slots):
        ids = np.random.default_rng(number).integers(1, runner.info.vocab_size, context)
        sampling = SamplingParams(max_tokens=steps + len(load.slots) + 4 * _SETTLE_STEPS)
        engine.add(
            AddSequence(
                number, ids.astype(np.int32).tobytes(), b"", 0, [], sampling, adapter=slot,
                cache_salt=b"%d %d" % (number, slot),
            )
        )  # fmt: skip
    started = 0
    while started < len(load.slots):
        done = engine.step()
        started += sum(event.start is not None for event in done.events) if done else 0
    for _ in range(_SETTLE_STEPS):
        engine.step()
    taken: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    for number in range(len(load.slots)):
        engine.abort(number)
    while engine.has_work:
        engine.step()
    return statistics.median(taken)


def prompt_s(runner: ModelRunner, slot: int, length: int) -> float:
    """Returns the median seconds of a prompt of a length alone, to its first token."""
    taken: list[float] = []
    for number in range(6):
        engine = Engine(runner, overlap=False)
        ids = np.random.default_rng(number + length).integers(1, runner.info.vocab_size, length)
        sampling = SamplingParams(max_tokens=1)
        salt = b"%d %d %d" % (number, slot, length)
        message = AddSequence(
            0, ids.astype(np.int32).tobytes(), b"", 0, [], sampling, adapter=slot, cache_salt=salt
        )
        begin = time.perf_counter()
        engine.add(message)
        while engine.has_work:
            engine.step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def measure_kernels(text: TextSpec, rank: int, device: torch.device) -> None:
    """Prints microseconds of shrink and expand in a CUDA graph, by projection and tokens."""
    ops = Ops(table.resolve(KernelFacts(DeviceFacts.of(device), text, torch.bfloat16)))
    sizes = projections(text)
    layers = {
        "qkv": [sizes[f"self_attn.{name}_proj"] for name in "qkv"],
        "o": [sizes["self_attn.o_proj"]],
        "gate_up": [sizes["mlp.gate_proj"], sizes["mlp.up_proj"]],
        "down": [sizes["mlp.down_proj"]],
    }
    print(f"{'layer':>8} {'tokens':>6} {'slots':>5} {'shrink':>8} {'expand':>8} {'bytes':>8}  us")
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    totals: dict[tuple[int, int], float] = {}
    for name, parts in layers.items():
        rows, columns = tuple(n for n, _ in parts), parts[0][1]
        # A layer's factors come from memory, as in a step: copies that L2 does not hold together.
        made = [
            SlotFactors.zeros(rows, columns, NUM_ADAPTERS, rank, like)
            for _ in range(max(1, (100 << 20) // (2 * rank * NUM_ADAPTERS * (sum(rows) + columns))))
        ]
        for count in (8, 64, 1024, 4096):  # one token has GEMVs of its own
            for slots in (0, 1, NUM_ADAPTERS):
                ids = torch.arange(count, device=device) % max(slots, 1) - (slots == 0)
                adapters = AdapterRows(ids, NUM_ADAPTERS, 0, NUM_ADAPTERS, in_graph=True)
                adapters = ops.group_adapters(adapters)  # once in a step
                kernels = ops.for_tokens(count)
                x = torch.randn(count, columns, device=device).bfloat16()
                out = torch.randn(count, sum(rows), device=device).bfloat16()
                expand = kernels.expand_adapters
                if name == "gate_up":
                    expand = kernels.expand_adapters_swiglu
                products = kernels.shrink_adapters(x, None, made[0], adapters)
                first = graph_us(
                    [
                        lambda f=f, x=x, k=kernels, r=adapters: k.shrink_adapters(x, None, f, r)
                        for f in made
                    ]
                )
                second = graph_us(
                    [
                        lambda f=f, o=out, p=products, e=expand, r=adapters: e(o, p, f, r)
                        for f in made
                    ]
                )
                totals[count, slots] = totals.get((count, slots), 0.0) + first + second
                used = min(slots, count)
                size = 2 * rank * used * (sum(rows) + len(rows) * columns) + 4 * out.numel()
                floor = size / BANDWIDTH * 1e6
                print(f"{name:>8} {count:6} {slots:5} {first:8.2f} {second:8.2f} {floor:8.2f}")
    for (count, slots), total in totals.items():
        step = total * text.num_layers / 1e3
        print(f"{count} tokens, {slots} slots: {total:.1f} us a layer, {step:.3f} ms a step")


def graph_us(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Returns microseconds of a call, of several that one CUDA graph launches in turn."""
    calls = calls * max(1, 32 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with captured_graph(None) as graph:
            for call in calls:
                call()
    taken: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(taken)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="directory of model and adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all rows")
    parser.add_argument("--prompts", default="256,1008", help="lengths of prompts to time")
    parser.add_argument("--kernels", action="store_true", help="time the kernels alone first")
    parser.add_argument("--tiny", action="store_true", help="a small model on any device")
    arguments = parser.parse_args()
    text = TEXT_SHAPES["8b"]
    if arguments.tiny:
        text = replace(
            text, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=16, vocab_size=512,
        )  # fmt: skip
    if arguments.kernels:
        measure_kernels(text, arguments.rank, torch.device("cuda", 0))
    clock = Clock()
    if torch.cuda.is_available():
        clock.count_compilations()
    logging.getLogger(progress.__name__).addHandler(clock)
    logging.getLogger(progress.__name__).setLevel(logging.INFO)
    write_model(arguments.work / "model", text)
    adapters = tuple(arguments.work / f"adapter-{n}" for n in range(NUM_ADAPTERS))
    with ThreadPoolExecutor() as pool:
        writes = [
            pool.submit(write_adapter, directory, text, arguments.rank, number)
            for number, directory in enumerate(adapters)
        ]
        for write in writes:
            write.result()
    clock.print("adapters written")
    options = RunnerOptions(
        model_directory=arguments.work / "model",
        load_format="dummy",
        max_num_sequences=64,
        max_batched_tokens=2048,
        max_model_len=arguments.context + arguments.steps + 256,
        kv_cache_bytes=(64 << 20) if arguments.tiny else (14 << 30),
    )
    measure(options, adapters, arguments, clock)


def measure(
    options: RunnerOptions, adapters: tuple[Path, ...], arguments: argparse.Namespace, clock: Clock
) -> None:
    """Starts both engines, and prints rows of each in turn."""
    base: dict[int, float] = {}  # seconds of the base engine, by number of requests
    prompts: dict[int, float] = {}  # the same, by length of a prompt
    lengths = [int(length) for length in arguments.prompts.split(",") if length]
    plain = started(options, clock)
    loaded: ModelRunner | None = None
    for _ in range(arguments.rounds):
        for load in BASE_LOADS:
            base[len(load.slots)] = taken = step_s(plain, load, arguments.context, arguments.steps)
            clock.print(f"{load.name:<28} {taken * 1e3:8.3f} ms a step")
        for length in lengths:
            prompts[length] = prompt_s(plain, -1, length)
        if loaded is None:
            chosen = replace(options, adapters=adapters, max_adapters=len(adapters))
            loaded = started(chosen, clock)
        for load in LOADS:
            taken = step_s(loaded, load, arguments.context, arguments.steps)
            line = f"{load.name:<28} {taken * 1e3:8.3f} ms a step"
            line += f" {taken / base[len(load.slots)]:7.3f} x base"
            clock.print(line + (f", wanted <= {load.limit:.2f}" if load.limit else ""))
        for length in lengths:
            for slot, kind in ((-1, "without"), (3, "with")):
                taken = prompt_s(loaded, slot, length)
                row = f"prompt of {length} {kind}"
                ratio = taken / prompts[length]
                clock.print(f"{row:<28} {taken * 1e3:8.3f} ms        {ratio:7.3f} x base")


def started(options: RunnerOptions, clock: Clock) -> ModelRunner:
    """Starts an engine, and prints how long this takes."""
    begin = time.perf_counter()
    runner = create_runner(options)
    seconds = time.perf_counter() - begin
    clock.note(f"{len(options.adapters)} adapters: ready after {seconds:.1f} s")
    return runner


if __name__ == "__main__":
    main()
