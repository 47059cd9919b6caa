"""Types that attention kernels share, and the layout of keys and values in the KV cache."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention.fp8_pages import E4M3, as_bytes, dequantize, quantize


class Rotary(Protocol):
    """Rotary embedding, implemented by `services.decoder.models.rope.RotaryEmbedding`.

    Attributes:
        attention_factor: factor of cos and sin.
        inv_freq: `[rotary_dim / 2]` float32, inverse frequencies.
        axis: `[rotary_dim / 2]` int64, position axis of each frequency: 0, 1 or 2.
    """

    attention_factor: float
    inv_freq: Tensor
    axis: Tensor

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes cos and sin `[T, rotary_dim / 2]` of positions `[3, T]`."""
        ...


@dataclass(frozen=True, slots=True)
class ProjectedHeads:
    """A layer's projected queries, keys and values of a step, with norms, rotation and KV cache.

    Attributes:
        qkv: queries, keys and values `[T, (num_heads + 2 * num_kv_heads) * head_dim]`, or split-K
            partials of these, `[S, T, ...]` float32 (`plain.reduce_split_k`). With output gates,
            there are twice as many query heads.
        norms: weights `[head_dim]` of the RMSNorms of queries and keys. None if the model has no
            such norms.
        eps: constant of the norms.
        rope: cos and sin, `[T, rotary_dim / 2]` each.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.
        rows: `[2, T]`, from `kv_rows`.
        gated: True if each query head is followed by its output gate.
        kv_scales: scales of an e4m3 cache, see `as_stored`. None if the cache has the model's
            dtype.
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
        """Data type of the model."""
        return self.rope[0].dtype

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        num_kv_heads, head_dim = self.kv_cache.shape[-2:]
        found = self.qkv.shape[-1] // head_dim - 2 * num_kv_heads
        return found // 2 if self.gated else found

    @property
    def num_tokens(self) -> int:
        return self.qkv.shape[-2]

    @property
    def num_splits(self) -> int:
        """Number of split-K partials, S. 0 if `qkv` is reduced already."""
        return len(self.qkv) if self.qkv.dim() == 3 else 0

    @property
    def is_contiguous(self) -> bool:
        """Returns whether all tensors are contiguous, as kernels need them."""
        tensors = (self.qkv, *(self.norms or ()), *self.rope, self.kv_cache, self.rows)
        return all(tensor.is_contiguous() for tensor in tensors)


def kv_rows(slot_mapping: Tensor, block_size: int) -> Tensor:
    """Converts slots `[T]` to rows of the KV cache for keys and values, `[2, T]` int64.

    `write_kv` describes rows. Slot -1 becomes the last slot of the last block, which no sequence
    uses.
    """
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    keys = blocks * (2 * block_size) + torch.remainder(slot_mapping, block_size)
    return torch.stack((keys, keys + block_size))


def as_stored(key: Tensor, value: Tensor, kv_cache: Tensor, scales: Tensor | None) -> list[Tensor]:
    """Converts keys and values to the data type of the KV cache.

    Args:
        key, value: `[T, num_kv_heads, head_dim]` in the model's dtype.
        kv_cache: the cache.
        scales: `[2, num_kv_heads]` float32 factors of stored keys and values, which are powers of
            two. None if the cache is not e4m3.
    """
    if kv_cache.dtype != E4M3:
        return [key, value]
    assert scales is not None
    return [quantize(key, scales[0]), quantize(value, scales[1])]


def write_kv(
    kv_cache: Tensor, rows: Tensor, key: Tensor, value: Tensor, scales: Tensor | None = None
) -> None:
    """Writes keys and values to a layer's KV cache. Arguments are as for `as_stored`.

    The cache is seen as rows of `[num_kv_heads, head_dim]`: the key of (block, offset) is row
    block * 2 * block_size + offset, and the value is block_size rows further.
    """
    flat = as_bytes(kv_cache).view(-1, *kv_cache.shape[-2:])
    for place, part in zip(rows, as_stored(key, value, kv_cache, scales), strict=True):
        flat.index_put_((place,), as_bytes(part))


def read_kv(stored: Tensor, part: int, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Converts stored keys or values to the model's data type.

    Args:
        stored: `[..., num_kv_heads, head_dim]` of the cache.
        part: 0 for keys, 1 for values.
        dtype: data type of the model.
        scales: see `as_stored`.
    """
    if stored.dtype != E4M3:
        return stored
    assert scales is not None
    return dequantize(stored, scales[part], dtype)
