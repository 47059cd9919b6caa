"""Sizes and allocates the paged KV pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

# What the device holds beside torch's memory: context, libraries, kernels, what graphs consist of.
_RESERVED_BYTES = 5 << 28
_SPARE_BYTES = 256 << 20  # never taken from what is free now: other processes breathe, too


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The pool's sizes but for its number of blocks."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * self.block_size * per_token


def count_blocks(shape: KVCacheShape, budget_bytes: int, max_model_len: int) -> int:
    """Blocks for sequences that fit a budget, the scratch block aside.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    num_blocks = budget_bytes // shape.block_bytes - 1
    wanted = -(-max_model_len // shape.block_size)
    if num_blocks < wanted:
        need = (wanted + 1) * shape.block_bytes
        raise ValueError(
            f"a KV cache of {budget_bytes / 2**20:.0f} MiB does not hold one sequence of "
            f"{max_model_len} tokens, which needs {need / 2**20:.0f} MiB: "
            "lower max_model_len or give more memory"
        )
    return num_blocks


def device_budget(device: torch.device, memory_fraction: float, forward_peak: int) -> int:
    """Bytes a GPU's pool may take: the process's share of the card less what it uses at its peak
    and what graphs hold between their replays, no more than a forward of the largest step.

    To be asked after that step, and before the pool is there. Other processes on the card have
    their own shares; what is not free cannot be taken whatever the shares say.

    Args:
        device: a GPU.
        memory_fraction: the share.
        forward_peak: bytes reserved at most until the step's forward was done.
    """
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = torch.cuda.memory_reserved(device)
    peak += forward_peak - in_use
    share = int(total * memory_fraction) - peak - _RESERVED_BYTES
    return min(share, free - (peak - in_use) - _SPARE_BYTES)


def allocate(shape: KVCacheShape, num_blocks: int, device: torch.device) -> Tensor:
    """The pool: `[num_layers, num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`.

    The last block is scratch: padding tokens write to it and read from it. The pool starts as
    zeros: masked attention multiplies what it does not use, and memory may hold NaN.
    """
    return torch.zeros(
        (shape.num_layers, num_blocks + 1, 2, shape.block_size, shape.num_kv_heads, shape.head_dim),
        dtype=shape.dtype,
        device=device,
    )
