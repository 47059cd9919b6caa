"""A language model's operations in plain torch: the specification, and the path of CPUs.

Each function is the plain twin of a kernel of this package and fuses what the kernel fuses.
Rounding points follow Hugging Face's modules, so that bf16 results can be compared with theirs. For
others see `sampling.sampling`, `linear_attention.delta_rule`, `gemm.fp8_weight` and `tower.plain`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.heads import ProjectedHeads, Rotary, as_stored, kv_rows, read_kv, write_kv
from kernels.rows import DeviceRows, EnteredStep, OfChunk, OfToken, StepEntry

# Before the first layer.


def enter_step(step: StepEntry, rows: DeviceRows, out: EnteredStep, block_size: int) -> None:
    """Implements `Ops.enter_step`."""
    places = step.chunks[OfChunk.PLACE]
    if (changes := places >= 0).any():
        rows.blocks.view(-1)[places[changes]] = step.chunks[OfChunk.BLOCK, changes]
    row, index = step.tokens[OfToken.ROW], step.tokens[OfToken.INDEX]
    sampled = (row >= 0) & (index < 0)
    of = row.clamp(min=0)
    index = torch.where(sampled, rows.lengths[of], index)
    out.input_ids.copy_(torch.where(sampled, rows.last_tokens[of], step.tokens[OfToken.ID]))
    later = index + rows.position_deltas[of]
    out.positions.copy_(torch.where(sampled, later, step.tokens[OfToken.POSITION :]))
    blocks = rows.blocks[of, index // block_size].long()
    slots = torch.add(index % block_size, blocks, alpha=block_size)
    out.slots.copy_(slots.masked_fill_(row < 0, -1))
    owner, end = step.chunks[OfChunk.ROW], step.chunks[OfChunk.END]
    out.rows.copy_(owner)
    out.lengths.copy_(torch.where(end < 0, rows.lengths[owner] + 1, end))
    rows.lengths[owner] = out.lengths
    torch.mul(owner, rows.blocks.shape[1], out=out.first_blocks)


def rope_and_rows(
    positions: Tensor, slots: Tensor, rope: Rotary, dtype: torch.dtype, block_size: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Implements `Ops.rope_and_rows`."""
    return rope(positions, dtype), kv_rows(slots, block_size)


# Norm, activation and sum, alone.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last axis in fp32, casts to the weight's dtype, multiplies by the weight, and
    casts to x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`[..., 2 * n]`, gate then up → `silu(gate) * up`, `[..., n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def reduce_split_k(output: Tensor, dtype: torch.dtype) -> Tensor:
    """A GEMM's output `[T, N]`: as it is, or summed from its split-K partials `[S, T, N]` float32
    and rounded to `dtype`.
    """
    return output if output.dim() == 2 else output.sum(0).to(dtype)


# GEMMs with what is before and after them.


def split_k_partials(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, K]`, `[N, K]` → `[1, T, N]` float32."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())[None]


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`[T, K]`, `[N, K]` → `[T, N]`; to `out`, if there is one."""
    return torch.mm(x, weight.t(), out=out)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """`residual += x @ weight.T + bias`; the GEMM is rounded before it is added."""
    residual += F.linear(x, weight, bias)


def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, K]`, gate and up `[2 * N, K]` → `silu(gate) * up`, `[T, N]`."""
    return silu_and_mul(F.linear(x, weight, bias))


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """RMSNorm with weight `norm`, then the linear layer."""
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def norm_swiglu(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`norm_linear` to gate and up, `[2 * N, K]`, then `silu_and_mul`."""
    return silu_and_mul(norm_linear(x, norm, eps, weight, bias))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual addition of a GEMM's output, which may be split-K partials, and the norm after
    it: `(rms_norm(x + residual), x + residual)`.
    """
    residual = reduce_split_k(x, residual.dtype) + residual
    return rms_norm(residual, weight, eps), residual


def add_terms(terms: Tensor, residual: Tensor) -> Tensor:
    """`residual + ` the sum of ranks' terms `[ranks, T, hidden]`: added in their order in float32,
    rounded once.
    """
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return residual + total.to(residual.dtype)


# A mixture of experts.


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token by the router's logits `[T, E]`.

    Probabilities are a softmax in float32 over all experts; of equal ones the lowest expert's come
    first.

    Args:
        logits: in the model's dtype.
        normalize: scale a token's probabilities to a sum of 1.

    Returns:
        `[T, top_k]` experts, ascending, and their probabilities, rounded to the logits' dtype.
    """
    found, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    found, experts = found[:, :top_k], experts[:, :top_k]
    if normalize:
        found = found / found.sum(-1, keepdim=True)
    experts, order = experts.sort(-1)
    return experts, found.gather(-1, order).to(logits.dtype)


def shared_gate(
    out: Tensor, x: Tensor, gate: Callable[[Tensor], Tensor], residual: Tensor
) -> Tensor:
    """A shared expert's output, scaled for each token by a sigmoid gate.

    Args:
        out: of the expert, `[T, hidden]` or split-K partials.
        x: its input, `[T, hidden]`.
        gate: a layer with one output.
        residual: not read: implementations may add to it in place and return None instead.

    Returns:
        `[T, hidden]`.
    """
    return reduce_split_k(out, x.dtype) * torch.sigmoid(gate(x))


# Between the projection and attention.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R elements of each head of `x` `[T, H, D]`; cos and sin are `[T, R / 2]`.

    Element j pairs with j + R / 2; elements from R on pass through.
    """
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., width:])
    return torch.cat(rotated, dim=-1)


def qk_rope_cache(
    heads: ProjectedHeads, keys_values: Tensor | None = None, gates: Tensor | None = None
) -> Tensor:
    """Normalises queries and keys, if the model does, rotates them, and writes keys and values to
    the cache.

    Args:
        heads: of the projection; its memory may be overwritten.
        keys_values: `[T, 2 * num_kv_heads, head_dim]`, where keys and then values go, too, as the
            cache has them, in the model's dtype; those of e4m3 without their scales.
        gates: `[T, num_heads, head_dim]`, where gates go, if the projection has them.

    Returns:
        Queries, `[T, num_heads, head_dim]`.
    """
    num_kv_heads, head_dim = heads.kv_cache.shape[-2:]
    qkv = reduce_split_k(heads.qkv, heads.dtype)
    num_queries = heads.num_heads * (2 if heads.gated else 1)
    query, key, value = qkv.unflatten(-1, (-1, head_dim)).split(
        (num_queries, num_kv_heads, num_kv_heads), dim=1
    )
    if gates is not None:
        query, gate = query.unflatten(1, (-1, 2)).unbind(2)
        gates.copy_(gate)
    if heads.norms is not None:
        query = rms_norm(query, heads.norms[0], heads.eps)
        key = rms_norm(key, heads.norms[1], heads.eps)
    key = rotate(key, *heads.rope)
    write_kv(heads.kv_cache, heads.rows, key, value, heads.kv_scales)
    if keys_values is not None:
        stored = as_stored(key, value, heads.kv_cache, heads.kv_scales)
        torch.cat([part.to(heads.dtype) for part in stored], dim=1, out=keys_values)
    return rotate(query, *heads.rope)


def output_gate(attended: Tensor, gates: Tensor) -> Tensor:
    """`attended * sigmoid(gates)`; its memory may be overwritten."""
    return attended.mul_(gates.sigmoid())


def fused_decode_attention(
    heads: ProjectedHeads, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
) -> Tensor:
    """q/k norm, rotation, the write to the KV cache, and attention of one token per sequence.

    Args:
        heads: of the projection, one token per sequence; its memory may be overwritten.
        block_ids: KV blocks of all sequences, int32.
        first_blocks: `[T]` int32, where each sequence's blocks begin among them.
        seq_lens: `[T]` int32, the new token included.

    Returns:
        `[T, num_heads * head_dim]`.
    """
    query = qk_rope_cache(heads)
    kv_cache, block_size = heads.kv_cache, heads.kv_cache.shape[2]
    index = torch.arange(int(seq_lens.max()), device=query.device)
    inside = index < seq_lens[:, None]  # [T, longest]
    place = first_blocks[:, None] + index // block_size
    blocks = block_ids[place.where(inside, 0)]
    keys, values = (
        read_kv(kv_cache[blocks, part, index % block_size], part, query.dtype, heads.kv_scales)
        .transpose(1, 2)
        for part in (0, 1)
    )  # fmt: skip
    attended = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=inside[:, None, None], enable_gqa=True
    )
    return attended.flatten(1)
