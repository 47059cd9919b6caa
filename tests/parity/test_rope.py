"""Inverse frequencies and attention factors agree with transformers', bit for bit."""

import math

import pytest
import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kernels.plain import rotate
from services.common.model_spec import RopeSpec
from services.decoder.models.rope import RotaryEmbedding, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096
}  # fmt: skip
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": LLAMA3,
    "llama3 of a short context": LLAMA3 | {"original_max_position_embeddings": 64, "factor": 32.0},
    "llama3 with other bounds": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 16.0},
    "yarn": YARN,
    "yarn of a short context": YARN | {"original_max_position_embeddings": 32, "factor": 2.5},
    "yarn of whole turns": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn with one bound": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS)
def test_inverse_frequencies_are_equal(parameters: dict, head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
        max_position_embeddings=32768, rope_parameters=dict(parameters),
    )  # fmt: skip
    kind = parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, factor = compute(config, "cpu")
    fields = {key: value for key, value in parameters.items() if not key.startswith("rope_")}
    spec = RopeSpec(
        kind=kind, theta=parameters["rope_theta"], rotary_dim=head_dim,
        attention_factor=0.1 * math.log(parameters["factor"]) + 1 if kind == "yarn" else 1.0,
        **fields,
    )  # fmt: skip
    assert torch.equal(inverse_frequencies(spec), expected)
    assert spec.attention_factor == factor


def test_kinds_differ() -> None:
    """What the comparison above would not show if all kinds fell back to one."""
    specs = [
        RopeSpec(kind=kind, theta=1e4, rotary_dim=64, factor=4.0,
                 original_max_position_embeddings=256, high_freq_factor=4.0)
        for kind in ("default", "llama3", "yarn")
    ]  # fmt: skip
    first, second, third = (inverse_frequencies(spec) for spec in specs)
    assert not torch.allclose(first, second, rtol=0.1)
    assert not torch.allclose(first, third, rtol=0.1)
    assert not torch.allclose(second, third, rtol=0.1)


def test_attention_factor_scales_cos_and_sin() -> None:
    positions = torch.arange(7).expand(3, 7)
    plain, scaled = (
        RotaryEmbedding(RopeSpec(theta=1e4, rotary_dim=16, attention_factor=factor))
        for factor in (1.0, 1.25)
    )
    for module in (plain, scaled):
        module.reset_buffers(torch.device("cpu"))
    for one, other in zip(
        plain(positions, torch.float), scaled(positions, torch.float), strict=True
    ):
        assert torch.equal(other, one * 1.25)


def test_one_dimensional_positions_read_the_first_row() -> None:
    module = RotaryEmbedding(RopeSpec(theta=1e4, rotary_dim=16))
    module.reset_buffers(torch.device("cpu"))
    rows = torch.stack([torch.arange(5), torch.full((5,), 99), torch.full((5,), 77)])
    same = torch.arange(5).expand(3, 5)
    for one, other in zip(module(rows, torch.float), module(same, torch.float), strict=True):
        assert torch.equal(one, other)


def test_a_partial_rotation_passes_the_rest_through() -> None:
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(12.0).view(3, 4)
    found = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(found[..., 8:], x[..., 8:])
    assert torch.equal(found[..., :8], rotate(x[..., :8], angles.cos(), angles.sin()))
    assert not torch.allclose(found[..., :8], x[..., :8])
