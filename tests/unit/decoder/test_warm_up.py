"""Warm-up launches every variant of a kernel that long prompts launch afterwards.

Without a GPU: kernels for an H200 are not run, but what Triton would compile for each launch is
recorded. Steps take the times of an 8B model on an H200, so that they have the sizes of such steps.
"""

# Fakes replace what needs a GPU.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.nn import functional

pytest.importorskip("triton")
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.step_loop import DEVICES, StandIn
from kernels.attention import fused_decode_attention
from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.dense_keys import DenseKeys
from kernels.device import KNOWN_DEVICES, DeviceFacts
from kernels.rows import EnteredStep
from services.decoder import attention
from services.decoder.attention.base import AttentionMetadata
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run import graphs, runner_factory
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.step import Step
from services.decoder.operations import kernel_facts
from services.decoder.operations.ops import Ops
from tests.decoder_harness import write_checkpoint
from tests.gpu_compiler import target_of

H200, CPU = KNOWN_DEVICES["h200"], torch.device("cpu")
TEXT = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 65536,
    "rope_scaling": {"mrope_section": [24, 20, 20]},
}  # fmt: skip


class Launches:
    """The variants that were launched, and kernels of flashinfer that were run."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._backend = make_backend(target_of(H200))
        self._binders: dict[str, Any] = {}

    def note(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = f"{kernel.module}.{kernel.__name__}"
        if (bind := self._binders.get(name)) is None:
            bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[name] = bind
        _, specialization, rest = bind(*arguments, debug=False, **options)
        self.found.add(f"{name} {specialization} {sorted(rest.items())}")

    def take(self) -> set[str]:
        found, self.found = self.found, set()
        return found


class LibraryPrefill:
    """flashinfer's prefill over dense keys, which our own kernel copies in each step."""

    can_be_captured = True

    def __init__(self, launches: Launches, facts: AttentionFacts, *_: Any) -> None:
        self._launches, self._dense = launches, DenseKeys(facts, CPU)

    def suits_graph(self, _: Any) -> bool:
        return True

    def plan(self, metadata: AttentionMetadata, *, captured: bool) -> Any:
        chunks = slice(metadata.num_decodes, None)
        tables = metadata.first_blocks_device[chunks], metadata.seq_lens_device[chunks]

        def run(_: Any, kv_cache: torch.Tensor, *, out: Any) -> None:
            self._dense.gather(kv_cache, metadata.block_ids, *tables)
            self._launches.found.add(f"flashinfer prefill captured={captured}")

        return SimpleNamespace(run=run)


class Timed(StandIn):
    """Computes nothing in the times of an H200, but launches what the runner launches."""

    real: ModelRunner
    num_eager = num_steps = 0

    def execute(self, step: Step) -> Any:
        self.num_steps += 1
        self.num_eager += self.real.computer.stage(step.compute).graphs is None
        self.real.execute(step)
        return super().execute(step)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Lets a runner on the CPU launch the kernels of an H200, which do nothing."""
    found = Launches()

    def launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.note(self, arguments, options)

    class Library:
        """A kernel of flashinfer."""

        def __init__(self, *_: Any) -> None:
            self.name = ""

        def plan(self, _: Any, *, captured: bool | None = None) -> "Library":
            planned = Library()
            planned.name = f"flashinfer captured={captured}"
            return planned

        def run(self, *_: Any, out: Any) -> None:
            found.found.add(self.name)

    flashinfer = ModuleType("services.decoder.attention.flashinfer")
    flashinfer.FlashInferDecode = Library
    flashinfer.FlashInferPrefill = partial(LibraryPrefill, found)
    flashinfer.make_float_workspace = lambda _: None
    of_attention, info_of = runner_factory.attention_facts, runner_factory._info
    fused, allocate = fused_decode_attention.FusedDecodeAttention, EnteredStep.allocate

    def allocated(*sizes: Any) -> EnteredStep:
        entered = allocate(*sizes)
        entered.rows.zero_()
        return entered

    for target, name, value in (
        (JITFunction, "run", launch),
        (DeviceFacts, "of", lambda _: H200),
        (attention, "flashinfer", flashinfer),
        (runner_factory, "attention_facts",
         lambda facts, **options: of_attention(facts, **options | {"has_flashinfer": True})),
        (runner_factory, "_info", lambda *given: structs.replace(info_of(*given), on_gpu=True)),
        (fused_decode_attention, "FusedDecodeAttention", lambda facts, _: fused(facts, CPU)),
        (EnteredStep, "allocate", allocated),
        (functional, "linear", lambda x, weight, _=None: x.new_empty(len(x), len(weight))),
        (torch.Tensor, "addmm_", lambda x, *_, **__: x),
        (kernel_facts, "launch_hiding_tokens", lambda _: 535),
        (graphs.GraphMemory, "__init__", lambda _: None),
        (graphs._GraphSet, "_capture", capture),
        *((Ops, name, zeros(getattr(Ops, name))) for name in ("sample", "greedy")),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value, raising=False)
    monkeypatch.setitem(sys.modules, flashinfer.__name__, flashinfer)
    yield found


def zeros(operation: Any) -> Any:
    """The operation, whose kernel was not run, with token 0 as the result of each row."""
    return lambda *arguments, **keywords: operation(*arguments, **keywords).zero_()


def capture(self: Any, kind: Any, step: Any, rows: Any, sampled: Any = None) -> None:
    """Runs a step as `_GraphSet._capture` does before it captures the step."""
    parts, ops = self.parts, self.parts.model.ops
    metadata = parts.metadata(step, parts.entered.part(step.num_tokens, len(step.seq_lens)))
    metadata.fused = kind.fused
    if not kind.fused:
        metadata.plan = parts.backend.plan(metadata, captured=True)
    with ops.table.for_graph():
        logits = parts.model.logits(parts.forward(step, sampled, metadata))
        token_ids = ops.greedy(logits)
    with ops.table.capturing() as calls:
        graph: Any = SimpleNamespace(replay=lambda: None)
    self._add(kind, graphs._Captured(graph, metadata, logits, token_ids, calls))


def serve(runner: ModelRunner, count: int, length: int) -> tuple[int, int]:
    """Computes prompts at once, with 24 tokens each.

    Returns:
        The number of steps without graphs, and of all steps.
    """
    device = DEVICES["8b"]
    info = structs.replace(
        runner.info, num_weight_tokens=device.weight_tokens, wave_tokens=device.wave_tokens
    )
    timed = Timed(device, info)
    timed.real = runner
    cost = measured_cost(timed, 1.0, None, timed.clock)
    engine = Engine(
        timed, overlap=True, step_ms=cost.default_step_ms, step_cost=cost, clock=timed.clock
    )
    timed.num_eager = timed.num_steps = 0
    sampling = SamplingParams(max_tokens=24)
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, 90, length, dtype=np.int32)
        engine.add(AddSequence(number, ids.tobytes(), b"", 0, [], sampling))
    while engine.has_work:
        engine.step()
    return timed.num_eager, timed.num_steps


@pytest.mark.parametrize(("count", "length"), [(8, 12_000), (3, 32_000)])
def test_long_prompts_launch_nothing_that_warm_up_has_not(
    count: int, length: int, tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a user's first long prompt would wait for a kernel to be compiled or loaded."""
    directory = write_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"]["out_hidden_size"] = TEXT["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))
    options = RunnerOptions(
        model_directory=directory, load_format="dummy", device="cpu", dtype="bfloat16",
        kv_cache_bytes=840 << 20, max_model_len=40_000, max_num_sequences=72,
        max_batched_tokens=2048, kernels="linear=cublaslt",
    )  # fmt: skip
    runner = create_runner(options)
    warm = launches.take()
    expected = {"MixedGraphs", "LongGraphs", "DecodeGraphs"}
    assert {each.name for each in runner.computer.graphs} >= expected
    num_eager, num_steps = serve(runner, count, length)
    assert num_eager < num_steps / 10, "graphs run most steps"
    served = launches.take()
    assert served <= warm
    # Without graphs of such steps, they run eagerly.
    every = runner.computer.graphs
    runner.computer.graphs = [each for each in every if each.name != "LongGraphs"]
    num_eager, _ = serve(runner, count, length)
    assert num_eager > 20
    served = launches.take()
    assert served >= {"flashinfer captured=False", "flashinfer prefill captured=False"}
    assert served <= warm
    # The same prompts launch other variants if warm-up leaves out some steps.
    monkeypatch.setattr(runner_factory, "_warm_up", lambda *_, **__: None)
    runner = create_runner(options)
    cold = launches.take()
    serve(runner, count, length)
    assert not launches.take() <= cold
