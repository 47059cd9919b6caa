"""The kernels of a decoder layer in a step some of whose tokens have an adapter.

A layer that no adapter changes runs by the kernels of any step. Of a changed layer, the base GEMM
is followed by `add_adapters`, or by `add_adapters_swiglu` where SwiGLU follows, so operations that
fuse the GEMM with what follows are composed instead. A mixture whose experts or router an adapter
changes is computed anew in plain torch for the tokens with adapters; the others keep the result of
the kernel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels import plain
from services.common.nn import experts as mixture
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations.step_kernels import StepKernels


def adapted(base: StepKernels, rows: AdapterRows) -> StepKernels:
    """Returns kernels that add the changes of adapters.

    Args:
        base: kernels for the step's number of tokens.
        rows: adapters of the step's tokens.
    """

    def is_base(layer: Linear) -> bool:
        return layer.adapters is None or not layer.adapters.applies(rows)

    def project(x: Tensor, layer: Linear) -> Tensor:
        out = base.project(x, layer)
        if is_base(layer):
            return out
        return base.add_adapters(out, x, layer.adapters.factors, rows)

    def linear_swiglu(x: Tensor, layer: Linear) -> Tensor:
        if is_base(layer):
            return base.linear_swiglu(x, layer)
        return base.add_adapters_swiglu(base.project(x, layer), x, layer.adapters.factors, rows)

    def norm_linear(
        addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
    ) -> tuple[Tensor, Tensor]:
        if is_base(layer):
            return base.norm_linear(addend, residual, norm, layer)
        normed, residual = base.add_norm(addend, residual, norm)
        return project(normed, layer), residual

    def norm_swiglu(
        addend: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, consumer: Linear
    ) -> tuple[Tensor, Tensor]:
        # A fused kernel may quantize its result for the consumer, whose factors need floats.
        if is_base(layer) and is_base(consumer):
            return base.norm_swiglu(addend, residual, norm, layer, consumer)
        normed, residual = base.add_norm(addend, residual, norm)
        return linear_swiglu(normed, layer), residual

    def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
        if is_base(layer):
            return base.linear_residual(x, layer, residual)
        return project(x, layer)

    def moe(
        x: Tensor, router: mixture.Router, experts: mixture.Experts, residual: Tensor
    ) -> Tensor | None:
        layers = (router, *experts.stacks.values())
        # No graph computes adapters of experts, see `Adapters.fit_graphs`.
        if rows.in_graph or all(is_base(layer) for layer in layers):
            return base.moe(x, router, experts, residual)
        term = torch.zeros_like(residual)  # a kernel may add to it
        out = base.moe(x, router, experts, term)
        out = term if out is None else out + term
        own = torch.where(rows.slots >= 0)[0]
        out[own] = mixture.moe(x[own], router, experts, residual, rows.part(own))
        return out

    def shared_gate(out: Tensor, x: Tensor, gate: Linear, residual: Tensor) -> Tensor | None:
        if is_base(gate):
            return base.shared_gate(out, x, gate, residual)
        logit = base.add_adapters(gate(x), x, gate.adapters.factors, rows)
        return plain.reduce_split_k(out, x.dtype) * torch.sigmoid(logit)

    return replace(
        base,
        project=project,
        linear_swiglu=linear_swiglu,
        norm_linear=norm_linear,
        norm_swiglu=norm_swiglu,
        linear_residual=linear_residual,
        moe=moe,
        shared_gate=shared_gate,
    )
