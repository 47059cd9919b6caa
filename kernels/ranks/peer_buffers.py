"""Symmetric memory in which ranks of a machine write to each other over NVLink.

It is torch's symmetric memory, used peer to peer and never with multicast. The module also has the
limits up to which a sum through this memory is faster than NCCL.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.device import DeviceFacts

BUFFERS = 3  # buffers of each part, see `peer_sum`
PART = 1024  # elements of a row that a CTA sums
_MIB = 1 << 20
# Largest size of a term, by number of ranks, for which `peer_sum` is the fastest, and for which it
# sums in one shot. Measured on two H100 and on four H200; the values for eight are estimates.
_MOST_BYTES = {2: 20 * _MIB, 4: 12 * _MIB, 8: 2 * _MIB}
_ONE_SHOT_BYTES = {2: 20 * _MIB, 4: _MIB // 2, 8: _MIB // 8}
_WORDS = {2: torch.int16, 4: torch.int32}


def most_rows(count: int, width: int, dtype: torch.dtype) -> int:
    """Largest number of rows that ranks sum by `peer_sum`. 0 if they never do.

    The limit depends only on the shape, so that the rounding of an answer depends neither on CUDA
    graphs nor on the load.
    """
    return _MOST_BYTES.get(count, 0) // (width * dtype.itemsize)


def one_shot_rows(count: int, width: int, dtype: torch.dtype) -> int:
    """Largest number of rows for which each rank sends its term to all ranks, without an owner."""
    return _ONE_SHOT_BYTES.get(count, 0) // (width * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Memory that `peer_sum` reads and writes.

    Attributes:
        rank: rank of this process.
        own: `[BUFFERS, rows, ranks - 1, hidden]`, integers of the size of a term's elements, with a
            place for each other rank to write to. Initialized with `empty`.
        peers: `[ranks]` int64, addresses of all ranks' `own`.
        turns: `[rows * parts of a row]` int32, number of the buffer that each part uses next.
            Initialized with 0.
        pdl: see `DeviceFacts.supports_pdl`.
    """

    rank: int
    own: Tensor
    peers: Tensor
    turns: Tensor
    pdl: bool

    @property
    def rows(self) -> int:
        """Largest number of rows of a sum."""
        return self.own.shape[1]

    @property
    def empty(self) -> int:
        """Bits of -0.0 as an integer, which mark an element that has not arrived yet."""
        return torch.iinfo(self.own.dtype).min

    @classmethod
    def create(
        cls, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "PeerBuffers":
        """Makes the buffers of the default process group. All ranks call this at the same time.

        Args:
            rows: largest number of rows of a sum.
            width: elements of a row.
            dtype: data type of terms.
            device: this rank's device, which must be torch's current device.

        Raises:
            RuntimeError: a GPU cannot access the memory of another.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = torch.distributed.group.WORLD
        assert group is not None
        rank, count = group.rank(), group.size()
        size = BUFFERS, rows, count - 1, width
        own = symmetric_memory.empty(size, dtype=_WORDS[dtype.itemsize], device=device)
        handle = symmetric_memory.rendezvous(own, group)
        places = [handle.get_buffer(peer, size, own.dtype).data_ptr() for peer in range(count)]
        turns = torch.zeros(rows * -(-width // PART), dtype=torch.int32, device=device)
        peers = torch.tensor(places, dtype=torch.int64, device=device)
        made = cls(rank, own, peers, turns, DeviceFacts.of(device).supports_pdl)
        own.fill_(made.empty)
        torch.cuda.synchronize(device)
        torch.distributed.barrier()  # no peer writes before all buffers are initialized
        return made
