"""Ranks that share a model by tensor parallelism: what each holds of a module, and their sums.

A rank's part is cut when a tensor is read: a layer is made with the `Share` that its rank holds of
the checkpoint's module, and the loader reads those rows and columns of the file alone.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from kernels import plain
from kernels.ranks.peer_buffers import PeerBuffers, most_rows


@dataclass(frozen=True, slots=True)
class Share:
    """Rows, or columns, of a checkpoint's module.

    Attributes:
        size: of the whole module.
        ranges: (first, last + 1) of what is held, in the layer's order.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: "int | Share") -> "Share":
        """All of a module of that size."""
        return size if isinstance(size, Share) else cls(size, ((0, size),))

    @classmethod
    def joined(cls, parts: "Sequence[Share]") -> "Share":
        """Of a module in which parts follow each other."""
        ranges: list[tuple[int, int]] = []
        size = 0
        for part in parts:
            for start, stop in part.ranges:
                if ranges and ranges[-1][1] == size + start:
                    ranges[-1] = ranges[-1][0], size + stop
                else:
                    ranges.append((size + start, size + stop))
            size += part.size
        return cls(size, tuple(ranges))

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.size),)

    def elements(self, per: int, what: str) -> list[slice]:
        """The ranges of a tensor with an element for each `per` rows or columns.

        Raises:
            ValueError: a range would cut through an element; names `what`.
        """
        edges = [edge for part in self.ranges for edge in part if edge != self.size]
        if any(edge % per for edge in edges):
            raise ValueError(f"{what}: {self.count} of {self.size} cut through a block of {per}")
        return [slice(start // per, -(-stop // per)) for start, stop in self.ranges]


# torch 2.13 gives it another name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that share a model, and what these do together.

    They do it on each one's current stream, by torch's default process group, which is gloo on
    CPUs, NCCL on GPUs. All call the same in the same order, with tensors of the same shape.

    Attributes:
        rank: 0 samples.
        store: where they meet on the host; None: they do not, their parts are only told apart.
        peers: where ranks write terms of sums to each other; None: the process group sums them.
    """

    rank: int = 0
    count: int = 1
    store: Store | None = None
    peers: PeerBuffers | None = None
    _exchanges: Iterator[int] = field(default_factory=itertools.count)

    def part(self, units: int, name: str, *, replicated: bool = False) -> range:
        """The units (heads, rows) of this rank.

        Args:
            replicated: where there are fewer units than ranks, several ranks hold the same one.

        Raises:
            ValueError: they cannot be divided equally.
        """
        if replicated and units < self.count and self.count % units == 0:
            unit = self.rank * units // self.count
            return range(unit, unit + 1)
        if units % self.count:
            raise ValueError(f"{name} {units} cannot be divided by {self.count} ranks")
        each = units // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def share(self, units: int, name: str, size: int = 1, *, replicated: bool = False) -> Share:
        """This rank's part of a module with `size` rows or columns per unit."""
        part = self.part(units, name, replicated=replicated)
        return Share(units * size, ((part.start * size, part.stop * size),))

    def with_peers(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "Ranks":
        """With `peers`, if all cards reach each other's memory; all ranks call this together.

        Args:
            rows: of the largest step.
            device: of this rank; the current one.
        """
        rows = min(rows, most_rows(self.count, width, dtype))
        if self.count == 1 or device.type != "cuda" or not rows:
            return self
        cards = self.exchange(device.index)
        reach = torch.cuda.can_device_access_peer
        if not all(reach(card, other) for card in cards for other in cards if card != other):
            return self
        return replace(self, peers=PeerBuffers.create(rows, width, dtype, device))

    def add(self, term: Tensor, residual: Tensor) -> None:
        """`residual +=` the sum of all ranks' terms, to the same bits on all of them.

        Which way they are summed depends on the number of rows alone.

        Args:
            term: `[T, hidden]`, or split-K partials of it; may be overwritten.
            residual: `[T, hidden]`, the same on all ranks.
        """
        if self.peers is not None and len(residual) <= self.peers.rows:
            from kernels.ranks import peer_sum  # which imports Triton

            peer_sum.add(term, residual, self.peers)
        else:
            residual += self.all_reduce(plain.reduce_split_k(term, residual.dtype))

    def all_reduce(self, term: Tensor) -> Tensor:
        """The sum of all ranks' terms, equal to the bit on all of them; may overwrite the term. How
        it is rounded depends on the shape alone, not on what else is computed.
        """
        dist.all_reduce(term)
        return term

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """`[R, n]` of each rank → `[R, count * n]` on rank 0, to `out` if given; other ranks get
        a tensor of that shape that nobody reads.
        """
        rows, columns = part.shape
        if out is None:
            out = part.new_empty(rows, self.count * columns)
        if rows == 1 and out.is_contiguous():
            _all_gather(out.view(self.count, columns), part)
            return out
        parts = part.new_empty(self.count * rows, columns)
        _all_gather(parts, part.contiguous())
        by_row = parts.view(self.count, rows, columns).transpose(0, 1)
        out.unflatten(1, (self.count, columns)).copy_(by_row)
        return out

    def broadcast(self, values: Tensor) -> None:
        if self.count > 1:
            dist.broadcast(values, 0)

    def exchange(self, value: Any, timeout_s: float | None = None) -> list[Any]:  # noqa: ANN401
        """What each rank says, by rank; on the host, before the first step.

        Args:
            value: what this one says, as JSON has it.
            timeout_s: of the wait for each other; None: as long as a start may take.

        Raises:
            RuntimeError: a rank says nothing in time.
        """
        if self.count == 1:
            return [value]
        assert self.store is not None
        number = next(self._exchanges)
        self.store.set(f"{number}/{self.rank}", json.dumps(value))
        keys = [f"{number}/{rank}" for rank in range(self.count)]
        if timeout_s is not None:
            for rank, key in enumerate(keys):
                try:
                    self.store.wait([key], timedelta(seconds=timeout_s))
                except RuntimeError:
                    message = f"rank {rank} has said nothing for {timeout_s:g} s"
                    raise RuntimeError(message) from None
        return [json.loads(self.store.get(key)) for key in keys]


ALONE = Ranks()
