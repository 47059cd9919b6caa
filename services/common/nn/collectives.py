"""Tensor parallelism: the ranks' shares of a module's rows and columns, and their collectives.

A layer is made with the `Share` of the checkpoint's module that its rank holds. The loader reads
only these rows and columns of the files.
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
    """The rows, or the columns, of a checkpoint's module that a layer holds.

    Attributes:
        size: number of rows or columns of the whole module.
        ranges: ranges (first, last + 1) of the rows or columns that the layer holds, in the order
            of the layer's parameter.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: "int | Share") -> "Share":
        """Returns `size` if it is a share, or else the share of a whole module of that size."""
        return size if isinstance(size, Share) else cls(size, ((0, size),))

    @classmethod
    def joined(cls, parts: "Sequence[Share]") -> "Share":
        """Joins the shares of several modules into the share of their concatenation."""
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
        """Converts the ranges to those of a tensor with one element per `per` rows or columns.

        Raises:
            ValueError: a range would cut through an element. The message begins with `what`.
        """
        edges = [edge for part in self.ranges for edge in part if edge != self.size]
        if any(edge % per for edge in edges):
            raise ValueError(f"{what}: {self.count} of {self.size} cut through a block of {per}")
        return [slice(start // per, -(-stop // per)) for start, stop in self.ranges]


# torch 2.13 has renamed the function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """This process's rank in a tensor-parallel group, and the group's collectives.

    Collectives run on the current stream in torch's default process group, which is gloo on CPUs
    and NCCL on GPUs. All ranks call the same collectives in the same order, with tensors of the
    same shape.

    Attributes:
        rank: index of this process. Rank 0 samples tokens.
        count: number of ranks.
        store: store through which ranks exchange values on the host. None if this object is only
            used to compute shares.
        peers: buffers in which ranks write the terms of sums to each other. None if the process
            group computes all sums.
    """

    rank: int = 0
    count: int = 1
    store: Store | None = None
    peers: PeerBuffers | None = None
    _exchanges: Iterator[int] = field(default_factory=itertools.count)

    def part(self, units: int, name: str, *, replicated: bool = False) -> range:
        """Divides units, such as heads or rows, and returns this rank's range.

        Args:
            units: number of units.
            name: name of the units for the error message.
            replicated: True if several ranks may hold the same unit when there are fewer units than
                ranks.

        Raises:
            ValueError: the units cannot be divided equally.
        """
        if replicated and units < self.count and self.count % units == 0:
            unit = self.rank * units // self.count
            return range(unit, unit + 1)
        if units % self.count:
            raise ValueError(f"{name} {units} cannot be divided by {self.count} ranks")
        each = units // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def share(self, units: int, name: str, size: int = 1, *, replicated: bool = False) -> Share:
        """Returns this rank's share of a module that has `size` rows or columns per unit."""
        part = self.part(units, name, replicated=replicated)
        return Share(units * size, ((part.start * size, part.stop * size),))

    def with_peers(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "Ranks":
        """Adds `peers` if all GPUs can access each other's memory. All ranks call this together.

        Args:
            rows: number of rows of the largest step.
            width: number of elements of a row.
            dtype: data type of the sums.
            device: this rank's device, which must be torch's current device.
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
        """Adds the sum of all ranks' terms to `residual`, with bitwise equal results on all ranks.

        The number of rows alone decides which algorithm computes the sum.

        Args:
            term: this rank's term `[T, hidden]`, or split-K partials of it. May be overwritten.
            residual: residual stream `[T, hidden]`, which is the same on all ranks.
        """
        if self.peers is not None and len(residual) <= self.peers.rows:
            from kernels.ranks import peer_sum  # imports Triton

            peer_sum.add(term, residual, self.peers)
        else:
            residual += self.all_reduce(plain.reduce_split_k(term, residual.dtype))

    def all_reduce(self, term: Tensor) -> Tensor:
        """Returns the sum of all ranks' terms, bitwise equal on all ranks. May overwrite `term`.

        Its rounding depends only on the shape of the term.
        """
        dist.all_reduce(term)
        return term

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Concatenates the ranks' tensors along the last axis: `[R, n]` → `[R, count * n]`.

        Only rank 0's result is used. Other ranks get a tensor of the same shape.

        Args:
            part: this rank's tensor `[R, n]`.
            out: tensor to write the result to. None if a new tensor is made.
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
        """Exchanges a value between the ranks on the host, at the start or with an adapter's load.

        Args:
            value: this rank's value, which must be representable in JSON.
            timeout_s: time limit of the wait for each rank. None if the store's own limit applies.

        Returns:
            Values of all ranks, by rank.

        Raises:
            RuntimeError: a rank has sent nothing in time.
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
                    message = f"rank {rank} has sent nothing for {timeout_s:g} s"
                    raise RuntimeError(message) from None
        return [json.loads(self.store.get(key)) for key in keys]


# Longest time in seconds between two ranks' captures of the last CUDA graph of a kind.
CAPTURE_S = 60.0
ALONE = Ranks()
