"""Qwen3.5 agrees with Hugging Face's torch path on random weights, float32, CPU.

Tolerance as in test_language_model.py: 2e-4 where the largest logits are 60 to 105. The controls
show that a wrong order, gate or state would be seen.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.nn.layers import RMSNorm
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.models.transformer import Transformer
from tests.cases import THOROUGH
from tests.decoder_harness import Harness
from tests.fp8_checkpoints import write
from tests.parity.oracle import Oracle, Prompt
from tests.parity.oracle import largest_difference as difference
from tests.parity.qwen3_5_oracle import CONFIGS, make_qwen3_5

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
CLEARLY_WRONG = 0.05  # a control must be off by this much, 250 tolerances
PROMPTS: dict[str, tuple[int | tuple[int, int], ...]] = {
    "one token": (1,),
    "text": (150,),
    "one image": (5, (8, 12), 60),
    "three images": (3, (8, 12), 5, (6, 4), 40, (16, 10), 6),
    "interleaved turns": (30, (4, 6), 70, (12, 8), 9, (4, 4), 33),
}


class Pair:
    """One checkpoint, in Hugging Face's hands and in ours."""

    def __init__(self, oracle: Oracle, **options: object) -> None:
        self.oracle = oracle
        self.ours = Harness(oracle.directory, **options)

    def start(self, prompt: Prompt, row: int = 0) -> Sequence:
        answer = self.oracle.answer(prompt)
        return self.ours.start(
            prompt.token_ids, row, positions=answer.positions, delta=answer.delta,
            images=list(zip(prompt.offsets, answer.embeddings, strict=True)),
        )  # fmt: skip

    def logits(self, prompt: Prompt, chunk_size: int | None = None) -> Tensor:
        """All of a prompt's logits, computed in chunks."""
        return self.ours.prompt_logits(self.start(prompt), chunk_size)

    def error(self, prompt: Prompt, chunk_size: int | None = None) -> float:
        """The largest difference of a prompt's logits from Hugging Face's."""
        return difference(self.logits(prompt, chunk_size), self.oracle.answer(prompt).logits)

    def poison(self) -> None:
        """Fills the states of all rows with NaN."""
        states = self.ours.state.states
        assert states is not None
        states.conv.fill_(torch.nan)
        states.recurrent.fill_(torch.nan)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    oracle = make_qwen3_5(CONFIGS[request.param], tmp_path_factory.mktemp("model"))
    return Pair(oracle.remember())


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_logits_agree(pair: Pair, name: str) -> None:
    """The row's states are poisoned: nothing may read what an earlier sequence has left."""
    prompt = pair.oracle.prompt(*PROMPTS[name])
    assert pair.oracle.answer(prompt).logits.abs().max() > 20
    pair.poison()
    assert pair.error(prompt) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 30, 63, 64, 65] if THOROUGH else [1, 3, 63, 65])
def test_chunks_agree(pair: Pair, chunk_size: int) -> None:
    pair.poison()
    # Chunks that the convolution is wider than, or of about 64 tokens, the chunk of the delta rule.
    parts = (9, (4, 6), 5, (6, 4), 12) if chunk_size < 4 else (9, (8, 12), 5, (6, 4), 120)
    prompt = pair.oracle.prompt(*parts, seed=1)
    assert pair.error(prompt, chunk_size) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROMPTS if THOROUGH else ["one token", "interleaved turns"])
def test_greedy_tokens_and_decode_logits_agree(pair: Pair, name: str) -> None:
    prompt = pair.oracle.prompt(*PROMPTS[name], seed=2)
    tokens, expected = pair.oracle.generate(prompt, 10)
    pair.poison()
    sequence = pair.start(prompt)
    pair.ours.step(pair.ours.chunk(sequence))
    for index in range(1, 10):
        assert sequence.token_ids[-1] == tokens[index - 1]
        row = pair.ours.logits(pair.ours.chunk(sequence))
        sequence.num_in_flight -= 1
        assert difference(row, expected[index : index + 1]) < TOLERANCE
        sequence.token_ids.append(tokens[index])
    pair.ours.finish(sequence)


def test_a_batch_of_decodes_and_prompts_agrees(pair: Pair) -> None:
    """Rows in any order, one of them a prompt of one token, and two prompts in chunks."""
    shapes = ((5,), (33,), (4, (4, 6), 50), (1,), (70,))
    prompts = [pair.oracle.prompt(*shape, seed=i) for i, shape in enumerate(shapes)]
    pair.poison()
    running = [
        pair.start(prompt, row) for prompt, row in zip(prompts, (3, 0, 7, 5, 1), strict=True)
    ]
    chunk, step = pair.ours.chunk, pair.ours.step
    step(chunk(running[0]), chunk(running[1]))
    step(chunk(running[0]), chunk(running[1]), chunk(running[2], 20))
    step(*(chunk(sequence) for sequence in running[:2]), chunk(running[2], 9), chunk(running[3]))
    step(*(chunk(sequence) for sequence in running[:4]), chunk(running[4], 65))
    step(*(chunk(sequence) for sequence in running))
    step(*(chunk(sequence) for sequence in running))
    for prompt, sequence in zip(prompts, running, strict=True):
        count = sequence.num_generated
        expected, _ = pair.oracle.generate(prompt, count)
        assert sequence.token_ids[-count:].tolist() == expected
        pair.ours.finish(sequence)


def test_a_preempted_sequence_begins_again(pair: Pair) -> None:
    prompt = pair.oracle.prompt(40, seed=5)
    expected, _ = pair.oracle.generate(prompt, 8)
    sequence = pair.start(prompt)
    pair.ours.generate(sequence, 4)
    pair.poison()
    pair.ours.restart(sequence, 4)
    assert pair.ours.generate(sequence, 8) == expected
    pair.ours.finish(sequence)


def test_layers_of_each_kind_have_their_own_memory(pair: Pair) -> None:
    text, state = pair.oracle.spec.text, pair.ours.state
    assert state.states is not None
    assert len(state.kv_cache) == len(text.attention_layers)
    assert len(state.states.recurrent) == len(text.linear_layers)
    assert len(text.attention_layers) + len(text.linear_layers) == text.num_layers
    assert state.states.recurrent.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
def test_fp8_logits_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    """As Qwen publishes it: the projections of the gates stay unquantized, unlisted here."""
    tiny = dataclasses.replace(CONFIGS["repeated-twice-tied"], hidden=192, layers=4)
    oracle = make_qwen3_5(tiny, tmp_path / "source")

    def is_quantized(module: str) -> bool:
        gates = ("in_proj_a", "in_proj_b", "conv1d")
        return module.startswith("model.language_model.layers") and not module.endswith(gates)

    meant = write(oracle.directory, tmp_path / "fp8", name, modules=is_quantized)
    meant = {key: tensor for key, tensor in meant.items() if not key.startswith("mtp.")}
    prompt = oracle.prompt(*PROMPTS["one image"])
    missing, unexpected = oracle.model.load_state_dict(meant, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    oracle.model.tie_weights()
    ours = Pair(Oracle(tmp_path / "fp8", oracle.model, oracle.spec))
    assert ours.error(prompt, 50) < TOLERANCE


# Controls.


@pytest.fixture
def fresh(tmp_path: Path) -> Pair:
    return Pair(make_qwen3_5(CONFIGS["repeated-twice-tied"], tmp_path))


def test_control_a_state_that_is_not_kept(fresh: Pair) -> None:
    prompt = fresh.oracle.prompt(60)
    states = fresh.ours.state.states
    assert states is not None
    sequence = fresh.start(prompt)
    parts = [fresh.ours.logits(fresh.ours.chunk(sequence, 30))]
    states.recurrent.zero_()
    parts.append(fresh.ours.logits(fresh.ours.chunk(sequence)))
    assert difference(torch.cat(parts), fresh.oracle.answer(prompt).logits) > CLEARLY_WRONG


def test_control_a_convolution_state_shifted_by_one(fresh: Pair) -> None:
    prompt = fresh.oracle.prompt(60)
    states = fresh.ours.state.states
    assert states is not None
    sequence = fresh.start(prompt)
    parts = [fresh.ours.logits(fresh.ours.chunk(sequence, 30))]
    states.conv.copy_(states.conv.roll(1, dims=2))
    parts.append(fresh.ours.logits(fresh.ours.chunk(sequence)))
    assert difference(torch.cat(parts), fresh.oracle.answer(prompt).logits) > CLEARLY_WRONG


def test_control_the_gate_after_the_norm(fresh: Pair) -> None:
    """Norm of the gated output, in place of the gated norm."""
    ops = fresh.ours.model.ops

    def gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        gated = x * torch.nn.functional.silu(gate).unflatten(1, x.shape[1:])
        return torch.nn.functional.rms_norm(gated, (x.shape[-1],), weight, eps).flatten(1)

    entry = ops.table.choose("gated_norm", 60)
    entry.kernel = gate_first
    assert fresh.error(fresh.oracle.prompt(60)) > CLEARLY_WRONG


def test_control_norms_that_are_not_zero_centred(fresh: Pair) -> None:
    model = fresh.ours.model
    assert isinstance(model, Transformer)
    norm = model.get_submodule("layers.2.input_layernorm")
    assert isinstance(norm, RMSNorm)
    norm.weight.data -= 1.0
    assert fresh.error(fresh.oracle.prompt(60)) > CLEARLY_WRONG


def test_control_positions(fresh: Pair) -> None:
    """Text positions where an image has its own."""
    prompt = fresh.oracle.prompt(5, (8, 12), 60)
    answer = fresh.oracle.answer(prompt)
    assert fresh.error(prompt) < TOLERANCE
    plain = np.broadcast_to(
        np.arange(len(prompt.token_ids), dtype=np.int32), (3, len(prompt.token_ids))
    )
    sequence = fresh.ours.start(
        prompt.token_ids, positions=plain,
        images=list(zip(prompt.offsets, answer.embeddings, strict=True)),
    )  # fmt: skip
    assert difference(fresh.ours.prompt_logits(sequence), answer.logits) > CLEARLY_WRONG
