"""Ranks that share a model by tensor parallelism: what each holds of a module, and their sums.

A rank's part is cut when a tensor is read: a layer is made with the `Share` that its rank holds of
the checkpoint's module, and the loader reads those rows and columns of the file alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed
from torch import Tensor


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
        """How many are held."""
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


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that share a model."""

    rank: int = 0
    count: int = 1

    def part(self, units: int, name: str, *, replicated: bool = False) -> range:
        """The units (heads, rows) of this rank.

        Args:
            units: of the whole model.
            name: for the error.
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

    def all_reduce(self, term: Tensor) -> Tensor:
        """The sum of all ranks' terms; overwrites this rank's."""
        if self.count > 1:
            torch.distributed.all_reduce(term)
        return term


ALONE = Ranks()
