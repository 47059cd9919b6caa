"""The paged KV pool: how many blocks fit the memory, and its allocation.

Called by the runner's factory at the start. A budget too small for one sequence is a ValueError.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Device memory outside torch's allocator: CUDA context, libraries, kernels, graph nodes.
_RESERVED_BYTES = 5 << 28
_SPARE_BYTES = 256 << 20  # left free, because other processes' use of the card varies


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """All sizes of the pool except its number of blocks."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, summed over all layers."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * self.block_size * per_token


def count_blocks(shape: KVCacheShape, budget_bytes: int, max_model_len: int) -> int:
    """Blocks for sequences that fit a budget; one more block is reserved as scratch.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    num_blocks = budget_bytes // shape.block_bytes - 1
    num_needed = -(-max_model_len // shape.block_size)
    if num_blocks < num_needed:
        needed_bytes = (num_needed + 1) * shape.block_bytes
        raise ValueError(
            f"a KV cache of {budget_bytes / 2**20:.0f} MiB does not hold one sequence of "
            f"{max_model_len} tokens, which needs {needed_bytes / 2**20:.0f} MiB: "
            "lower max_model_len or raise memory_fraction or kv_cache_bytes"
        )
    return num_blocks


def device_budget(device: torch.device, memory_fraction: float, forward_peak: int) -> int:
    """Bytes that a GPU's pool may take: the process's share of the card, minus its peak use in the
    largest step, minus what CUDA graphs hold between replays, which is at most one forward of that
    step. Never more than what is free now: other processes may exceed their shares.

    Call it after the largest step and before `allocate`.

    Args:
        memory_fraction: the process's share of the whole card.
        forward_peak: peak bytes that torch had reserved by the end of the step's forward.
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

    The last block is scratch: padding tokens write to it and read from it. The pool is zeroed,
    because masked attention multiplies unused values by zero, and fresh memory may hold NaN. On a
    CPU the kernel zeroes a page when it is first used.
    """
    sizes = (
        shape.num_layers, num_blocks + 1, 2, shape.block_size, shape.num_kv_heads, shape.head_dim
    )  # fmt: skip
    if device.type == "cpu":
        pages = np.zeros((num_blocks + 1) * shape.block_bytes, np.uint8)
        return torch.from_numpy(pages).view(shape.dtype).view(sizes)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)
