"""Steps padded for CUDA graphs, and what happens when a capture fails. Without a GPU."""

# Fakes replace single methods of the graphs and of the backend.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false
# pyright: reportAttributeAccessIssue=false

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.decoder.attention.base import AttentionMetadata, StepLengths
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.engine.run.graph_sizes import (
    adapted_sizes,
    crowded_buckets,
    decode_buckets,
    long_buckets,
    mixed_buckets,
    padded_decodes,
    prompt_buckets,
)
from services.decoder.engine.run.graphs import (
    DecodeGraphs,
    Graphs,
    Kind,
    LongGraphs,
    MixedGraphs,
    PromptGraphs,
    StepParts,
    pad_decodes,
    pad_mixed,
)
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.step_computer import StepComputer
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.operations.kernel_facts import attention_facts
from tests.decoder_harness import Harness, completion_of, write_checkpoint
from tests.unit.decoder.test_runner import start_text

KINDS = (DecodeGraphs, PromptGraphs, MixedGraphs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def harness(directory: Path) -> Harness:
    return Harness(directory)


def test_padding_keeps_places_and_touches_nothing_real(harness: Harness) -> None:
    """A padded step's arrays lie where any step of that bucket has them; its padding is scratch."""
    runner = harness.runner
    sequences = [start_text(harness)]
    harness.step(harness.chunk(sequences[0]))
    chunk = harness.chunk(sequences[0])
    step = harness.inputs(chunk)
    full = runner.computer.scratch([1] * 4)
    padded = pad_decodes(step, 4, full)
    memory: Any = None
    graphs = DecodeGraphs(runner.computer.parts, memory)
    padded.block_updates = np.array([5]), np.array([7], np.int32)
    second, first = (
        runner.computer.stage_inputs(full, graphs).places,
        runner.computer.stage_inputs(padded, graphs).places,
    )
    for name in ("tokens", "chunks"):
        assert getattr(first, name) == getattr(second, name)
    assert runner.computer.staging.host(first.tokens)[0].tolist() == [0, -1, -1, -1]
    rows = padded.chunks[0].tolist()
    assert rows == [0] + [runner.computer.scratch_row] * 3
    table = runner.computer.state.rows.blocks
    assert table[runner.computer.scratch_row, 0] == runner.info.num_blocks
    assert runner.computer.staging.host(first.chunks)[2:, 0].tolist() == [5, 7]
    assert runner.computer.staging.host(first.chunks)[2, 1:].tolist() == [-1] * 3
    sequences[0].num_in_flight = 0
    harness.finish(sequences[0])


def test_a_padded_mixture_has_its_tokens_together_and_its_sequences_apart(harness: Harness) -> None:
    runner = harness.runner
    decodes = [start_text(harness, row) for row in range(2)]
    for sequence in decodes:
        harness.step(harness.chunk(sequence))
    prompts = [start_text(harness, row) for row in (2, 3)]
    chunks = [harness.chunk(sequence) for sequence in decodes]
    chunks += [harness.chunk(prompts[0], 5), harness.chunk(prompts[1])]
    used = sum(chunk.length for chunk in chunks)
    step = harness.inputs(*chunks)
    padded = dataclasses.replace(step)
    pad_mixed(padded, 64, 4, 3, runner.computer.scratch([1]))
    assert padded.num_decodes == 4
    assert padded.num_tokens == 64
    assert np.diff(padded.cu_query_lens).tolist() == [1, 1, 0, 0, 5, 10, 0, 0]
    places = [0, 1, 4, 5]
    assert padded.seq_lens[places].tolist() == step.seq_lens.tolist()
    assert padded.chunks[0, places].tolist() == [0, 1, 2, 3]
    assert padded.chunks[1, places].tolist() == step.chunks[1].tolist() == [11, 11, 5, 10]
    others = [2, 3, 6, 7]
    assert not padded.seq_lens[others].any()
    assert padded.chunks[0, others].tolist() == [runner.computer.scratch_row] * 4
    assert not padded.chunks[1, others].any()
    # Three sample: two decodes and the whole prompt. Padding samples for the scratch row.
    assert padded.samples.tolist() == [0, 1, 5, 7]
    staged = runner.computer.stage_inputs(padded).places
    found = runner.computer.staging.host(staged.tokens)
    assert found.shape == (6, 64)
    assert np.array_equal(found[:, :used], step.tokens)
    assert found[0, used:].tolist() == [-1] * (64 - used)
    runner.computer.staging.upload()
    assert runner.computer.staging.device(staged.sampled_tokens).tolist() == [
        0,
        1,
        used - 1,
        used - 1,
    ]
    assert runner.computer.staging.device(staged.sampled_rows).tolist() == [
        0,
        1,
        3,
        runner.computer.scratch_row,
    ]
    for sequence in (*decodes, *prompts):
        sequence.num_in_flight = 0
        harness.finish(sequence)


class CapturingBackend(SdpaBackend):
    """A backend that says that its captured chunks are faster, and has a work list."""

    def captures_chunks(self, step: StepLengths) -> bool:
        return True

    def list_work(self, step: StepLengths, *, captured: bool) -> np.ndarray:
        return np.zeros((step.num_tokens // 64 + len(step.seq_lens), 8), np.int32)


def parts_of(runner: ModelRunner, backend: type[SdpaBackend] = CapturingBackend) -> StepParts:
    """The runner's parts, with another backend."""
    facts = attention_facts(runner.computer.model.ops.table.facts, block_size=4)
    return dataclasses.replace(runner.computer.parts, backend=backend(facts))


NO_MEMORY: Any = None  # graphs that capture nothing


class FailingCaptures:
    """A mixin of graphs of which one is captured, which cannot run, and the next one fails."""

    @property
    def name(self) -> str:
        return type(self).__mro__[2].__name__

    def capture(self, step: StepInputs) -> None:
        if self.kinds:
            raise RuntimeError("out of shared memory")
        captured: Any = None  # a step that replayed it would raise
        self._add(Kind(step.num_tokens), captured)


class UntouchedCaptures:
    """A mixin of graphs of which none is captured."""

    @property
    def name(self) -> str:
        return type(self).__mro__[2].__name__

    def capture(self, step: StepInputs) -> None:
        pass


@pytest.mark.parametrize("failing", KINDS)
def test_a_kind_of_step_whose_capture_fails_runs_eagerly(
    directory: Path, caplog: pytest.LogCaptureFixture, failing: type[Graphs]
) -> None:
    """Even if some of its sizes were captured before; the other kinds keep their graphs."""
    harness = Harness(directory)
    expected = harness.generate(start_text(harness), 8)
    parts = parts_of(harness.runner)
    wanted: list[tuple[Any, list[int]]] = []
    for kind in KINDS:
        mixin = FailingCaptures if kind is failing else UntouchedCaptures
        graphs = type("Fake", (mixin, kind), {})(parts, NO_MEMORY)
        wanted.append((graphs, [1, 2] if kind is DecodeGraphs else [64, 128]))
    with caplog.at_level(logging.WARNING):
        harness.runner.computer.capture_graphs(wanted)
    names = {graphs.name for graphs in harness.runner.computer.graphs}
    assert names == {kind.__name__ for kind in KINDS} - {failing.__name__}
    assert f"{failing.__name__}: capture failed" in caplog.text
    assert "out of shared memory" in caplog.text
    assert harness.generate(start_text(harness, 1), 8) == expected


def test_eager_steps_sample_as_many_rows_as_captured_decodes_beside_graphs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of GEMMs loads a kernel for each further number, and waits for the device then."""
    harness = Harness(directory)
    computer, rows = harness.runner.computer, list[int]()
    logits = computer.model.logits

    def noted(hidden: torch.Tensor, **keywords: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden, **keywords)

    monkeypatch.setattr(computer.model, "logits", noted)

    def tokens() -> list[list[int]]:
        sequences = [start_text(harness, row) for row in range(6)]
        parts = [harness.chunk(sequence, 4) for sequence in sequences[5:]]
        harness.step(*map(harness.chunk, sequences[:5]), *parts)
        for _ in range(3):
            harness.step(*map(harness.chunk, sequences))
        for sequence in sequences:
            harness.finish(sequence)
        return [completion_of(sequence) for sequence in sequences]

    expected = tokens()
    assert rows == [5, 6, 6, 6]
    computer.graphs = [cast("Any", SimpleNamespace(pad=lambda _: False))]
    rows.clear()
    assert tokens() == expected
    assert rows == [6, 6, 6, 6]


def test_samples_are_padded_to_the_next_number_of_captured_decodes() -> None:
    assert [padded_decodes(n, 256) for n in (0, 1, 5, 65, 129, 256)] == [1, 1, 6, 72, 144, 256]
    assert [padded_decodes(n, 10) for n in (7, 9, 10)] == [8, 10, 10]


def test_a_capture_without_memory_is_an_error(directory: Path) -> None:
    """The KV pool was sized without room for graphs: steps would fail later, too."""

    class Unlucky(MixedGraphs):
        def capture(self, step: StepInputs) -> None:
            raise torch.OutOfMemoryError

    runner = Harness(directory).runner
    with pytest.raises(torch.OutOfMemoryError):
        runner.computer.capture_graphs([(Unlucky(parts_of(runner), NO_MEMORY), [64])])


@pytest.mark.parametrize("lengths", [[1, 1, 9], [12], [30, 2], [1, 40, 3, 3]])
def test_what_a_graph_reads_lies_where_it_lay_at_its_capture(
    harness: Harness, lengths: list[int]
) -> None:
    """Whatever the step: its tokens, its work and its mask."""
    parts = parts_of(harness.runner)
    computer = StepComputer(
        harness.runner.info, parts.model, parts.backend, parts.state, parts.images
    )
    graphs = MixedGraphs(computer.parts, NO_MEMORY)
    first = computer.stage_inputs(graphs.scratch(64), graphs)
    captured = first.places
    step = graphs.padded(computer.scratch(lengths), 64)
    staged = computer.stage_inputs(step, graphs).places
    for field in dataclasses.fields(staged):
        place = getattr(staged, field.name)
        assert place == getattr(captured, field.name), field.name
        # Of other models.
        absent = "cu_query_lens", "runs", "pieces", "saves", "adapters", "amends"
        is_absent = field.name in absent or field.name.startswith("draft_")
        assert (place is None) == is_absent


def test_the_slots_of_adapters_lie_where_they_lay_at_the_capture(harness: Harness) -> None:
    """Padding has no adapter, and a step with adapters has graphs of its own."""
    computer = harness.runner.computer
    host = computer.staging.host
    decodes = DecodeGraphs(computer.parts, NO_MEMORY)
    captured = computer.stage_inputs(decodes.scratch(4).for_adapters(), decodes).places.adapters
    assert captured is not None
    assert host(captured).tolist() == [-1] * 4
    step = computer.scratch([1, 1])
    step.adapters = np.array([2, 0])
    staged = computer.stage_inputs(pad_decodes(step, 4, decodes.scratch(4)), decodes)
    assert staged.places.adapters == captured
    assert host(captured).tolist() == [2, 0, -1, -1]
    mixed = MixedGraphs(computer.parts, NO_MEMORY)
    captured = computer.stage_inputs(mixed.scratch(64).for_adapters(), mixed).places.adapters
    step = computer.scratch([1, 3])
    step.adapters = np.array([1, 0, 0, 0])
    staged = computer.stage_inputs(mixed.padded(step, 64), mixed)
    assert staged.places.adapters == captured is not None
    assert host(captured).tolist() == [1, 0, 0, 0] + [-1] * 60


def test_a_step_with_adapters_is_padded_to_a_size_that_is_captured_for_such_steps(
    harness: Harness,
) -> None:
    graphs = DecodeGraphs(harness.runner.computer.parts, NO_MEMORY)
    for kind in (Kind(1), Kind(2), Kind(3), Kind(1, adapted=True), Kind(4, adapted=True)):
        graphs._add(kind, NO_MEMORY)
    sizes = {False: (1, 2, 3, None), True: (1, 4, 4, 4)}
    for adapted, expected in sizes.items():
        for count, size in enumerate(expected, 1):
            step = harness.runner.computer.scratch([1] * count)
            step = step.for_adapters() if adapted else step
            assert graphs._size(count, step) == size
    graphs.keep({Kind(3), Kind(1, adapted=True)})
    assert graphs._size(1, harness.runner.computer.scratch([1])) == 3


def test_sizes_for_adapters_are_fewer_and_pad_little() -> None:
    for sizes, decodes in ((decode_buckets(256), True), (prompt_buckets(8192), False)):
        found = adapted_sizes(sizes, 535, decodes=decodes)
        most = sizes[-1] if decodes else 1536
        assert set(found) <= set(sizes) and found[0] == sizes[0] and found[-1] == most
        assert not decodes or len(found) < len(sizes) * 2 / 3
        for count in range(1, most + 1):
            first, size = (next(each for each in of if each >= count) for of in (sizes, found))
            assert size == first or (decodes and size <= 1.25 * count)
    assert adapted_sizes([], 535, decodes=False) == []


def test_drafts_are_decodes_of_a_graph_without_the_fused_kernel(harness: Harness) -> None:
    """A draft attends to the drafts before it in the same step, whose keys that kernel stores."""
    runner = harness.runner

    class Captured(DecodeGraphs):
        def _capture(self, kind: Kind, *_: object) -> None:
            self._add(kind, NO_MEMORY)

    parts = parts_of(runner)
    ops = SimpleNamespace(max_fused_context=lambda num_tokens: 1000)
    parts = dataclasses.replace(parts, model=cast("Any", SimpleNamespace(ops=ops)))
    graphs = Captured(parts, NO_MEMORY)
    graphs.capture(runner.computer.stage_inputs(graphs.scratch(4)))
    assert graphs.kinds == {Kind(4), Kind(4, fused=True)}
    for has_drafts in (False, True):
        step = runner.computer.scratch([1, 1, 1])
        step.has_drafts = has_drafts
        assert graphs.pad(step)
        assert (step.num_decodes, step.is_fused) == (4, not has_drafts)


def test_a_mixture_takes_the_smallest_graph_that_holds_it(harness: Harness) -> None:
    runner = harness.runner
    rows: list[int] = []

    class Noting(MixedGraphs):
        def _capture(self, kind: Kind, step: StepInputs, *sampled: torch.Tensor) -> None:
            rows.append(len(sampled[0]))
            captured: Any = None
            self._add(kind, captured)

    graphs = Noting(parts_of(runner), NO_MEMORY)
    for size in (512, 384, 256):
        graphs.capture(runner.computer.stage_inputs(graphs.scratch(size), graphs))
    assert rows == [8] * 3  # as many as may decode

    def padded(lengths: list[int], graphs: MixedGraphs = graphs) -> int | None:
        step = runner.computer.scratch(lengths)
        return step.num_tokens if graphs.pad(step) else None

    assert padded([1, 1, 200]) == padded([256]) == 256
    assert padded([1, 256]) == padded([90] * 4) == 384
    assert padded([1] * 4 + [100] * 4) == 512
    assert padded([513]) is None
    assert padded([1] * 8 + [9]) is None, "nine sample"
    assert padded([3] * 17) is None, "too many chunks"
    slow = Noting(parts_of(runner, SdpaBackend), NO_MEMORY)
    slow.capture(runner.computer.stage_inputs(slow.scratch(256), slow))
    assert padded([1, 200], slow) is None


def test_steps_of_many_decodes_have_graphs_of_their_own(harness: Harness) -> None:
    """So that steps of few decodes need not compute the head for as many rows."""
    runner = harness.runner

    class Few(MixedGraphs):
        most = 4

        def _capture(self, kind: Kind, *_: object) -> None:
            self._add(kind, NO_MEMORY)

    class Many(Few):
        least, most = 5, 8

    few, many = (kind(parts_of(runner), NO_MEMORY) for kind in (Few, Many))
    for graphs in (few, many):
        graphs.capture(runner.computer.stage_inputs(graphs.scratch(256), graphs))

    def padded(lengths: list[int]) -> list[int]:
        steps = [(graphs, runner.computer.scratch(lengths)) for graphs in (few, many)]
        return [step.num_decodes for graphs, step in steps if graphs.pad(step)]

    assert padded([1, 1, 200]) == padded([1] * 3 + [9]) == [4]
    assert padded([1] * 4 + [9]) == padded([1] * 7 + [9]) == [8]
    assert padded([1] * 8 + [9]) == []


class LongBackend(SdpaBackend):
    """A backend that plans captured steps behind long contexts, and notes their contexts."""

    planned: list[list[int]]

    def captures_long(self, step: StepLengths) -> bool:
        return True

    def list_work(self, step: StepLengths, *, captured: bool) -> None:
        raise AssertionError("the step is planned")

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> Any:
        assert captured
        self.planned.append(metadata.seq_lens.tolist())


def test_a_step_behind_long_contexts_is_planned_before_its_graph_runs(directory: Path) -> None:
    harness = Harness(directory, max_batched_tokens=1024, max_model_len=1024)
    backend = LongBackend
    backend.planned = []
    parts, computer = parts_of(harness.runner, backend), harness.runner.computer
    computer.parts = parts
    done: list[list[list[int]]] = []
    graph = SimpleNamespace(replay=lambda: done.append(list(backend.planned)))
    graphs = LongGraphs(parts, NO_MEMORY)
    for size in (896, 768, 640):
        calls = SimpleNamespace(num_replays=0)
        metadata = SimpleNamespace()
        graphs._add(Kind(size), SimpleNamespace(
            graph=graph, metadata=metadata, logits=None, token_ids=None, calls=calls,
        ))  # fmt: skip
    step = computer.scratch([1, 1, 700])
    assert graphs.pad(step) and step.num_tokens == 768
    staged = computer.stage_inputs(step, graphs)
    assert staged.places.work is None
    graphs.replay(staged)
    assert done == [[staged.seq_lens.tolist()]] and 700 in done[0][0]
    for lengths in ([1, 897], [1] * 9 + [700]):
        assert not graphs.pad(computer.scratch(lengths)), lengths


def test_sizes_behind_long_contexts_grow_with_the_tokens_that_hide_launches() -> None:
    assert long_buckets(8192, 212) == [*range(512, 1025, 64)]
    assert long_buckets(8192, 535) == [n for n in mixed_buckets(8192) if 512 <= n <= 2048]
    assert long_buckets(8192, 2048)[-1] == 4096
    assert long_buckets(600, 535) == [512, 576] and long_buckets(500, 535) == []


def test_graphs_of_many_decodes_have_more_tokens_than_decodes() -> None:
    assert crowded_buckets(8192, 64, 2048) == []
    assert crowded_buckets(8192, 96, 2048)[0] == 256
    assert crowded_buckets(8192, 256, 212) == [320, 384]
    found = crowded_buckets(8192, 512, 2048)
    assert (found[0], found[-1], len(found)) == (320, 2048, 23)
    assert set(found) <= set(mixed_buckets(8192))
    assert crowded_buckets(0, 512, 2048) == []
