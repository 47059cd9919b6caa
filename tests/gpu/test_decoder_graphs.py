"""Captured steps of the decoder against the same steps launched one by one. For the metric and the
tolerances see `test_decoder_gpu.py`.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling.sampling import greedy
from services.decoder.engine.run.graphs import CrowdedGraphs, LongGraphs, MixedGraphs
from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import needs_flashinfer, options, prompts, relative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("count", "fused"),
    [
        (1, True),
        (1, False),
        (2, True),
        (2, False),
        (3, False),
        (17, False),
        (51, False),
        (64, False),
    ],
)
def test_a_graph_agrees_with_the_eager_step(
    dummy: Harness, monkeypatch: pytest.MonkeyPatch, count: int, fused: bool
) -> None:
    assert dummy.runner.computer.graphs, "no backend here captures steps"
    ops = dummy.model.ops
    assert (ops.max_fused_context(count) > 0) == (count <= 2)
    if not fused:
        monkeypatch.setattr(ops, "max_fused_context", lambda num_tokens: 0)
    running = [dummy.start(ids, row) for row, ids in enumerate(prompts(count))]
    for sequence in running:
        dummy.step(dummy.chunk(sequence))
    chunks = [dummy.chunk(sequence) for sequence in running]
    eager = dummy.logits(*chunks)
    tokens = dummy.launch(*chunks).result().token_ids[:, 0].tolist()
    captured = dummy.runner.computer.graphs[0].logits[:count]
    # Padded to a bucket, GEMMs are of another size: as a batch against one alone.
    assert relative(captured, eager) < 5e-2
    assert tokens == greedy(captured).tolist()
    for sequence in running:
        dummy.finish(sequence)


@pytest.mark.parametrize("cached", [0, 37])
@pytest.mark.parametrize("length", [2, 64, 333, 1500])
def test_a_captured_prompt_agrees_with_the_eager_one(
    dummy: Harness, length: int, cached: int
) -> None:
    """With an image in the chunk, and with context before it."""
    rng = np.random.default_rng(length)
    token_ids = rng.integers(0, 150000, length + cached).tolist()
    span = min(40, length // 2)
    embedding = torch.randn(4, span, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    sequence = dummy.start(token_ids, images=[(cached + 1, embedding)])
    if cached:
        dummy.step(dummy.chunk(sequence, cached))
    chunk = dummy.chunk(sequence)
    eager = dummy.logits(chunk)[-1:]
    tokens = dummy.launch(chunk).result().token_ids[:, 0].tolist()
    captured = dummy.runner.computer.graphs[1].logits[:1]
    assert relative(captured, eager) < 5e-2  # GEMMs of another size, as above
    assert tokens == greedy(captured).tolist()
    dummy.finish(sequence)


@pytest.mark.parametrize("captured", [True, False])
def test_steps_that_follow_each_other_keep_their_images_apart(
    dummy: Harness, request: pytest.FixtureRequest, captured: bool
) -> None:
    """Images are copied beside the steps before, to where those read theirs."""
    if not captured:
        computer = dummy.runner.computer
        request.addfinalizer(partial(setattr, computer, "graphs", computer.graphs))
        computer.graphs = []
    ids = np.random.default_rng(6).integers(0, 150000, 200).tolist()
    noise = torch.Generator().manual_seed(6)
    images = [torch.randn(4, 60, 2048, generator=noise).bfloat16() for _ in range(3)]
    prompts = [dummy.start(ids, row, images=[(9, image)]) for row, image in enumerate(images)]
    tokens, keys = [], []
    for pause in (True, False):
        if not pause:  # so long that all is launched before any of it runs
            torch.cuda._sleep(200_000_000)
        pending = []
        for row, prompt in enumerate(prompts):
            pending.append(dummy.launch(dummy.chunk(dummy.restart(prompt, row))))
            prompt.num_in_flight = 0
            if pause:
                torch.cuda.synchronize()
        tokens.append([step.result().token_ids[:, 0].tolist() for step in pending])
        pool = dummy.state.kv_cache
        keys.append([pool[:, prompt.block_table[:12]].clone() for prompt in prompts])
    assert tokens[0] == tokens[1]
    for alone, together in zip(*keys, strict=True):
        assert torch.equal(alone, together)
    assert not torch.equal(*keys[0][:2])
    for prompt in prompts:
        dummy.finish(prompt)


def test_a_captured_part_of_a_prompt_is_as_good_as_an_eager_one(dummy: Harness) -> None:
    """The first part is not sampled, and the second attends to it."""
    token_ids = np.random.default_rng(5).integers(0, 150000, 500).tolist()
    prompt = dummy.start(token_ids)
    assert dummy.launch(dummy.chunk(prompt, 300)).result().token_ids.tolist() == []
    tokens = dummy.launch(dummy.chunk(prompt)).result().token_ids[:, 0].tolist()
    captured = dummy.runner.computer.graphs[1].logits[:1].clone()
    assert tokens == greedy(captured).tolist()
    dummy.finish(prompt)
    whole = dummy.start(token_ids)
    assert relative(captured, dummy.logits(dummy.chunk(whole))[-1:]) < 5e-2
    dummy.finish(whole)


@needs_flashinfer
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        (1, [60]), (3, [700, 2, 33]), (50, [300, 290, 1, 450]), (63, [960]), (0, [20] * 16),
        (40, [1300, 1100, 900]),
    ],
    ids=["two", "few", "full", "prompt", "prompts", "large"],
)  # fmt: skip
def test_a_captured_mixture_agrees_with_the_eager_one(
    dummy: Harness, decodes: int, chunks: list[int]
) -> None:
    check_captured(dummy, MixedGraphs, decodes, chunks, {1: 37})


@needs_flashinfer
@pytest.mark.parametrize("decodes", [0, 5, 60])
@pytest.mark.parametrize("chunks", [[1900], [1100, 700]], ids=str)
def test_a_captured_step_behind_a_long_context_agrees_with_the_eager_one(
    dummy: Harness, decodes: int, chunks: list[int]
) -> None:
    check_captured(dummy, LongGraphs, decodes, chunks, {0: 1900})


@pytest.fixture(scope="module")
def crowd(directory: Path) -> Iterator[Harness]:
    """The 2B shape with graphs of mixed steps of up to 256 decodes."""
    changed = options(load_format="dummy", max_num_sequences=256)
    with closing(Harness(directory, **changed)) as harness:
        yield harness
    torch.cuda.empty_cache()


@needs_flashinfer
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [(50, [300]), (65, [300]), (130, [40, 9]), (200, [700, 60, 33]), (250, [1000])],
    ids=["few", "crowd", "short", "many", "full"],
)
def test_a_captured_crowd_agrees_with_the_eager_one(
    crowd: Harness, decodes: int, chunks: list[int]
) -> None:
    kind = CrowdedGraphs if decodes > 64 else MixedGraphs
    check_captured(crowd, kind, decodes, chunks, {1: 37})


@needs_flashinfer
@pytest.mark.parametrize(("decodes", "padded"), [(70, 72), (131, 144)])
def test_samples_of_a_step_without_a_graph_are_padded(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch, decodes: int, padded: int
) -> None:
    """To a number of captured decodes, for which cuBLAS has loaded its kernels."""
    running = [crowd.start(ids, row) for row, ids in enumerate(prompts(decodes))]
    for sequence in running:
        crowd.step(crowd.chunk(sequence))
    token_ids = np.random.default_rng(decodes).integers(0, 150000, 2200).tolist()
    running.append(crowd.start(token_ids, decodes))
    step = [*map(crowd.chunk, running[:-1]), crowd.chunk(running[-1], 2100)]
    eager = crowd.logits(*step)[:decodes]
    assert crowd.runner.computer.stage(crowd.step_of(*step).compute).graphs is None
    compute, found = crowd.model.logits, list[torch.Tensor]()

    def noted(hidden: torch.Tensor, **keywords: Any) -> torch.Tensor:
        found.append(compute(hidden, **keywords))
        return found[-1]

    monkeypatch.setattr(crowd.model, "logits", noted)
    tokens = crowd.launch(*step).result().token_ids[:, 0].tolist()
    (logits,) = found
    assert len(logits) == padded
    assert relative(logits[:decodes], eager) < 5e-2  # GEMMs of another size, as above
    assert tokens == greedy(logits[:decodes]).tolist()
    for sequence in running:
        crowd.finish(sequence)


def check_captured(
    dummy: Harness,
    kind: type[MixedGraphs],
    decodes: int,
    chunks: list[int],
    contexts: dict[int, int],
) -> None:
    """The first chunk has an image, and `contexts` are the cached tokens by the chunk's index; the
    last chunk samples nothing, where that leaves the step something to sample.
    """
    rng = np.random.default_rng(decodes)
    running = [dummy.start(ids, row) for row, ids in enumerate(prompts(decodes))]
    for sequence in running:
        dummy.step(dummy.chunk(sequence))
    embedding = torch.randn(4, 15, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    step = [dummy.chunk(sequence) for sequence in running]
    for index, length in enumerate(chunks):
        cached = contexts.get(index, 0)
        rest = 9 if index == len(chunks) - 1 and decodes else 0
        token_ids = rng.integers(0, 150000, cached + length + rest).tolist()
        images = [(cached + 2, embedding)] if index == 0 else []
        sequence = dummy.start(token_ids, decodes + index, images=images)
        if cached:
            dummy.step(dummy.chunk(sequence, cached))
        running.append(sequence)
        step.append(dummy.chunk(sequence, length))
    step.sort(key=lambda chunk: (not chunk.from_device, chunk.length != 1))  # as `launch` does
    sampling = [index for index, chunk in enumerate(step) if chunk.samples]
    ends = np.cumsum([chunk.length for chunk in step]) - 1
    eager = dummy.logits(*step)[ends[sampling].tolist()]
    (of_mixed,) = [each for each in dummy.runner.computer.graphs if type(each) is kind]
    replays = sum(each.calls.num_replays for each in of_mixed._captured.values())
    tokens = dummy.launch(*step).result().token_ids[:, 0].tolist()
    assert sum(each.calls.num_replays for each in of_mixed._captured.values()) == replays + 1
    captured = of_mixed.logits[: len(sampling)]
    assert relative(captured, eager) < 5e-2  # GEMMs of another size, as above
    assert tokens == greedy(captured).tolist()
    for sequence in running:
        dummy.finish(sequence)
