"""Projected heads on their way to attention and the KV cache: the types that kernels share."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention.fp8_pages import E4M3, as_bytes, dequantize, quantize


class Rotary(Protocol):
    """Angles of positions; `services.decoder.models.rope.RotaryEmbedding` is one.

    Attributes:
        attention_factor: cos and sin are multiplied by it.
        inv_freq: `[rotary_dim / 2]` float32.
        axis: `[rotary_dim / 2]` int64: the position row of each frequency, 0, 1 or 2.
    """

    attention_factor: float
    inv_freq: Tensor
    axis: Tensor

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[3, T]` → cos and sin, each `[T, rotary_dim / 2]`."""
        ...


@dataclass(frozen=True, slots=True)
class ProjectedHeads:
    """One layer's queries, keys and values of a step's tokens, what is done with them, and where
    they go.

    Attributes:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`, q then k then v; or its split-K
            partials, `[S, T, ...]` float32, see `plain.reduce_split_k`. With gates, q has twice as
            many heads.
        norms: weights of the query's and the key's RMSNorm, `[head_dim]` each; None: the model has
            no such norms.
        rope: cos and sin, `[T, rotary_dim / 2]`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.
        rows: `[2, T]`, from `kv_rows`.
        gated: each query head is followed by its output gate.
        kv_scales: of a cache in e4m3, see `write_kv`; None: it holds the model's dtype.
    """

    qkv: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
    rope: tuple[Tensor, Tensor]
    kv_cache: Tensor
    rows: Tensor
    gated: bool = False
    kv_scales: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.rope[0].dtype

    @property
    def num_heads(self) -> int:
        """Query heads."""
        num_kv_heads, head_dim = self.kv_cache.shape[-2:]
        found = self.qkv.shape[-1] // head_dim - 2 * num_kv_heads
        return found // 2 if self.gated else found

    @property
    def num_tokens(self) -> int:
        return self.qkv.shape[-2]

    @property
    def num_splits(self) -> int:
        """Split-K partials, S; 0: `qkv` is reduced already."""
        return len(self.qkv) if self.qkv.dim() == 3 else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether all tensors are contiguous, as kernels need them."""
        tensors = (self.qkv, *(self.norms or ()), *self.rope, self.kv_cache, self.rows)
        return all(tensor.is_contiguous() for tensor in tensors)


def kv_rows(slot_mapping: Tensor, block_size: int) -> Tensor:
    """`[T]` slots → `[2, T]` int64: where keys and values go, see `write_kv`.

    Slot -1 goes to the last slot of the pool's last block, which belongs to no sequence.
    """
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    keys = blocks * (2 * block_size) + torch.remainder(slot_mapping, block_size)
    return torch.stack((keys, keys + block_size))


def as_stored(key: Tensor, value: Tensor, kv_cache: Tensor, scales: Tensor | None) -> list[Tensor]:
    """Keys and values `[T, num_kv_heads, head_dim]` in the pool's dtype.

    Args:
        key, value: in the model's dtype.
        scales: of a pool in e4m3: `[2, num_kv_heads]` float32, what stored keys and values are to
            be multiplied with, powers of two.
    """
    if kv_cache.dtype != E4M3:
        return [key, value]
    assert scales is not None
    return [quantize(key, scales[0]), quantize(value, scales[1])]


def write_kv(
    kv_cache: Tensor, rows: Tensor, key: Tensor, value: Tensor, scales: Tensor | None = None
) -> None:
    """Writes `[T, num_kv_heads, head_dim]` keys and values to one layer's pool; see `as_stored`.

    The pool is seen as rows of `[num_kv_heads, head_dim]`: the key of (block, offset) is row
    block * 2 * block_size + offset, its value lies block_size rows further.
    """
    flat = as_bytes(kv_cache).view(-1, *kv_cache.shape[-2:])
    for place, part in zip(rows, as_stored(key, value, kv_cache, scales), strict=True):
        flat.index_put_((place,), as_bytes(part))


def read_kv(stored: Tensor, part: int, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Keys (part 0) or values (part 1) of a pool, `[..., num_kv_heads, head_dim]`, in the model's
    dtype; see `as_stored`.
    """
    if stored.dtype != E4M3:
        return stored
    assert scales is not None
    return dequantize(stored, scales[part], dtype)
