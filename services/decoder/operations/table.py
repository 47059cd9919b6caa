"""The decoder's dispatch table: kernels by operation, what each needs, and where it is the fastest.

Rows are in order of preference. The last row of an operation is its specification in torch, or
`unfused` if the operation is composed of other operations of the table. Constants are in `tuning`.
A kernel's module is imported only when the kernel is used, so a table can be resolved and printed
for any device, without a GPU and without Triton.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import draft_places, plain, tuning
from kernels.adapters import plain as adapters
from kernels.adapters.factors import AdapterRows
from kernels.adapters.token_groups import group_tokens
from kernels.attention import attention_tuning
from kernels.device import DeviceFacts
from kernels.gemm import cublaslt, fp8_weight
from kernels.linear_attention import delta_rule, delta_rule_drafts
from kernels.sampling import sampling
from kernels.tuning import SwigluGemmConfig
from services.common.model_spec import RopeSpec, TextSpec
from services.common.nn import experts
from services.common.nn.dispatch import Implementation, Kernel, KernelTable, TokenRange
from services.common.nn.formats import Rows, rows_of
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.common.nn.quantized import gemv_after_norm, of_layer
from services.decoder.operations.kernel_facts import UNQUANTIZED, KernelFacts, attention_facts

_DELTA = "linear_attention.delta_rule"
_GATES = "linear_attention.output_gates"
_EXPERT_FORMATS = {UNQUANTIZED, "fp8_block", "fp8_channel"}
_PACKED_FORMATS = {"w4a16", "w8a16", "nvfp4", "mxfp4", "mxfp8"}

Row = Implementation[KernelFacts]
# Returns why an implementation cannot run for these facts, or "".
Check = Callable[[KernelFacts], str]
# Creates the kernel of a row. Its arguments are those of `StepKernels` or of `ops.Ops`.
Create = Callable[[KernelFacts], Kernel]


# Checks.


def _needs(*checks: Check) -> Check:
    """Returns a check that finds the first obstacle of several checks."""

    def obstacle(facts: KernelFacts) -> str:
        return next(filter(None, (check(facts) for check in checks)), "")

    return obstacle


def _triton(facts: KernelFacts) -> str:
    return facts.device.triton_obstacle


def _pdl(facts: KernelFacts) -> str:
    return "" if facts.device.supports_pdl else "needs programmatic dependent launch"


def _hopper(facts: KernelFacts) -> str:
    return "" if facts.device.is_hopper else "needs Hopper's wgmma"


def _half_precision(facts: KernelFacts) -> str:
    """Checks for half precision, because tensor cores would round float32."""
    return "" if facts.dtype.itemsize == 2 else f"needs bfloat16 or float16, not {facts.dtype}"


def _formats(known: Collection[str], what: str) -> Check:
    """Returns a check for layers of one of these weight formats, which `what` describes."""
    return lambda facts: (
        "" if facts.weight_format in known else f"needs {what}, not {facts.weight_format}"
    )


def _one_rank(facts: KernelFacts) -> str:
    """Checks for one rank: with several, a sum comes between GEMM and residual addition."""
    return "" if facts.num_ranks == 1 else "needs all of the layer on one rank"


def _several_ranks(facts: KernelFacts) -> str:
    return "a GEMV adds to the residual" if facts.num_ranks == 1 else ""


def _no_mlp_bias(facts: KernelFacts) -> str:
    return "needs an MLP without biases" if facts.text.mlp_bias else ""


def _delta_sizes(facts: KernelFacts) -> str:
    """Checks the sizes of linear attention: a CTA holds all rows of a head's state."""
    sizes = facts.text.linear_attention
    if sizes is None:
        return "the model has no linear attention"
    largest = max(sizes.key_head_dim, sizes.value_head_dim)
    return "" if largest <= 128 else f"needs heads of at most 128 elements, not {largest}"


def _even_head(facts: KernelFacts) -> str:
    head = facts.text.head_dim
    fits = head % 2 == 0 and head <= 256
    return "" if fits else f"needs an even head_dim up to 256, not {head}"


def _expert_formats(facts: KernelFacts) -> str:
    other = sorted(set(facts.weight_format.split("+")) - _EXPERT_FORMATS)
    return f"needs experts in bf16 or FP8, not {', '.join(other)}" if other else ""


def _experts(facts: KernelFacts) -> str:
    """Checks that the kernels' tiles, or blocks of scales, divide the experts' matrices."""
    moe, unit = facts.text.moe, fp8_weight.BLOCK if "fp8_" in facts.weight_format else 64
    if moe is None:
        return "needs experts"
    odd = [size for size in (facts.text.hidden_size, moe.intermediate_size) if size % unit]
    return f"{odd[0]} is not a multiple of {unit}" if odd else ""


def _shared_expert(facts: KernelFacts) -> str:
    moe = facts.text.moe
    return "" if moe is not None and moe.shared_intermediate_size else "needs a shared expert"


def _skinny_projections(facts: KernelFacts) -> str:
    for rows, columns in ((facts.qkv_size, facts.text.hidden_size), *facts.residual_shapes):
        if tuning.split_k_config(facts.device, rows, columns) is None:
            return f"the weight [{rows}, {columns}] does not divide into tiles that fit an SM"
    return ""


def _skinny_swiglu(facts: KernelFacts) -> str:
    rows, columns = facts.gate_up_shape
    if tuning.skinny_swiglu_config(facts.device, rows, columns) is None:
        return f"the weight [{rows}, {columns}] does not divide into tiles that fit an SM"
    return ""


def _swiglu_tiles(facts: KernelFacts) -> str:
    return SwigluGemmConfig(facts.device.num_sms).obstacle(*facts.gate_up_shape)


def _fused_decode(facts: KernelFacts) -> str:
    return attention_tuning.fused_decode_obstacle(attention_facts(facts))


# Numbers of tokens for which implementations are the fastest.


def _tokens(least: int = 1, most: int | None = None) -> Any:  # noqa: ANN401
    return lambda _: TokenRange(least, most)


def _slow_launch(least: int) -> Any:  # noqa: ANN401
    """Returns the `tokens` of an implementation whose launch takes the host long."""
    return lambda facts: TokenRange(least, None, facts.launch_hiding_tokens)


def _swiglu_gemm_tokens(facts: KernelFacts) -> TokenRange:
    rows, config = facts.gate_up_shape[0], SwigluGemmConfig(facts.device.num_sms)
    return TokenRange(
        least=tuning.SKINNY_TOKENS + 1,
        least_eager=facts.launch_hiding_tokens,
        is_faster=lambda num_tokens: config.is_faster(num_tokens, rows),
        condition="where tiles fill the SMs",
    )


def _fused_decode_sequences(facts: KernelFacts) -> TokenRange:
    contexts = attention_tuning.size_class(attention_facts(facts)).fused_max_context
    limits = ", ".join(str(limit) for limit in contexts)
    return TokenRange(most=len(contexts), condition=f"of a context up to {limits}")


# Creation of kernels, which imports their modules.


def _kernel(module: str, name: str, *, pdl: bool = False) -> Create:
    """Returns a row's `create` for a function that takes the operation's arguments.

    Args:
        module: module within `kernels`.
        name: name of the function.
        pdl: True if the function also takes the mode of dependent launch.
    """

    def create(facts: KernelFacts) -> Kernel:
        kernel = getattr(importlib.import_module(f"kernels.{module}"), name)
        return partial(kernel, pdl=facts.pdl) if pdl else kernel

    return create


def _gemv(facts: KernelFacts, name: str) -> Kernel:
    return _kernel("gemm.gemv", name, pdl=True)(facts)


def _delta_prefill(facts: KernelFacts) -> Kernel:
    kernel = _kernel(f"{_DELTA}_prefill", "prefill")(facts)
    return partial(kernel, device=facts.device)


def _gemm_residual(facts: KernelFacts) -> Kernel:
    """Creates a GEMM whose accumulator is the residual stream.

    The library decides whether the product is rounded before it is added.
    """

    def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
        if cublaslt.linear(x, layer.weight, layer.bias, residual=residual) is None:
            if layer.bias is not None:
                return layer(x)
            residual.addmm_(x, layer.weight.t())
        return None

    return linear_residual


def _cublaslt_linear(facts: KernelFacts) -> Kernel:
    """Creates a GEMM with a tile of our choice where cuBLAS would choose a slower tile.

    The results have the same bits.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = cublaslt.linear(x, weight, bias)
        return F.linear(x, weight, bias) if found is None else found

    return linear


def _skinny(facts: KernelFacts, name: str) -> Kernel:
    kernel = _kernel("gemm.skinny_gemm", name, pdl=True)(facts)
    return partial(kernel, shared_memory_bytes=facts.device.shared_memory_bytes)


def _skinny_project(facts: KernelFacts) -> Kernel:
    gemm = _skinny(facts, "split_k_partials")
    config = cache(partial(tuning.split_k_config, facts.device))

    def project(x: Tensor, layer: Linear) -> Tensor:
        chosen = config(layer.out_features, layer.in_features)
        if chosen is None:  # projections of linear attention may have any number of rows
            return layer(x)
        return gemm(x, layer.weight, layer.bias, chosen)

    return project


def _skinny_linear_swiglu(facts: KernelFacts) -> Kernel:
    gemm = _skinny(facts, "linear_swiglu")
    config = tuning.skinny_swiglu_config(facts.device, *facts.gate_up_shape)
    return lambda x, layer: gemm(x, layer.weight, layer.bias, config)


def _adapted_gemv(facts: KernelFacts) -> Kernel:
    from kernels.gemm import gemv

    def multiply(
        x: Tensor,
        norm: RMSNorm | None,
        residual: Tensor | None,
        layer: Linear,
        rows: AdapterRows,
        is_swiglu: bool,
    ) -> Tensor:
        assert layer.adapters is not None
        pdl, changes = facts.pdl, layer.adapters.factors.changes(rows)
        scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        weight, bias = layer.method.weight(layer), layer.bias
        if scale is not None:
            kernel = gemv.norm_swiglu if is_swiglu else gemv.norm_linear
            return kernel(x, scale, eps, weight, bias, pdl=pdl, changes=changes)
        if residual is None:
            return gemv.linear(x, weight, bias, pdl=pdl, changes=changes)
        gemv.linear_residual(x, weight, bias, residual, pdl=pdl, changes=changes)
        return residual

    return multiply


def _adapted_skinny(facts: KernelFacts) -> Kernel:
    partials, swiglu = _skinny(facts, "split_k_partials"), _skinny(facts, "linear_swiglu")
    split_k = cache(partial(tuning.split_k_config, facts.device))
    whole = cache(partial(tuning.skinny_swiglu_config, facts.device))

    def multiply(x: Tensor, layer: Linear, rows: AdapterRows, is_swiglu: bool) -> Tensor | None:
        assert layer.adapters is not None
        factors = layer.adapters.factors
        config = (whole if is_swiglu else split_k)(layer.out_features, layer.in_features)
        if factors.factor is not None or config is None:
            return None
        if any(size % config.rows for size in factors.sizes):  # a tile would have two modules
            return None
        kernel = swiglu if is_swiglu else partials
        return kernel(x, layer.weight, layer.bias, config, changes=factors.changes(rows))

    return multiply


def _swiglu_gemm(facts: KernelFacts) -> Kernel:
    from kernels.gemm import swiglu_gemm

    config = tuning.swiglu_gemm_config(facts.device, facts.gate_up_shape[1])
    return lambda x, layer: swiglu_gemm.linear_swiglu(x, layer.weight, config)


def _silu_mul(facts: KernelFacts) -> Kernel:
    activate = _kernel("gemm.silu_mul", "silu_and_mul", pdl=True)(facts)
    return lambda x, layer: activate(layer(x))


def _moe(facts: KernelFacts, name: str) -> Kernel:
    from services.decoder.operations.moe import MoEKernels

    assert facts.text.moe is not None
    return getattr(MoEKernels(facts.device, facts.text.moe, facts.pdl), name)


def _shared_gate(facts: KernelFacts) -> Kernel:
    add = _kernel("experts.shared_gate", "add", pdl=True)(facts)

    def gated(out: Tensor, x: Tensor, gate: Linear, residual: Tensor) -> Tensor | None:
        if not gate.is_plain:
            return plain.shared_gate(out, x, gate, residual)
        return add(out, x, gate.weight, residual)

    return gated


def _fused_decode_attention(facts: KernelFacts) -> Kernel:
    from kernels.attention.fused_decode_attention import FusedDecodeAttention

    return FusedDecodeAttention(attention_facts(facts), torch.device("cuda"))


def _plain(kernel: Kernel) -> Create:
    """Returns a row's `create` for a function in torch."""
    return lambda _: kernel


def _unfused(_: KernelFacts) -> None:
    """Creates nothing, because `Ops` composes the operation of other operations."""


def _twins(
    operation: str, module: str, twin: Kernel, *checks: Check, pdl: bool = False
) -> tuple[Row, Row]:
    """Returns the rows of a Triton kernel and of its plain twin, which has the same name.

    Args:
        operation: name of the operation.
        module: module of the Triton kernel within `kernels`.
        twin: the specification in torch.
        checks: conditions under which the Triton kernel can run, besides that Triton is there.
        pdl: True if the Triton kernel takes the mode of dependent launch.
    """
    kernel = _kernel(module, twin.__name__, pdl=pdl)
    return (
        Row(operation, "triton", kernel, _needs(_triton, *checks)),
        Row(operation, "plain", _plain(twin)),
    )


def _adapter_twins(operation: str, twin: Kernel) -> tuple[Row, Row]:
    """Returns the rows of a kernel of `adapters.shrink_expand` and of its plain twin."""

    def create(facts: KernelFacts) -> Kernel:
        kernel = _kernel("adapters.shrink_expand", twin.__name__, pdl=True)(facts)
        return partial(kernel, shared_memory_bytes=facts.device.shared_memory_bytes)

    return (
        Row(operation, "triton", create, _needs(_triton, _half_precision)),
        Row(operation, "plain", _plain(twin)),
    )


_unquantized = _formats({UNQUANTIZED}, "unquantized weights")
_packed_experts = _formats(_PACKED_FORMATS, "experts of packed codes")
_int8_experts = _formats({"int8"}, "experts in INT8")
_FUSED_GEMV = _needs(_triton, _pdl, _unquantized)
_SKINNY = _needs(_triton, _pdl, _half_precision, _unquantized)
_ANY_MOE = _needs(_experts, _triton, _half_precision)
_MOE = _needs(_expert_formats, _ANY_MOE)
_few_tokens = _tokens(1, tuning.MOE_GEMV_TOKENS)

ROWS: Sequence[Row] = (
    *_twins("enter_step", "step_entry", plain.enter_step),
    *_twins("rope_and_rows", "step_entry", plain.rope_and_rows, _even_head, pdl=True),
    *_twins("rms_norm", "gemm.add_norm", plain.rms_norm, pdl=True),
    *_twins("add_rms_norm", "gemm.add_norm", plain.add_rms_norm, pdl=True),
    Row(
        "norm_linear", "gemv", lambda facts: gemv_after_norm(_gemv(facts, "norm_linear")),
        _FUSED_GEMV, _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row("norm_linear", "unfused", _unfused),
    Row(
        "norm_swiglu", "gemv", lambda facts: gemv_after_norm(_gemv(facts, "norm_swiglu")),
        _FUSED_GEMV, _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row("norm_swiglu", "unfused", _unfused),
    Row(
        "linear_residual", "gemv", lambda facts: of_layer(_gemv(facts, "linear_residual")),
        _needs(_triton, _pdl, _unquantized, _one_rank), _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row(
        "linear_residual", "gemm", _gemm_residual,
        _needs(_triton, _half_precision, _unquantized, _one_rank),
        _slow_launch(tuning.RESIDUAL_GEMM_TOKENS),
    ),
    Row("linear_residual", "unfused", _unfused),
    Row(
        "project", "gemv", lambda facts: of_layer(_gemv(facts, "linear")),
        _needs(_several_ranks, _FUSED_GEMV), _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row(
        "project", "skinny_gemm", _skinny_project,
        _needs(_SKINNY, _skinny_projections), _tokens(1, tuning.SKINNY_TOKENS),
    ),
    Row("project", "linear", _plain(lambda x, layer: layer(x))),
    Row(
        "linear", "cublaslt", _cublaslt_linear, _needs(_hopper, _half_precision),
        _slow_launch(cublaslt.LEAST_TOKENS),
    ),
    Row("linear", "plain", _plain(F.linear)),
    Row(
        "linear_swiglu", "skinny_gemm", _skinny_linear_swiglu,
        _needs(_SKINNY, _skinny_swiglu), _tokens(1, tuning.SKINNY_TOKENS),
    ),
    Row(
        "linear_swiglu", "swiglu_gemm", _swiglu_gemm,
        _needs(_triton, _hopper, _half_precision, _unquantized, _no_mlp_bias, _swiglu_tiles),
        _swiglu_gemm_tokens,
    ),
    Row("linear_swiglu", "silu_mul", _silu_mul, _triton),
    Row("linear_swiglu", "plain", _plain(lambda x, layer: plain.silu_and_mul(layer(x)))),
    Row("moe", "gemv", lambda facts: _moe(facts, "gemv"), _MOE, _few_tokens),
    Row("moe", "grouped_gemm", lambda facts: _moe(facts, "grouped_gemm"), _MOE),
    Row("moe", "packed", lambda facts: _moe(facts, "packed"), _needs(_packed_experts, _ANY_MOE)),
    Row("moe", "int8", lambda facts: _moe(facts, "int8"), _needs(_int8_experts, _ANY_MOE)),
    Row("moe", "dequantized", lambda facts: _moe(facts, "grouped_gemm"), _ANY_MOE),
    Row("moe", "plain", _plain(experts.moe)),
    Row("shared_gate", "triton", _shared_gate, _needs(_triton, _shared_expert)),
    Row("shared_gate", "plain", _plain(plain.shared_gate)),
    *_twins("qk_rope_cache", "attention.qk_rope_cache", plain.qk_rope_cache, _even_head, pdl=True),
    Row(
        "fused_decode_attention", "triton", _fused_decode_attention,
        _needs(_triton, _fused_decode), _fused_decode_sequences,
    ),
    Row("fused_decode_attention", "plain", _plain(plain.fused_decode_attention)),
    *_twins("group_tokens", "adapters.group_tokens", group_tokens),
    *_adapter_twins("shrink_adapters", adapters.shrink_adapters),
    *_adapter_twins("expand_adapters", adapters.expand_adapters),
    *_adapter_twins("expand_adapters_swiglu", adapters.expand_adapters_swiglu),
    *_adapter_twins("expand_swiglu_shrink", adapters.expand_swiglu_shrink),
    Row(
        "adapted_gemv", "gemv", _adapted_gemv, _needs(_FUSED_GEMV, _half_precision, _one_rank),
        _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row("adapted_gemv", "unfused", _unfused),
    Row(
        "adapted_linear", "skinny_gemm", _adapted_skinny,
        _needs(_SKINNY, _skinny_projections, _skinny_swiglu),
        _tokens(tuning.GEMV_TOKENS + 1, tuning.SKINNY_TOKENS),
    ),
    Row("adapted_linear", "unfused", _unfused),
    *_twins("output_gate", _GATES, plain.output_gate, pdl=True),
    *_twins("reduce_split_k", "gemm.skinny_gemm", plain.reduce_split_k, pdl=True),
    *_twins("delta_decode", f"{_DELTA}_decode", delta_rule.decode, _delta_sizes, pdl=True),
    *_twins("delta_verify", f"{_DELTA}_verify", delta_rule_drafts.verify, _delta_sizes, pdl=True),
    Row("delta_prefill", "triton", _delta_prefill, _needs(_triton, _delta_sizes)),
    Row("delta_prefill", "plain", _plain(delta_rule.prefill)),
    *_twins("gated_norm", _GATES, delta_rule.gated_norm, pdl=True),
    Row(
        "logits", "gemv", _kernel("gemm.gemv", "linear", pdl=True), _needs(_triton, _pdl),
        _tokens(1, tuning.GEMV_TOKENS),
    ),
    Row("logits", "plain", _plain(plain.linear)),
    *_twins("greedy", "sampling.greedy", sampling.greedy),
    *_twins("draft_places", "step_entry", draft_places.draft_places),
    *_twins("draft_sources", "draft_states", draft_places.draft_sources),
    *_twins("keep_hidden", "draft_states", draft_places.keep_hidden),
    *_twins("greedy_rescored", "sampling.greedy", sampling.greedy_rescored),
    *_twins("greedy_masked", "sampling.greedy", sampling.greedy_masked),
    *_twins("penalize", "sampling.penalties", sampling.penalize),
    *_twins("count_tokens", "sampling.penalties", sampling.count_tokens),
    *_twins("sample", "sampling.top_k_top_p_sampling", sampling.sample),
)  # fmt: skip


# Operations that multiply a layer's weight, and the position of the layer among their arguments.
# These operations are resolved for each weight format.
LAYER_ARGUMENT = {
    "norm_linear": 3,
    "norm_swiglu": 3,
    "linear_residual": 1,
    "project": 1,
    "linear_swiglu": 1,
    "moe": 2,
    "adapted_gemv": 3,
    "adapted_linear": 1,
}


def resolve(
    facts: KernelFacts,
    overrides: Mapping[str, str] | None = None,
    rows: Sequence[Row] = ROWS,
    formats: Rows | None = None,
) -> KernelTable[KernelFacts]:
    """Resolves the table for a model on a device.

    Args:
        facts: facts of device, model and weights.
        overrides: the user's choices, see `dispatch.parse_overrides`.
        rows: rows of all weight formats, in order of preference.
        formats: weight formats of the model's layers, with the rows that each adds. None if all
            layers have the format of the facts.

    Raises:
        UnknownOverride: see `dispatch.parse_overrides`.
    """
    formats = rows_of(facts.weight_format) if formats is None else formats
    if len(formats) == 1:
        ((weight_format, added),) = formats.items()
        alone = replace(facts, weight_format=weight_format)
        return KernelTable.resolve((*added, *rows), alone, overrides)
    everything = chain(rows, *formats.values())
    shared = [row for row in everything if row.operation not in LAYER_ARGUMENT]
    by_format = {
        weight_format: (
            replace(facts, weight_format=weight_format),
            [row for row in (*added, *rows) if row.operation in LAYER_ARGUMENT],
        )
        for weight_format, added in formats.items()
    }
    return KernelTable.resolve(shared, facts, overrides, by_format)


def plain_facts() -> KernelFacts:
    """Returns facts of a small model on a CPU, for a table whose operations are all plain."""
    text = TextSpec(
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1e4, rotary_dim=2),
        max_position_embeddings=1,
        tie_word_embeddings=True,
    )
    return KernelFacts(DeviceFacts("cpu"), text, torch.float32)
