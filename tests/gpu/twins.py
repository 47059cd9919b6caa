"""How a fused kernel is compared with its plain twin, on fresh random inputs.

Tolerance: ‖out - twin‖ / ‖twin‖ <= 4e-3 in bf16: half a unit in the last place of each value on
average is 2^-9 = 2e-3, and a sum taken in another order may move each value's rounding by one.
Where two such roundings follow each other in the twin (probabilities and their sum, two products
and theirs), twice that.
"""

from importlib.util import find_spec

import torch

from kernels.attention.attention_tuning import AttentionFacts
from kernels.device import DeviceFacts
from services.common.model_spec import RopeSpec, TextSpec

TOLERANCE = 4e-3
CUDA = torch.device("cuda")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.float() - twin.float()).norm() / twin.float().norm()).item()


def attention_facts(heads: int, kv_heads: int, dim: int) -> AttentionFacts:
    return AttentionFacts(
        device=DeviceFacts.of(CUDA), dtype=torch.bfloat16, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, block_size=16, has_flashinfer=find_spec("flashinfer") is not None,
    )  # fmt: skip


def fused(heads: int = 16, kv_heads: int = 8, dim: int = 128):
    """The decoder's operations for the 2B shape, or one with other heads."""
    from services.decoder.operations import table
    from services.decoder.operations.ops import Ops

    text = TextSpec(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=28,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rms_norm_eps=1e-6,
        rope=RopeSpec(theta=5e6, rotary_dim=dim), max_position_embeddings=262144,
        tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    facts = table.KernelFacts(DeviceFacts.of(CUDA), text, torch.bfloat16)
    return Ops(table.resolve(facts))
