"""FP8 experts in plain torch as the kernels of many tokens multiply them, activations quantized."""

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from kernels.gemm.fp8_weight import w8a8_linear
from services.common.nn.fp8 import Fp8Linear
from services.common.nn.linear import StackedLinear


def _apply_one(method: Fp8Linear, stack: StackedLinear, index: int, x: Tensor) -> Tensor:
    return w8a8_linear(x, method.weight(stack)[index])


@contextmanager
def quantized_activations(*, are_quantized: bool) -> Generator[None]:
    """Within it `experts.moe` quantizes the activations of FP8 experts, or does not."""
    if not are_quantized:
        yield
        return
    with patch.object(Fp8Linear, "apply_one", _apply_one):
        yield
