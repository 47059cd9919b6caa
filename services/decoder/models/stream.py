"""The residual stream between the parts of a language model."""

from typing import NamedTuple

from torch import Tensor

from kernels import plain
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations.step_kernels import StepKernels


class Stream(NamedTuple):
    """The residual stream of T tokens, and what the last GEMM has still to add to it.

    The hidden state is the sum `residual + addend`. The addition is left to the next norm, whose
    kernel does both, unless the GEMM itself has added its output to `residual`.

    Attributes:
        residual: `[T, hidden]`. Kernels may overwrite it, so a stream is used once.
        addend: output of the last GEMM, `[T, hidden]`, or split-K partials of it,
            `[S, T, hidden]` float32. None if nothing is left to be added.
    """

    residual: Tensor
    addend: Tensor | None = None

    def normed(self, norm: RMSNorm, kernels: StepKernels) -> tuple[Tensor, Tensor]:
        """Returns the norm of the hidden state, and the hidden state, both `[T, hidden]`."""
        return kernels.add_norm(self.addend, self.residual, norm)

    def projected(
        self, norm: RMSNorm, layer: Linear, kernels: StepKernels
    ) -> tuple[Tensor, Tensor]:
        """Returns a layer's output for the norm of the hidden state, and the hidden state.

        The output is `[T, N]` or split-K partials of it.
        """
        return kernels.norm_linear(self.addend, self.residual, norm, layer)

    def swiglu(
        self, norm: RMSNorm, layer: Linear, consumer: Linear, kernels: StepKernels
    ) -> tuple[Tensor, Tensor]:
        """Returns SwiGLU of a merged projection of the norm, and the hidden state.

        Args:
            norm: norm of the hidden state.
            layer: merged gate and up projection.
            consumer: layer that multiplies the result next, see `NormSwigluKernel`.
            kernels: the kernels of the step.
        """
        return kernels.norm_swiglu(self.addend, self.residual, norm, layer, consumer)

    def hidden(self) -> Tensor:
        """Returns the hidden state `[T, hidden]`, which may be `residual` itself."""
        if self.addend is None:
            return self.residual
        return self.residual + plain.reduce_split_k(self.addend, self.residual.dtype)
