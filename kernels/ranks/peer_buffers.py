"""Memory that ranks of one machine write over NVLink, and how much of a sum it takes.

It is torch's symmetric memory: peer to peer, never multicast.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.device import DeviceFacts

BUFFERS = 3  # of a part, see `peer_sum`
PART = 1024  # elements of a row that a CTA sums
_MIB = 1 << 20
# Bytes of a term up to which a sum by `peer_sum` is the fastest, and up to which it takes one shot.
# Measured on two H100 and four H200, reckoned for eight.
_MOST_BYTES = {2: 20 * _MIB, 4: 12 * _MIB, 8: 2 * _MIB}
_ONE_SHOT_BYTES = {2: 20 * _MIB, 4: _MIB // 2, 8: _MIB // 8}
_WORDS = {2: torch.int16, 4: torch.int32}


def most_rows(count: int, width: int, dtype: torch.dtype) -> int:
    """Rows up to which ranks sum by `peer_sum`: by the shape alone, so that no answer's rounding
    depends on whether a graph runs, or on how busy the ranks are. 0: never.
    """
    return _MOST_BYTES.get(count, 0) // (width * dtype.itemsize)


def one_shot_rows(count: int, width: int, dtype: torch.dtype) -> int:
    """Rows up to which each rank sends its term to all others, instead of to an owner."""
    return _ONE_SHOT_BYTES.get(count, 0) // (width * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """What `peer_sum` reads and writes.

    Attributes:
        rank: of this process.
        own: `[BUFFERS, rows, ranks - 1, hidden]`, integers of the terms' size, by the other ranks,
            which write there; first `empty`.
        peers: int64 `[ranks]`, the addresses of all ranks' `own`.
        turns: int32 `[rows * parts of a row]`, first 0.
        pdl: see `DeviceFacts.supports_pdl`.
    """

    rank: int
    own: Tensor
    peers: Tensor
    turns: Tensor
    pdl: bool

    @property
    def rows(self) -> int:
        """The most that can be summed at once."""
        return self.own.shape[1]

    @property
    def empty(self) -> int:
        """-0.0 as an integer: the mark of a place that waits for its value."""
        return torch.iinfo(self.own.dtype).min

    @classmethod
    def create(
        cls, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "PeerBuffers":
        """Of the default process group, whose ranks all call this at the same time.

        Args:
            rows: that can be summed at once.
            width: of a row.
            dtype: of terms.
            device: of this rank; the current one.

        Raises:
            RuntimeError: the cards do not reach each other's memory.
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
        torch.distributed.barrier()  # no peer writes before
        return made
