"""Seeded choices that come out the same on every Python version.

Only `random.Random.random` is promised to be stable between Python releases, so every choice here
is derived from it alone: the held-out questions must be the same ones everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded source of choices. Equal seeds give equal sequences of choices."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed).random

    def unit(self) -> float:
        """A number in [0, 1)."""
        return self._random()

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random() < probability

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self._random()

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, which must not be empty."""
        return items[int(self._random() * len(items))]

    def weighted(self, items: Sequence[T], weights: Sequence[float]) -> T:
        """One of the items, chosen in proportion to its weight."""
        mark = self._random() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            mark -= weight
            if mark < 0:
                return item
        return items[-1]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different places of the sequence, in random order."""
        pool = list(items)
        for i in range(count):
            j = self.integer(i, len(pool) - 1)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]
