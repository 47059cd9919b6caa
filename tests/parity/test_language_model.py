"""The language model agrees with Hugging Face's on random weights, float32, CPU.

Tolerance: 2e-4 where the largest logits are 60 to 105. A whole prompt in one chunk is often equal
to the last bit, because on one CPU both run the same operations; chunks and decode steps differ by
rounding. The controls show that the check can fail. A shift of *all* positions by the same amount
is not among them: rotary attention sees differences of positions only, so that changes nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import plain
from kernels.device import DeviceFacts
from services.common.nn.experts import Experts, Router
from services.common.nn.experts import moe as plain_moe
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.attention.base import AttentionMetadata
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.models import rope
from services.decoder.operations import table
from services.decoder.operations.ops import Ops
from services.decoder.operations.table import KernelFacts, Row
from tests.cases import THOROUGH
from tests.decoder_harness import Harness
from tests.parity.oracle import CONFIGS, Answer, Oracle, Prompt, make_oracle
from tests.parity.oracle import largest_difference as error

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
CLEARLY_WRONG = 0.05  # a control must be off by this much, 250 tolerances

PROMPTS = {
    "text": (23,),
    "one image": (5, (4, 6), 7),
    "image first": ((6, 4), 9),
    "three images": (3, (4, 4), 2, (8, 4), 5, (2, 6), 4),
    "interleaved turns": (9, (4, 4), 12, 6, (6, 6), 11, 3, (2, 2), 8),
    "very wide": (4, (2, 40), 6),
    "very tall": (4, (40, 2), 6),
}
LARGE = (5, (64, 96), 7)
# For what a layer does to each token: without images, and with several.
SOME_PROMPTS = [pytest.param(PROMPTS[name], id=name) for name in ("text", "three images")]


class Pair:
    """One checkpoint, in Hugging Face's hands and in ours."""

    def __init__(self, name: str, directory: Path) -> None:
        self.oracle: Oracle = make_oracle(CONFIGS[name], directory).remember()
        self.ours = Harness(directory)

    def start(self, prompt: Prompt, answer: Answer, **changes: object):
        given: dict[str, Any] = {
            "positions": answer.positions, "delta": answer.delta,
            "images": list(zip(prompt.offsets, answer.embeddings, strict=True)),
        } | changes  # fmt: skip
        return self.ours.start(prompt.token_ids, **given)

    def logits(
        self, prompt: Prompt, answer: Answer, chunk_size: int | None = None, **changes: object
    ) -> Tensor:
        """All of a prompt's logits, computed in chunks."""
        return self.ours.prompt_logits(self.start(prompt, answer, **changes), chunk_size)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair("gqa4-hd64-three-taps", tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
def test_prompt_logits_agree(pair: Pair, parts: tuple) -> None:
    prompt = pair.oracle.prompt(*parts)
    answer = pair.oracle.answer(prompt)
    assert answer.logits.abs().max() > 30
    assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
def test_tokens_that_are_wanted_alone_agree(pair: Pair, parts: tuple) -> None:
    """The last layer computes only what samples."""
    prompt = pair.oracle.prompt(*parts)
    answer = pair.oracle.answer(prompt)
    sequence = pair.start(prompt, answer)
    wanted = [len(prompt.token_ids) - 1, 2]
    found = pair.ours.logits(pair.ours.chunk(sequence), only=wanted)
    pair.ours.finish(sequence)
    assert float((found - answer.logits[wanted]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 16, 31])
def test_chunks_that_cut_images_agree(pair: Pair, chunk_size: int) -> None:
    prompt = pair.oracle.prompt(*PROMPTS["three images"], seed=1)
    answer = pair.oracle.answer(prompt)
    assert error(pair.logits(prompt, answer, chunk_size), answer.logits) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("parts", PROMPTS.values() if THOROUGH else SOME_PROMPTS)
def test_greedy_tokens_are_equal(pair: Pair, parts: tuple) -> None:
    prompt = pair.oracle.prompt(*parts, seed=2)
    expected, _ = pair.oracle.generate(prompt, 8)
    sequence = pair.start(prompt, pair.oracle.answer(prompt))
    assert pair.ours.generate(sequence, 8) == expected
    pair.ours.finish(sequence)


def test_decode_logits_agree(pair: Pair) -> None:
    prompt = pair.oracle.prompt(*PROMPTS["three images"], seed=3)
    tokens, expected = pair.oracle.generate(prompt, 6)
    sequence = pair.start(prompt, pair.oracle.answer(prompt))
    pair.ours.step(pair.ours.chunk(sequence))
    for index in range(1, 6):
        assert sequence.token_ids[-1] == tokens[index - 1]
        row = pair.ours.logits(pair.ours.chunk(sequence))
        sequence.num_in_flight -= 1
        assert error(row, expected[index : index + 1]) < TOLERANCE
        sequence.token_ids.append(tokens[index])
    pair.ours.finish(sequence)


def with_kernels(pair: Pair, monkeypatch: pytest.MonkeyPatch, **kernels: Callable) -> None:
    """The model calls these instead of what the table would choose."""
    model = pair.ours.model
    rows = [Row(name, "test", lambda _, kernel=kernel: kernel) for name, kernel in kernels.items()]
    facts = KernelFacts(DeviceFacts("cpu"), pair.oracle.spec.text, torch.float32)
    monkeypatch.setattr(model, "ops", Ops(table.resolve(facts, rows=[*rows, *table.ROWS])))


def test_split_k_partials_agree(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of small batches through a layer: consumers of a GEMM reduce its partials, images
    between them or not.
    """
    asked: list[int] = []

    def project(x: Tensor, layer: Linear) -> Tensor:
        asked.append(len(x))
        half = x.shape[1] // 2
        parts = (x[:, :half], layer.weight[:, :half]), (x[:, half:], layer.weight[:, half:])
        biases = layer.bias, None
        return torch.stack([F.linear(*part, b) for part, b in zip(parts, biases, strict=True)])

    with_kernels(pair, monkeypatch, project=project)
    for parts in (PROMPTS["text"], PROMPTS["three images"]):
        prompt = pair.oracle.prompt(*parts, seed=2)
        answer = pair.oracle.answer(prompt)
        assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE
        assert error(pair.logits(prompt, answer, 3), answer.logits) < TOLERANCE
        assert set(asked) >= {3, len(prompt.token_ids)}


@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("parts", SOME_PROMPTS)
def test_gemms_that_add_to_the_residual_stream_agree(
    pair: Pair, parts: tuple, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of many tokens through a layer: all GEMMs add, or all but every third, whose output
    the next norm adds.
    """
    asked: list[int] = []

    def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
        asked.append(len(x))
        if skipped and len(asked) % skipped == 0:
            return layer(x)
        residual += layer(x)
        return None

    with_kernels(pair, monkeypatch, linear_residual=linear_residual)
    prompt = pair.oracle.prompt(*parts, seed=2)
    answer = pair.oracle.answer(prompt)
    assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE
    assert error(pair.logits(prompt, answer, 3), answer.logits) < TOLERANCE
    assert set(asked) >= {3, len(prompt.token_ids)}


@pytest.mark.parametrize("parts", SOME_PROMPTS)
def test_fused_norms_agree(pair: Pair, parts: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of one or two tokens through a layer: each GEMM is fused with the norm before it and
    with the activation or the addition after it.
    """

    def norm_linear(x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear):
        assert x is None
        found = plain.norm_linear(residual, norm.weight, norm.eps, layer.weight, layer.bias)
        return found, residual

    def norm_swiglu(x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, down: Linear):
        assert x is None
        found = plain.norm_swiglu(residual, norm.weight, norm.eps, layer.weight, layer.bias)
        return found, residual

    def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> None:
        plain.linear_residual(x, layer.weight, layer.bias, residual)

    def moe(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
        residual += plain_moe(x, router, experts, residual)

    with_kernels(
        pair, monkeypatch, norm_linear=norm_linear, norm_swiglu=norm_swiglu,
        linear_residual=linear_residual, moe=moe,
    )  # fmt: skip
    prompt = pair.oracle.prompt(*parts, seed=2)
    answer = pair.oracle.answer(prompt)
    assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE
    assert error(pair.logits(prompt, answer, 2), answer.logits) < TOLERANCE


def test_steps_that_keep_their_own_keys_and_values_agree(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of prompts on a GPU: attention reads the step's own keys and values beside the
    cache.
    """
    plan, forward = SdpaBackend.plan, SdpaBackend.forward

    def wanting(self: SdpaBackend, metadata: AttentionMetadata, *, captured: bool = False):
        metadata.wants_keys_values = True
        return plan(self, metadata, captured=captured)

    given: list[Tensor] = []

    def noting(self: SdpaBackend, query: Tensor, kv_cache: Tensor, metadata, keys_values, *rest):
        given.append(keys_values)
        return forward(self, query, kv_cache, metadata, keys_values, *rest)

    monkeypatch.setattr(SdpaBackend, "plan", wanting)
    monkeypatch.setattr(SdpaBackend, "forward", noting)
    prompt = pair.oracle.prompt(*PROMPTS["one image"], seed=2)
    answer = pair.oracle.answer(prompt)
    assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE
    assert error(pair.logits(prompt, answer, 3), answer.logits) < TOLERANCE
    assert {len(kept) for kept in given} >= {3, len(prompt.token_ids)}
    assert all(kept.isfinite().all() and kept.any() for kept in given)


def test_a_large_grid_agrees_in_chunks(deep: Pair) -> None:
    prompt = deep.oracle.prompt(*LARGE)
    answer = deep.oracle.answer(prompt)
    assert error(deep.logits(prompt, answer), answer.logits) < TOLERANCE
    assert error(deep.logits(prompt, answer, 1000), answer.logits) < TOLERANCE


# Controls.


def controlled(pair: Pair, **changes: object) -> float:
    prompt = pair.oracle.prompt(*PROMPTS["one image"], seed=4)
    answer = pair.oracle.answer(prompt)
    assert error(pair.logits(prompt, answer), answer.logits) < TOLERANCE
    given = {key: change(prompt, answer) for key, change in changes.items()}  # type: ignore[operator]
    return error(pair.logits(prompt, answer, **given), answer.logits)


def _without_deepstack(prompt: Prompt, answer: Answer) -> list[tuple[int, Tensor]]:
    embeddings = [part.clone() for part in answer.embeddings]
    for part in embeddings:
        part[1:] = 0
    return list(zip(prompt.offsets, embeddings, strict=True))


def _last_feature_off(prompt: Prompt, answer: Answer) -> list[tuple[int, Tensor]]:
    embeddings = [part.clone() for part in answer.embeddings]
    for part in embeddings:
        part[-1] = 0
    return list(zip(prompt.offsets, embeddings, strict=True))


def _image_shifted(prompt: Prompt, answer: Answer) -> np.ndarray:
    positions = answer.positions.copy()
    start = prompt.offsets[0]
    positions[1, start : start + answer.embeddings[0].shape[1]] += 1
    return positions


def test_control_deepstack_off(pair: Pair) -> None:
    if pair.oracle.spec.vision_part.tower.num_features == 1:
        return
    assert controlled(pair, images=_without_deepstack) > CLEARLY_WRONG


def test_control_last_feature_off(pair: Pair) -> None:
    assert controlled(pair, images=_last_feature_off) > CLEARLY_WRONG


def test_control_image_shifted_by_one_row(pair: Pair) -> None:
    assert controlled(pair, positions=_image_shifted) > CLEARLY_WRONG


def test_control_text_positions(pair: Pair) -> None:
    assert controlled(pair, positions=lambda *_: None) > CLEARLY_WRONG


def test_control_the_other_order_of_mrope(pair: Pair) -> None:
    """Sections where the axes take turns, and turns where they are sections."""
    module: rope.RotaryEmbedding = pair.ours.model.rope
    right = module.spec
    try:
        module.spec = replace(right, interleaved=not right.interleaved)
        module.reset_buffers(torch.device("cpu"))
        assert controlled_without_check(pair) > CLEARLY_WRONG
    finally:
        module.spec = right
        module.reset_buffers(torch.device("cpu"))


def test_control_yarn_without_its_scaling(tmp_path: Path) -> None:
    pair = Pair("gqa2-hd32-yarn", tmp_path)
    module: rope.RotaryEmbedding = pair.ours.model.rope
    module.attention_factor = 1.0
    assert controlled_without_check(pair) > CLEARLY_WRONG
    module.attention_factor = module.spec.attention_factor
    assert controlled_without_check(pair) < TOLERANCE
    module.spec = replace(module.spec, kind="default")
    module.reset_buffers(torch.device("cpu"))
    assert controlled_without_check(pair) > CLEARLY_WRONG


def controlled_without_check(pair: Pair) -> float:
    prompt = pair.oracle.prompt(*PROMPTS["one image"], seed=4)
    answer = pair.oracle.answer(prompt)
    return error(pair.logits(prompt, answer), answer.logits)


def test_control_wrong_delta(pair: Pair) -> None:
    prompt = pair.oracle.prompt(*PROMPTS["three images"], seed=3)
    answer = pair.oracle.answer(prompt)
    tokens, expected = pair.oracle.generate(prompt, 2)
    sequence = pair.start(prompt, answer, delta=answer.delta + 3)
    pair.ours.step(pair.ours.chunk(sequence))
    assert sequence.token_ids[-1] == tokens[0]
    row = pair.ours.logits(pair.ours.chunk(sequence))
    assert error(row, expected[1:2]) > CLEARLY_WRONG
    pair.ours.finish(sequence)
