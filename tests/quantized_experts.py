"""FP8 experts in plain torch as the kernels of many tokens multiply them, activations quantized."""

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from kernels.gemm.fp8_weight import w8a8_linear
from services.common.nn import experts


def _apply_one(stack: experts.StackedLinear, index: int, x: Tensor) -> Tensor:
    return w8a8_linear(x, stack.method.weight(stack)[index])


@contextmanager
def quantized_activations(*, are_quantized: bool) -> Generator[None]:
    """Within it `experts.moe` quantizes the activations of FP8 experts, or does not."""
    if not are_quantized:
        yield
        return
    with patch.object(experts, "apply_one", _apply_one):
        yield
