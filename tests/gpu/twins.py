"""How a fused kernel is compared with its plain twin, on fresh random inputs.

Tolerance: ‖out - twin‖ / ‖twin‖ <= 4e-3 in bf16: half a unit in the last place of each value on
average is 2^-9 = 2e-3, and a sum taken in another order may move each value's rounding by one.
Where two such roundings follow each other in the twin (probabilities and their sum, two products
and theirs), twice that.
"""

import torch

TOLERANCE = 4e-3
CUDA = torch.device("cuda")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.float() - twin.float()).norm() / twin.float().norm()).item()


def fused(heads: int = 16, kv_heads: int = 8, dim: int = 128):
    """The decoder's fused operations."""
    from services.decoder.kernels.few_attention import FewAttention
    from services.decoder.kernels.triton_ops import TritonOps

    return TritonOps(max_few_tokens=2, few_attention=FewAttention(CUDA, heads, kv_heads, dim))
