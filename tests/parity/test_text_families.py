"""Text families agree with Hugging Face's classes on random weights, float32, CPU.

Tolerance as in test_language_model.py: 2e-4 where the largest logits are 60 to 105. The controls
show that a wrong rope kind, a dropped bias or a dropped norm would be seen.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.model_spec import RopeSpec, UnsupportedOption
from services.decoder.engine.schedule.sequence import Sequence
from tests.decoder_harness import Harness
from tests.parity.oracle import Oracle, Prompt
from tests.parity.oracle import largest_difference as difference
from tests.parity.text_oracle import CONFIGS, make_text_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
CLEARLY_WRONG = 0.05  # a control must be off by this much, 250 tolerances
LENGTHS = (1, 23, 200)


class Pair:
    """One checkpoint, in Hugging Face's hands and in ours."""

    def __init__(self, oracle: Oracle, **options: object) -> None:
        self.oracle = oracle
        self.ours = Harness(oracle.directory, **options)

    def start(self, prompt: Prompt) -> Sequence:
        return self.ours.start(prompt.token_ids)

    def logits(self, prompt: Prompt, chunk_size: int | None = None) -> Tensor:
        """All of a prompt's logits, computed in chunks."""
        return self.ours.prompt_logits(self.start(prompt), chunk_size)

    def error(self, prompt: Prompt, chunk_size: int | None = None) -> float:
        """The largest difference of a prompt's logits from Hugging Face's."""
        return difference(self.logits(prompt, chunk_size), self.oracle.answer(prompt).logits)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    oracle = make_text_oracle(CONFIGS[request.param](), tmp_path_factory.mktemp("model"))
    return Pair(oracle.remember())


def test_it_is_a_text_model(pair: Pair) -> None:
    assert pair.oracle.spec.vision is None
    assert pair.ours.runner.info.num_features == 0
    assert pair.ours.runner.computer.parts.images is None, "the arena is not used"


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logits_agree(pair: Pair, length: int) -> None:
    prompt = pair.oracle.prompt(length)
    assert pair.oracle.answer(prompt).logits.abs().max() > 20
    assert pair.error(prompt) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 31])
def test_chunks_agree(pair: Pair, chunk_size: int) -> None:
    assert pair.error(pair.oracle.prompt(67, seed=1), chunk_size) < TOLERANCE


def test_tokens_that_are_wanted_alone_agree(pair: Pair) -> None:
    """The last layer computes only what samples."""
    prompt = pair.oracle.prompt(40)
    wanted = [39, 2]
    sequence = pair.start(prompt)
    found = pair.ours.logits(pair.ours.chunk(sequence), only=wanted)
    pair.ours.finish(sequence)
    assert difference(found, pair.oracle.answer(prompt).logits[wanted]) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_equal(pair: Pair, length: int) -> None:
    prompt = pair.oracle.prompt(length, seed=2)
    expected, _ = pair.oracle.generate(prompt, 12)
    sequence = pair.start(prompt)
    assert pair.ours.generate(sequence, 12) == expected
    pair.ours.finish(sequence)


def test_decode_logits_agree(pair: Pair) -> None:
    prompt = pair.oracle.prompt(90, seed=3)
    tokens, expected = pair.oracle.generate(prompt, 6)
    sequence = pair.start(prompt)
    pair.ours.step(pair.ours.chunk(sequence))
    for index in range(1, 6):
        assert sequence.token_ids[-1] == tokens[index - 1]
        row = pair.ours.logits(pair.ours.chunk(sequence))
        sequence.num_in_flight -= 1
        assert difference(row, expected[index : index + 1]) < TOLERANCE
        sequence.token_ids.append(tokens[index])
    pair.ours.finish(sequence)


def test_a_batch_of_decodes_and_a_prompt_agrees(pair: Pair) -> None:
    prompts = [pair.oracle.prompt(length, seed=length) for length in (5, 33, 18)]
    running = [pair.ours.start(prompt.token_ids, row) for row, prompt in enumerate(prompts)]
    for sequence in running[:2]:
        pair.ours.step(pair.ours.chunk(sequence))
    pair.ours.step(*(pair.ours.chunk(sequence) for sequence in running))
    for prompt, sequence in zip(prompts, running, strict=True):
        count = sequence.num_generated
        expected, _ = pair.oracle.generate(prompt, count)
        assert sequence.token_ids[-count:].tolist() == expected
        pair.ours.finish(sequence)


# Files as others write them.


def rewritten(oracle: Oracle, change: Callable[[dict], None]) -> None:
    path = oracle.directory / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["qwen3-gqa1-yarn", "llama-llama3"])
def test_the_older_spelling_of_rope_agrees(name: str, key: str, tmp_path: Path) -> None:
    oracle = make_text_oracle(CONFIGS[name](), tmp_path)

    def change(fields: dict) -> None:
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        rope[key] = rope.pop("rope_type")
        fields["rope_scaling"] = rope

    rewritten(oracle, change)
    assert Pair(oracle).error(oracle.prompt(150)) < TOLERANCE


def test_a_head_size_that_is_null_agrees(tmp_path: Path) -> None:
    oracle = make_text_oracle(CONFIGS["llama-llama3"](), tmp_path)
    rewritten(oracle, lambda fields: fields.update(head_dim=None))
    assert Pair(oracle).error(oracle.prompt(23)) < TOLERANCE


@pytest.mark.parametrize("name", ["mistral-wide-heads", "qwen3-moe-biases-tied"])
def test_a_window_as_long_as_the_served_context_agrees(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.sliding_window = 64
    config.use_sliding_window = True
    oracle = make_text_oracle(config, tmp_path)
    pair = Pair(oracle, max_model_len=64)
    assert pair.error(oracle.prompt(64)) < TOLERANCE
    with pytest.raises(UnsupportedOption, match=r"sliding_window 64 .* 65 tokens"):
        Harness(tmp_path, max_model_len=65)
    with pytest.raises(UnsupportedOption, match=r"sliding_window 64 .* 2048 tokens"):
        Harness(tmp_path, max_model_len=None)


@pytest.mark.parametrize("name", ["mistral-wide-heads", "qwen3-moe-biases-tied"])
def test_control_a_window_is_not_the_whole_context(name: str, tmp_path: Path) -> None:
    """If it were, refusing it would be needless."""
    config = CONFIGS[name]()
    config.sliding_window = 16
    oracle = make_text_oracle(config, tmp_path)
    rewritten(oracle, lambda fields: fields.update(sliding_window=None))
    assert Pair(oracle).error(oracle.prompt(64)) > CLEARLY_WRONG


# Controls.


@pytest.mark.parametrize("name", ["qwen3-gqa1-yarn", "qwen2-odd-heads-yarn", "llama-llama3"])
def test_control_default_rope(name: str, tmp_path: Path) -> None:
    pair = Pair(make_text_oracle(CONFIGS[name](), tmp_path))
    prompt = pair.oracle.prompt(150)
    assert pair.error(prompt) < TOLERANCE
    rope = pair.ours.model.rope
    rope.spec = RopeSpec(theta=rope.spec.theta, rotary_dim=rope.spec.rotary_dim)
    rope.reset_buffers(torch.device("cpu"))
    assert pair.error(prompt) > CLEARLY_WRONG


@pytest.mark.parametrize("name", ["qwen3-gqa1-yarn", "mistral-yarn"])
def test_control_attention_factor(name: str, tmp_path: Path) -> None:
    pair = Pair(make_text_oracle(CONFIGS[name](), tmp_path))
    pair.ours.model.rope.attention_factor = 1.0
    assert pair.error(pair.oracle.prompt(23)) > CLEARLY_WRONG


def test_control_yarn_context(tmp_path: Path) -> None:
    pair = Pair(make_text_oracle(CONFIGS["qwen3-gqa1-yarn"](), tmp_path))
    rope = pair.ours.model.rope
    rope.spec = replace(rope.spec, original_max_position_embeddings=2048)
    rope.reset_buffers(torch.device("cpu"))
    assert pair.error(pair.oracle.prompt(150)) > CLEARLY_WRONG


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("qwen2-tied", "self_attn.qkv_proj"),
        ("qwen3-biases", "self_attn.o_proj"),
        ("llama-gqa1-biases-tied", "mlp.gate_up_proj"),
        ("llama-gqa1-biases-tied", "mlp.down_proj"),
    ],
)
def test_control_a_dropped_bias(name: str, module: str, tmp_path: Path) -> None:
    pair = Pair(make_text_oracle(CONFIGS[name](), tmp_path))
    layer = pair.ours.model.get_submodule(f"layers.1.{module}")
    with torch.no_grad():
        layer.bias.zero_()
    assert pair.error(pair.oracle.prompt(23)) > CLEARLY_WRONG


def test_control_a_dropped_norm(tmp_path: Path) -> None:
    """A Qwen3 checkpoint read as a Llama: its norms are left over, which is an error by itself."""
    oracle = make_text_oracle(CONFIGS["qwen3-odd-heads-tied"](), tmp_path)
    rewritten(oracle, lambda fields: fields.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(ValueError, match=r"unexpected tensors: .*q_norm"):
        Harness(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: part for name, part in load_file(path).items() if "_norm." not in name}
    save_file(tensors, path)
    assert Pair(oracle).error(oracle.prompt(23)) > CLEARLY_WRONG


def test_a_checkpoint_may_carry_its_head_and_its_frequencies(tmp_path: Path) -> None:
    oracle = make_text_oracle(CONFIGS["llama-gqa1-biases-tied"](), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, path)
    assert Pair(oracle).error(oracle.prompt(23)) < TOLERANCE


def test_a_missing_bias_is_an_error(tmp_path: Path) -> None:
    oracle = make_text_oracle(CONFIGS["qwen2-tied"](), tmp_path)
    path = oracle.directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"missing tensors: .*k_proj\.bias"):
        Harness(tmp_path)
