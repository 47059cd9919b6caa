"""Reference implementations of a language model's operations in plain torch, also used on CPUs.

Each function specifies a kernel of this package and fuses the same operations. Intermediate results
are rounded where the modules of transformers round them, so that bf16 results can be compared.
Other reference implementations are in `sampling.sampling`, `linear_attention.delta_rule`,
`gemm.fp8_weight`, `gemm.int8_weight`, `gemm.packed_weight` and `tower.plain`.
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


# Norms, activations and sums.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis.

    The normalized values in float32 are cast to the weight's dtype and multiplied by the weight.
    The product is cast to the dtype of `x`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes `silu(gate) * up` `[..., n]` from gate and up, concatenated to `[..., 2 * n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def reduce_split_k(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums split-K partials `[S, T, N]` float32 of a GEMM's output and rounds the sum to `dtype`.

    An output `[T, N]` without partials is returned unchanged.
    """
    return output if output.dim() == 2 else output.sum(0).to(dtype)


# GEMMs, also fused with the operations before and after them.


def split_k_partials(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer as a single split-K partial: `[T, K]`, `[N, K]` → `[1, T, N]` float32."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())[None]


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Linear layer `[T, K]`, `[N, K]` → `[T, N]`. The result is written to `out` if it is given."""
    return torch.mm(x, weight.t(), out=out)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Computes `residual += x @ weight.T + bias`. The sum is rounded before the addition."""
    residual += F.linear(x, weight, bias)


def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer of gate and up `[2 * N, K]`, then `silu_and_mul`: `[T, K]` → `[T, N]`."""
    return silu_and_mul(F.linear(x, weight, bias))


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """RMSNorm with weight `norm`, then a linear layer."""
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def norm_swiglu(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """RMSNorm, linear layer of gate and up `[2 * N, K]`, then `silu_and_mul`."""
    return silu_and_mul(norm_linear(x, norm, eps, weight, bias))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds a GEMM's output, which may be split-K partials, to the residual stream and normalizes.

    Returns:
        `rms_norm(x + residual)`, and `x + residual`.
    """
    residual = reduce_split_k(x, residual.dtype) + residual
    return rms_norm(residual, weight, eps), residual


def add_terms(terms: Tensor, residual: Tensor) -> Tensor:
    """Adds the sum of the ranks' terms `[ranks, T, hidden]` to the residual stream.

    The terms are added in the order of the ranks in float32, and the sum is rounded once.
    """
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return residual + total.to(residual.dtype)


# A mixture of experts.


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token by the router's logits.

    Probabilities are a softmax in float32 over all experts. Of experts with equal probabilities,
    those with the lowest index come first.

    Args:
        logits: `[T, E]` in the model's dtype.
        top_k: number of experts of a token.
        normalize: True if a token's probabilities are scaled to a sum of 1.

    Returns:
        Experts `[T, top_k]`, ascending, and their probabilities, rounded to the dtype of `logits`.
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
    """Scales the shared expert's output for each token by a sigmoid gate.

    Args:
        out: output of the expert, `[T, hidden]` or split-K partials.
        x: input of the expert, `[T, hidden]`.
        gate: layer with one output.
        residual: residual stream `[T, hidden]`. This implementation does not read it. A kernel may
            add its result to the stream and return None.

    Returns:
        Scaled output `[T, hidden]`.
    """
    return reduce_split_k(out, x.dtype) * torch.sigmoid(gate(x))


# Between the projection and attention.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R elements of each head of `x` `[T, H, D]`; cos and sin are `[T, R / 2]`.

    Elements j and j + R / 2 are a pair. Elements from R on stay unchanged.
    """
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., width:])
    return torch.cat(rotated, dim=-1)


def qk_rope_cache(
    heads: ProjectedHeads, keys_values: Tensor | None = None, gates: Tensor | None = None
) -> Tensor:
    """Applies q/k norm and rotation, and writes keys and values to the KV cache.

    Args:
        heads: output of the projection. Its memory may be overwritten.
        keys_values: tensor `[T, 2 * num_kv_heads, head_dim]` that also gets the keys and then the
            values as they are in the cache, in the model's dtype. For an e4m3 cache, values are
            without scales. None if they are only written to the cache.
        gates: tensor `[T, num_heads, head_dim]` that gets the output gates. None if the projection
            has no gates.

    Returns:
        Queries `[T, num_heads, head_dim]`.
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
    """Computes `attended * sigmoid(gates)` in the memory of `attended`."""
    return attended.mul_(gates.sigmoid())


def fused_decode_attention(
    heads: ProjectedHeads, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
) -> Tensor:
    """Applies q/k norm and rotation, writes to the KV cache, and attends to the context.

    Args:
        heads: output of the projection, with one token per sequence. Its memory may be overwritten.
        block_ids: int32 KV blocks of all sequences.
        first_blocks: `[T]` int32, index in `block_ids` of each sequence's first block.
        seq_lens: `[T]` int32, length of each sequence with the new token.

    Returns:
        Attention output `[T, num_heads * head_dim]`.
    """
    query = qk_rope_cache(heads)
    kv_cache, block_size = heads.kv_cache, heads.kv_cache.shape[2]
    index = torch.arange(int(seq_lens.max()), device=query.device)
    inside = index < seq_lens[:, None]  # [T, longest]
    place = first_blocks[:, None] + index // block_size
    blocks = block_ids[place.where(inside, 0)]
    keys, values = (
        read_kv(
            kv_cache[blocks, part, index % block_size], part, query.dtype, heads.kv_scales
        ).transpose(1, 2)
        for part in (0, 1)
    )
    attended = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=inside[:, None, None], enable_gqa=True
    )
    return attended.flatten(1)
