"""The paged pool of keys and values: number of blocks that fit into memory, and allocation.

The runner's factory calls these functions at the start.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

# Device memory outside torch's allocator: CUDA context, libraries, kernels, graph nodes.
_RESERVED_BYTES = 5 << 28
# Device memory that is left free, because other processes' use of the card varies.
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The sizes of the pool, except its number of blocks.

    Attributes:
        num_layers: number of full attention layers.
        block_size: tokens per block.
        num_kv_heads: number of key heads, and of value heads.
        head_dim: elements of a head.
        dtype: data type of keys and values.
    """

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
    """Returns the number of blocks for sequences that fit a budget, besides the scratch block.

    Args:
        shape: the sizes of the pool.
        budget_bytes: bytes that the pool may take.
        max_model_len: tokens of the longest sequence, which has to fit.

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


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a GPU after the largest step, in bytes.

    Attributes:
        total: memory of the card.
        free: memory that no process uses.
        in_use: memory that torch has reserved in this process.
        peak: the most memory that torch had reserved in this process.
    """

    total: int
    free: int
    in_use: int
    peak: int

    @classmethod
    def measure(cls, device: torch.device) -> Self:
        """Measures the memory of a GPU now, after torch's unused memory was released."""
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device), peak)


def device_budget(memory: DeviceMemory, memory_fraction: float, forward_peak: int) -> int:
    """Returns the bytes that a GPU's pool may take.

    The pool gets the process's share of the card, minus the peak use of the largest step, minus the
    memory of CUDA graphs between replays. Graphs hold at most the memory of one forward pass of the
    largest step. Other processes may exceed their shares, so the pool gets no more than what is
    free now.

    Args:
        memory: memory of the card after the largest step, before `allocate`.
        memory_fraction: the process's share of the whole card.
        forward_peak: peak bytes that torch had reserved by the end of the step's forward pass.
    """
    peak = memory.peak + forward_peak - memory.in_use
    share = int(memory.total * memory_fraction) - peak - _RESERVED_BYTES
    return min(share, memory.free - (peak - memory.in_use) - _SPARE_BYTES)


def allocate(shape: KVCacheShape, num_blocks: int, device: torch.device) -> Tensor:
    """Allocates the pool `[num_layers, num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`.

    The last block is scratch: padding tokens write to it and read from it. The pool is zeroed,
    because masked attention multiplies unused values by zero, and fresh memory may hold NaN. On a
    CPU the operating system zeroes a page when it is first used.

    Args:
        shape: the sizes of the pool.
        num_blocks: number of blocks without the scratch block.
        device: the device that computes.
    """
    sizes = (
        shape.num_layers,
        num_blocks + 1,
        2,
        shape.block_size,
        shape.num_kv_heads,
        shape.head_dim,
    )
    if device.type == "cpu":
        pages = np.zeros((num_blocks + 1) * shape.block_bytes, np.uint8)
        return torch.from_numpy(pages).view(shape.dtype).view(sizes)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)
