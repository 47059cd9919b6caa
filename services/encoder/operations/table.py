"""The dispatch table of a vision tower: the implementations of each operation, the fastest first.

The last implementation of each operation is its reference implementation in `kernels.tower.plain`.
`engine_main` resolves the table once for a tower and a device, without importing a kernel. The
setting `ENCODER_KERNELS` overrides the table's choices. If it names an implementation that cannot
run, `UnknownOverride` is raised.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import launches
from kernels import plain as shared
from kernels.attention.attention_tuning import HOPPER_HEAD_DIMS, HOPPER_SHARED_MEMORY
from kernels.attention.segments import Segments
from kernels.device import DeviceFacts
from kernels.gemm import cublaslt
from kernels.tower import plain
from services.common.model_spec import TowerSpec
from services.common.nn.dispatch import PLAIN, Implementation, Kernel, KernelTable, TokenRange

_HALF = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class TowerFacts:
    """The facts that decide which implementations can run.

    Attributes:
        device: facts about the GPU, or about the CPU.
        dtype: data type of the tower.
        num_heads: number of attention heads.
        head_dim: size of an attention head.
    """

    device: DeviceFacts
    dtype: torch.dtype
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: TowerSpec, device: DeviceFacts, dtype: torch.dtype) -> "TowerFacts":
        """Returns the facts of a tower on a device."""
        return cls(device, dtype, spec.num_heads, spec.head_dim)


def resolve(
    facts: TowerFacts, overrides: Mapping[str, str] | None = None
) -> KernelTable[TowerFacts]:
    """Makes the table of a tower on a device.

    Args:
        facts: facts about the tower and the device.
        overrides: result of `parse_overrides`. None if no choice is overridden.

    Raises:
        UnknownOverride: an override names an implementation that cannot run.
    """
    return KernelTable.resolve(IMPLEMENTATIONS, facts, overrides)


def _triton(operation: str) -> "Implementation[TowerFacts]":
    """Returns the row of a Triton kernel. Its module is imported only where Triton is installed."""

    def create(facts: TowerFacts) -> Kernel:
        return getattr(importlib.import_module("kernels.tower.elementwise"), operation)

    return Implementation(operation, "triton", create, _without_triton)


def _plain(operation: str) -> "Implementation[TowerFacts]":
    """Returns the row of the reference implementation."""
    return Implementation(operation, PLAIN, lambda _: getattr(plain, operation))


def _shared(operation: str, module: str) -> "tuple[Implementation[TowerFacts], ...]":
    """Returns the rows of an operation that the language model has, too."""

    def create(facts: TowerFacts) -> Kernel:
        return getattr(importlib.import_module(f"kernels.gemm.{module}"), operation)

    return (
        Implementation(operation, "triton", create, _without_triton),
        Implementation(operation, PLAIN, lambda _: getattr(shared, operation)),
    )


def _hopper_attention(facts: TowerFacts) -> Kernel:
    module = importlib.import_module("kernels.attention.hopper_attention")
    return module.HopperAttention(facts.device.num_sms)


def _varlen_attention(facts: TowerFacts) -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> object:
        longest = segments.max_length(len(query))
        ends = segments.cu_seqlens
        return varlen_attn(query, key, value, ends, ends, longest, longest)

    return attend


def _tiled(by_torch: Kernel, *, gelu: bool = False) -> Kernel:
    """Returns a linear layer by cuBLASLt with tile sizes chosen by this project. The results equal
    torch's bit for bit. For sizes without such a tile, `by_torch` computes the layer.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = cublaslt.linear(x, weight, bias, gelu=gelu)
        return by_torch(x, weight, bias) if found is None else found

    return linear


def _linear_gelu(facts: TowerFacts) -> Kernel:
    """Returns a linear layer with GELU. cuBLASLt's epilogue adds the bias and applies GELU before
    it rounds the result.
    """
    fused = torch._addmm_activation  # pyright: ignore[reportPrivateImportUsage]
    return lambda x, weight, bias: fused(bias, x, weight.t(), use_gelu=True)


def _linear_add(facts: TowerFacts) -> Kernel:
    """Returns a linear layer whose epilogue adds the result to the residual stream."""

    def linear_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor | None:
        found = cublaslt.linear(x, weight, bias, residual=residual)
        return plain.linear_add(x, weight, bias, residual) if found is None else None

    return linear_add


def _many_tokens(_: TowerFacts) -> TokenRange:
    """Returns the numbers of tokens for which cuBLASLt with these tiles is the fastest, as measured
    on an H200. For fewer tokens, torch's choice of a kernel is faster.
    """
    return TokenRange(least=cublaslt.LEAST_TOKENS, least_eager=launches.LAUNCH_HIDING_TOKENS)


def _without_triton(facts: TowerFacts) -> str:
    if facts.device.kind != "cuda":
        return f"it runs on CUDA, not on {facts.device.kind}"
    return "" if facts.device.has_triton else "the package triton is not installed"


def _without_half_on_cuda(facts: TowerFacts) -> str:
    if facts.device.kind != "cuda":
        return f"it runs on CUDA, not on {facts.device.kind}"
    return "" if facts.dtype in _HALF else f"it has no kernel for {facts.dtype}"


def _without_hopper(facts: TowerFacts) -> str:
    if why := _without_half_on_cuda(facts) or _without_triton(facts):
        return why
    return "" if facts.device.is_hopper else "it needs compute capability 9.0 (wgmma)"


def _without_hopper_attention(facts: TowerFacts) -> str:
    if why := _without_hopper(facts):
        return why
    if facts.head_dim not in HOPPER_HEAD_DIMS:
        return f"it has no kernel for head_dim {facts.head_dim}"
    if facts.device.shared_memory_bytes < HOPPER_SHARED_MEMORY:
        return f"it needs {HOPPER_SHARED_MEMORY} bytes of shared memory"
    return ""


def _without_varlen(facts: TowerFacts) -> str:
    if why := _without_half_on_cuda(facts):
        return why
    if facts.device.capability < _FLASH_CAPABILITY:
        return "it needs compute capability 8.0"
    return f"it has no kernel for head_dim {facts.head_dim}" if facts.head_dim % 8 else ""


IMPLEMENTATIONS: tuple[Implementation[TowerFacts], ...] = (
    _triton("pack_patches"),
    _plain("pack_patches"),
    _triton("add_layer_norm"),
    _plain("add_layer_norm"),
    _triton("layer_norm"),
    _plain("layer_norm"),
    *_shared("add_rms_norm", "add_norm"),
    *_shared("rms_norm", "add_norm"),
    *_shared("silu_and_mul", "silu_mul"),
    _triton("rotary"),
    _plain("rotary"),
    Implementation("ragged_attention", "hopper", _hopper_attention, _without_hopper_attention),
    Implementation("ragged_attention", "torch_varlen", _varlen_attention, _without_varlen),
    _plain("ragged_attention"),
    Implementation(
        "linear", "cublaslt", lambda _: _tiled(plain.linear), _without_hopper, _many_tokens
    ),
    _plain("linear"),
    Implementation(
        "linear_gelu",
        "cublaslt",
        lambda facts: _tiled(_linear_gelu(facts), gelu=True),
        _without_hopper,
        _many_tokens,
    ),
    Implementation("linear_gelu", "cublas", _linear_gelu, _without_half_on_cuda),
    _plain("linear_gelu"),
    _plain("quick_gelu"),
    Implementation("linear_add", "cublaslt", _linear_add, _without_hopper, _many_tokens),
    _plain("linear_add"),
)
