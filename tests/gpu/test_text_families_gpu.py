"""Text families on a GPU: the shapes of published models with four layers, bf16, against Hugging
Face. Metric and tolerance as in test_decoder_gpu.py.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kernels.sampling.sampling import greedy
from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import GPU, options, prompts, relative

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 150016
DECODES = 8
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}


def config(
    kind: Callable[..., PreTrainedConfig], heads: int, kv_heads: int, hidden: int,
    intermediate: int, **fields: object,
) -> PreTrainedConfig:  # fmt: skip
    given = {
        "vocab_size": VOCAB_SIZE, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_size": hidden, "intermediate_size": intermediate,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, "rope_parameters": DEFAULT,
    } | fields  # fmt: skip
    return kind(**given)


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3-4B, yarn": lambda: config(
        Qwen3Config, 32, 8, 2560, 9728, head_dim=128, rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": lambda: config(Qwen2Config, 14, 2, 896, 4864, tie_word_embeddings=True),
    "Qwen2.5-7B": lambda: config(Qwen2Config, 28, 4, 3584, 18944),
    "Llama-3.2-1B": lambda: config(
        LlamaConfig, 32, 8, 2048, 8192, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "Llama-3.2-3B": lambda: config(
        LlamaConfig, 24, 8, 3072, 8192, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "Llama with all biases": lambda: config(
        LlamaConfig, 32, 8, 4096, 14336, attention_bias=True, mlp_bias=True
    ),
    "Mistral-Nemo": lambda: config(
        MistralConfig, 32, 8, 5120, 14336, head_dim=128, sliding_window=None
    ),
}  # fmt: skip


@dataclass
class Pair:
    """One checkpoint: our harness, and logits of HF in float32 and bf16 for the same prompts."""

    ours: Harness
    prompts: list[list[int]]
    exact: list[Tensor]  # [T, V] of each prompt
    rounded: list[Tensor]


@pytest.fixture(scope="module", params=SHAPES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    with torch.device(GPU):
        theirs = AutoModelForCausalLM.from_config(SHAPES[request.param](), dtype=torch.float32)
    theirs.eval()
    fill(theirs)
    ids = prompts(DECODES, seed=3)
    frequencies = theirs.model.rotary_emb.inv_freq.clone()
    exact = [logits(theirs, one) for one in ids]
    theirs.bfloat16()
    theirs.model.rotary_emb.inv_freq = frequencies  # `.bfloat16()` casts buffers, too
    rounded = [logits(theirs, one) for one in ids]
    theirs.save_pretrained(directory)
    del theirs
    torch.cuda.empty_cache()
    with closing(Harness(directory, **options(kv_cache_bytes=2 << 30))) as ours:
        yield Pair(ours, ids, exact, rounded)
    torch.cuda.empty_cache()


@torch.no_grad()
def fill(model: PreTrainedModel) -> None:
    """Norms and biases that matter, and weights that bf16 holds exactly."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.2)
        elif parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([token_ids], device=GPU)).logits[0].float()


def check(actual: Tensor, exact: Tensor, rounded: Tensor) -> None:
    noise, error = relative(rounded, exact), relative(actual.float(), exact)
    print(f"\nfrom float32: HF {noise:.4f}, ours {error:.4f}")
    assert error < 1.3 * noise


def test_prompts_are_as_close_to_float32_as_hugging_faces(pair: Pair) -> None:
    sequences = [pair.ours.start(ids, row) for row, ids in enumerate(pair.prompts)]
    actual = pair.ours.logits(*(pair.ours.chunk(sequence) for sequence in sequences))
    for sequence in sequences:
        pair.ours.finish(sequence)
    check(actual, torch.cat(pair.exact), torch.cat(pair.rounded))


@pytest.mark.parametrize("count", [1, 2, DECODES])
def test_decodes_are_as_close_to_float32_as_hugging_faces(pair: Pair, count: int) -> None:
    sequences = [pair.ours.start(ids, row) for row, ids in enumerate(pair.prompts[:count])]
    for sequence in sequences:
        pair.ours.step(pair.ours.chunk(sequence, len(sequence.token_ids) - 1))
    actual = pair.ours.logits(*(pair.ours.chunk(sequence) for sequence in sequences))
    for sequence in sequences:
        pair.ours.finish(sequence)
    # One row's noise is a matter of chance; that of all prompts' rows is not.
    noise = relative(torch.cat(pair.rounded), torch.cat(pair.exact))
    exact = torch.stack([rows[-1] for rows in pair.exact[:count]])
    assert relative(actual.float(), exact) < 1.3 * noise


@pytest.mark.parametrize("count", [1, 2, 5, DECODES])
def test_graphs_agree_with_eager_steps(pair: Pair, count: int) -> None:
    ours = pair.ours
    assert ours.runner.computer.graphs, "no backend here captures steps"
    running = [ours.start(ids, row) for row, ids in enumerate(pair.prompts[:count])]
    for sequence in running:
        ours.step(ours.chunk(sequence))
    chunks = [ours.chunk(sequence) for sequence in running]
    eager = ours.logits(*chunks)
    tokens = ours.launch(*chunks).result().token_ids[:, 0].tolist()
    captured = ours.runner.computer.graphs[0].logits[:count]
    # Padded to a bucket, GEMMs are of another size, as in test_decoder_graphs.py.
    assert relative(captured, eager) < 5e-2
    assert tokens == greedy(captured).tolist()
    for sequence in running:
        ours.finish(sequence)
