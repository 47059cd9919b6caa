"""Steps with adapters beside steps of the base model, on the decoder's engine. Needs a GPU.

    python -m benchmarks.adapters --work DIR [--rank 16] [--kernels] [--tiny]

The model has the 8B's shape and random weights. Eight random adapters in PEFT's layout change all
linear layers. The script makes them in DIR, starts one engine without adapters and then one with
them, and prints the time of decode steps:

- requests without adapter, on both engines. The aim is 2 %.
- 64 requests over eight adapters. The aim is 90 % of the base model's tokens per second.
- one request with an adapter. The aim is 1.1 times the base model's time per token.

`--kernels` times shrink and expand alone first, at each of the layer's projections, and prints the
time in which their bytes can be read. `--tiny` runs a small model on any device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.engine import BANDWIDTH
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.device import DeviceFacts
from kernels.launches import captured_graph
from services.common.model_spec import TextSpec
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts
from services.decoder.operations.ops import Ops

NUM_ADAPTERS = 8
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
    """

    name: str
    slots: list[int]


LOADS = (
    Load("1 without", [-1]),
    Load("1 with an adapter", [3]),
    Load("64 without", [-1] * 64),
    Load("64 with one adapter", [3] * 64),
    Load("64 over eight", [n % NUM_ADAPTERS for n in range(64)]),
    Load("64, half without", [n % NUM_ADAPTERS if n % 2 else -1 for n in range(64)]),
)


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
        for count in (1, 8, 64, 1024, 4096):
            for slots in (0, 1, NUM_ADAPTERS):
                ids = torch.arange(count, device=device) % max(slots, 1) - (slots == 0)
                adapters = AdapterRows(ids, NUM_ADAPTERS, 0, NUM_ADAPTERS, in_graph=True)
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
    write_model(arguments.work / "model", text)
    adapters = tuple(arguments.work / f"adapter-{n}" for n in range(NUM_ADAPTERS))
    for number, directory in enumerate(adapters):
        write_adapter(directory, text, arguments.rank, number)
    prompts = (64, 1008) if arguments.tiny else (64, 256, 1008, 4096)
    options = RunnerOptions(
        model_directory=arguments.work / "model",
        load_format="dummy",
        max_num_sequences=64,
        max_model_len=arguments.context + arguments.steps + 256 + max(prompts),
        kv_cache_bytes=(64 << 20) if arguments.tiny else (24 << 30),
    )
    figures: list[dict[str, float]] = []
    for given in ((), adapters):
        begin = time.perf_counter()
        runner = create_runner(
            replace(options, adapters=given, max_adapters=len(given)),
        )
        print(f"{len(given)} adapters: ready after {time.perf_counter() - begin:.1f} s")
        found: dict[str, float] = {}
        for load in LOADS:
            if given or max(load.slots) < 0:
                taken = step_s(runner, load, arguments.context, arguments.steps)
                found[load.name] = taken
        for length in prompts:
            found[f"prompt of {length} without"] = prompt_s(runner, -1, length)
            if given:
                found[f"prompt of {length} with"] = prompt_s(runner, 3, length)
        figures.append(found)
        del runner
        torch.cuda.empty_cache()
    base, loaded = figures
    print(f"{'row':>28} {'ms':>8} {'x base':>8}")
    for name, taken in loaded.items():
        compared = base.get(name)
        if compared is None:  # the same load without adapters
            of = f"{name.rsplit(' ', 1)[0]} without" if name.startswith("prompt") else None
            compared = base[of or f"{name.split(' ')[0].rstrip(',')} without"]
        print(f"{name:>28} {taken * 1e3:8.3f} {taken / compared:8.3f}")


if __name__ == "__main__":
    main()
