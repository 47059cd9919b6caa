"""The kernels of a decoder layer in a step some of whose tokens have an adapter.

A layer that no adapter changes runs by the kernels of any step. Of a changed layer, the base GEMM
stands between `shrink_adapters` and `expand_adapters`. Therefore, operations that fuse the GEMM
with its neighbours are composed instead, except for one token (`adapted_gemv`) and for up to 64
tokens (`adapted_linear`), whose kernels compute the changes themselves. A mixture whose experts or
router an adapter changes is computed anew in plain torch for the tokens with adapters; the others
keep the result of the kernel.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import plain
from kernels.tuning import GEMV_TOKENS
from services.common.nn import experts as mixture
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations.step_kernels import StepKernels


@dataclass(slots=True)
class _Adapted:
    """The kernels that the changes of adapters replace, see `StepKernels`.

    Attributes:
        base: kernels for the step's number of tokens.
        rows: adapters of the step's tokens.
        handed: products of the next layer's shrink that a kernel has computed already, with the
            input and the layer. None if the next layer has to compute them.
    """

    base: StepKernels
    rows: AdapterRows
    handed: tuple[Tensor, Linear, Tensor] | None = None

    def _is_base(self, layer: Linear) -> bool:
        return layer.adapters is None or not layer.adapters.applies(self.rows)

    def _is_fused(self, layer: Linear, x: Tensor) -> bool:
        """Returns whether the kernels before and after shrink and expand are those of one token.

        These GEMVs normalize their input and add to the residual stream.
        """
        return len(x) <= GEMV_TOKENS and layer.adapters.factors.factor is None

    def _gemv(
        self,
        x: Tensor,
        layer: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        is_swiglu: bool = False,
    ) -> Tensor | None:
        """Calls `AdaptedGemvKernel` if it computes this step and layer. Otherwise returns None."""
        if not self._is_fused(layer, x):
            return None
        return self.base.adapted_gemv(x, norm, residual, layer, self.rows, is_swiglu)

    def _shrink(self, x: Tensor, layer: Linear, norm: RMSNorm | None = None) -> Tensor:
        handed, self.handed = self.handed, None
        if handed is not None and handed[0] is x and handed[1] is layer:
            return handed[2]
        return self.base.shrink_adapters(x, norm, layer.adapters.factors, self.rows)

    def project(self, x: Tensor, layer: Linear) -> Tensor:
        if self._is_base(layer):
            return self.base.project(x, layer)
        if (found := self.base.adapted_linear(x, layer, self.rows, False)) is not None:
            return found
        products = self._shrink(x, layer)
        out = self.base.project(x, layer)
        return self.base.expand_adapters(out, products, layer.adapters.factors, self.rows)

    def linear_swiglu(self, x: Tensor, layer: Linear) -> Tensor:
        if self._is_base(layer):
            return self.base.linear_swiglu(x, layer)
        if (found := self.base.adapted_linear(x, layer, self.rows, True)) is not None:
            return found
        products = self._shrink(x, layer)
        out = self.base.project(x, layer)
        return self.base.expand_adapters_swiglu(out, products, layer.adapters.factors, self.rows)

    def norm_linear(
        self, addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
    ) -> tuple[Tensor, Tensor]:
        if self._is_base(layer):
            return self.base.norm_linear(addend, residual, norm, layer)
        if addend is None and (out := self._gemv(residual, layer, norm=norm)) is not None:
            return out, residual
        if addend is None and self._is_fused(layer, residual):
            products = self._shrink(residual, layer, norm)
            out, residual = self.base.norm_linear(None, residual, norm, layer)
            return self.base.expand_adapters(
                out, products, layer.adapters.factors, self.rows
            ), residual
        normed, residual = self.base.add_norm(addend, residual, norm)
        return self.project(normed, layer), residual

    def norm_swiglu(
        self,
        addend: Tensor | None,
        residual: Tensor,
        norm: RMSNorm,
        layer: Linear,
        consumer: Linear,
    ) -> tuple[Tensor, Tensor]:
        # A fused kernel may quantize its result for the consumer, whose factors need floats.
        if self._is_base(layer) and self._is_base(consumer):
            return self.base.norm_swiglu(addend, residual, norm, layer, consumer)
        if addend is None and not self._is_base(layer) and self._is_fused(layer, residual):
            # The result is not quantized, as this kernel needs layers without quantization.
            out = self._gemv(residual, layer, norm=norm, is_swiglu=True)
            if out is not None:
                return out, residual
            products = self._shrink(residual, layer, norm)
            out, residual = self.base.norm_linear(None, residual, norm, layer)
            factors = layer.adapters.factors
            return self.base.expand_adapters_swiglu(out, products, factors, self.rows), residual
        normed, residual = self.base.add_norm(addend, residual, norm)
        if not self._is_base(layer) and not self._is_base(consumer):
            return self._swiglu_shrink(normed, layer, consumer), residual
        return self.linear_swiglu(normed, layer), residual

    def _swiglu_shrink(self, x: Tensor, layer: Linear, consumer: Linear) -> Tensor:
        """Returns the result of SwiGLU, and keeps its products for the consumer."""
        if (found := self.base.adapted_linear(x, layer, self.rows, True)) is not None:
            return found
        products, factors = self._shrink(x, layer), layer.adapters.factors
        out = self.base.project(x, layer)
        given = out, products, factors, consumer.adapters.factors, self.rows
        pair = self.base.expand_swiglu_shrink(*given)
        if pair is None:
            return self.base.expand_adapters_swiglu(out, products, factors, self.rows)
        found, next_products = pair
        self.handed = found, consumer, next_products
        return found

    def linear_residual(self, x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
        if self._is_base(layer):
            return self.base.linear_residual(x, layer, residual)
        if layer.adapters.factors.factor is not None:  # DoRA scales the layer's output alone
            return self.project(x, layer)
        if self._gemv(x, layer, residual=residual) is not None:
            return None
        if (found := self.base.adapted_linear(x, layer, self.rows, False)) is not None:
            return found
        products = self._shrink(x, layer)
        out = self.base.linear_residual(x, layer, residual)
        if out is not None:
            return self.base.expand_adapters(out, products, layer.adapters.factors, self.rows)
        found = self.base.expand_adapters(residual, products, layer.adapters.factors, self.rows)
        if found is not residual:
            residual.copy_(found)
        return None

    def moe(
        self, x: Tensor, router: mixture.Router, experts: mixture.Experts, residual: Tensor
    ) -> Tensor | None:
        layers = (router, *experts.stacks.values())
        # No graph computes adapters of experts, see `Adapters.fit_graphs`.
        if self.rows.in_graph or all(self._is_base(layer) for layer in layers):
            return self.base.moe(x, router, experts, residual)
        term = torch.zeros_like(residual)  # a kernel may add to it
        out = self.base.moe(x, router, experts, term)
        out = term if out is None else out + term
        own = torch.where(self.rows.slots >= 0)[0]
        out[own] = mixture.moe(x[own], router, experts, residual, self.rows.part(own))
        return out

    def shared_gate(self, out: Tensor, x: Tensor, gate: Linear, residual: Tensor) -> Tensor | None:
        if self._is_base(gate):
            return self.base.shared_gate(out, x, gate, residual)
        logit = self.base.add_adapters(gate(x), x, gate.adapters.factors, self.rows)
        return plain.reduce_split_k(out, x.dtype) * torch.sigmoid(logit)


def adapted(base: StepKernels, rows: AdapterRows) -> StepKernels:
    """Returns kernels that add the changes of adapters.

    Args:
        base: kernels for the step's number of tokens.
        rows: adapters of the step's tokens.
    """
    found = _Adapted(base, rows)
    return replace(
        base,
        project=found.project,
        linear_swiglu=found.linear_swiglu,
        norm_linear=found.norm_linear,
        norm_swiglu=found.norm_swiglu,
        linear_residual=found.linear_residual,
        moe=found.moe,
        shared_gate=found.shared_gate,
    )
