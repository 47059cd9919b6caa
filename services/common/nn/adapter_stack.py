"""The factors of several adapters for one linear layer, applied to the tokens of a step at once.

The factors of all slots are stacked and padded with zeros to the same rank. A step multiplies its
tokens by the factors of all slots that occur in it, and keeps for each token the products of its
own slot. The shapes depend neither on which token has which adapter nor on the number of sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.adapter_config import AdapterError
from services.common.nn.adapter import LowRank
from services.common.nn.collectives import ALONE, Ranks, Share
from services.common.nn.linear import Linear
from services.common.nn.quantized import QuantizedLinear


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of T tokens.

    Attributes:
        slots: `[T]` int64, slot of each token's adapter, or the number of slots for none.
        mask: `[T, slots]`, True where a token has the adapter of a slot.
        first, last: range [first, last) of the slots that occur, which the host knows.
    """

    slots: Tensor
    mask: Tensor
    first: int
    last: int

    @classmethod
    def of(cls, slots: Tensor, count: int, first: int, last: int) -> "AdapterRows":
        """Makes the rows of tokens.

        Args:
            slots: `[T]` integers, slot of each token's adapter, or -1 for none.
            count: number of slots.
            first, last: range of the slots that occur.
        """
        mask = slots[:, None] == torch.arange(count, device=slots.device)
        return cls(torch.where(slots < 0, count, slots).long(), mask, first, last)

    def part(self, rows: Tensor) -> "AdapterRows":
        """Returns the adapters of some of the tokens, whose indices are `rows` `[R]`."""
        return AdapterRows(self.slots[rows], self.mask[rows], self.first, self.last)

    def piece(self, start: int, stop: int) -> "AdapterRows":
        """Returns the adapters of the tokens [start, stop)."""
        return AdapterRows(self.slots[start:stop], self.mask[start:stop], self.first, self.last)


class AdapterStack:
    """The factors of all slots for one layer.

    Args:
        rows: share of each module's rows that the layer holds, by module name (`Linear.rows`).
        columns: share of the modules' columns that the layer holds.
        slots: number of slots.
        rank: largest rank of an adapter.
        like: tensor with the data type of activations, on their device.
        bias: bias of the layer, which DoRA does not scale. None if it has none.
        weight: function that returns the layer's weight `[out_features, in_features]`, for DoRA.
        ranks: ranks that share the model.

    Attributes:
        a: `[slots, modules, rank, in_features]`.
        b: by module, `[out_features, slots, rank]`, times the scaling.
        used: slots whose adapter changes the layer.
        factor: `[slots + 1, out_features]`, factors of the base layer's output for DoRA. None if no
            slot has DoRA.
    """

    def __init__(
        self,
        rows: Mapping[str, Share],
        columns: Share,
        slots: int,
        rank: int,
        like: Tensor,
        *,
        bias: Tensor | None = None,
        weight: Callable[[], Tensor],
        ranks: Ranks = ALONE,
    ) -> None:
        self.rows, self.columns, self.slots, self.rank = rows, columns, slots, rank
        self.a = like.new_zeros(slots, len(rows), rank, columns.count)
        self.b = {name: like.new_zeros(share.count, slots, rank) for name, share in rows.items()}
        self.used: set[int] = set()
        self.factor: Tensor | None = None
        self._bias, self._weight, self._ranks = bias, weight, ranks

    @classmethod
    def of(cls, layer: Linear, slots: int, rank: int, like: Tensor, ranks: Ranks) -> "AdapterStack":
        """Makes the stack of a layer without factors."""

        def weight() -> Tensor:
            method = layer.method
            if isinstance(method, QuantizedLinear):
                return method.dequantize(method.weight(layer), torch.float32)
            return layer.weight

        return cls(
            layer.rows,
            layer.columns,
            slots,
            rank,
            like,
            bias=layer.bias,
            weight=weight,
            ranks=ranks,
        )

    def check(self, part: str, factors: LowRank) -> str:
        """Returns why a module's factors do not fit the layer, or an empty string."""
        found = len(factors.b), factors.a.shape[1]
        wanted = self.rows[part].size, self.columns.size
        if found != wanted:
            return f"is {list(found)}, the model has {list(wanted)}"
        if factors.rank > self.rank:
            return f"has rank {factors.rank}, more than the largest rank {self.rank}"
        return ""

    def set(self, slot: int, part: str, factors: LowRank) -> None:
        """Sets a slot's factors of a module, which have passed `check`."""
        self.used.add(slot)
        index = list(self.rows).index(part)
        a, b = held(factors.a, self.columns, 1), held(factors.b, self.rows[part], 0)
        target = self.a[slot, index]
        target.zero_()
        target[: factors.rank] = a.to(target)
        scaled = b.float() * factors.scaling
        if factors.magnitude is not None:
            factor = self._dora(part, factors)
            self._set_factor(slot, part, factor)
            scaled = scaled.to(factor) * factor[:, None]
        self.b[part][:, slot].zero_()
        self.b[part][:, slot, : factors.rank] = scaled.to(self.b[part])

    def clear(self, slot: int) -> None:
        """Removes the factors of a slot."""
        if slot not in self.used:
            return
        self.used.remove(slot)
        self.a[slot].zero_()
        for b in self.b.values():
            b[:, slot].zero_()
        if self.factor is not None:
            self.factor[slot] = 1.0

    def applies(self, rows: AdapterRows) -> bool:
        """Returns whether an adapter of the tokens changes the layer, as far as the host knows."""
        return any(rows.first <= slot < rows.last for slot in self.used)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """Adds the adapters' changes to the layer's output, in place, and returns it.

        Args:
            out: `[T, out_features]`, output of the base layer.
            x: `[T, in_features]`, input of the layer.
            rows: adapters of the tokens.
        """
        if self.factor is not None:
            factor = self.factor[rows.slots]
            if self._bias is not None:
                out.sub_(self._bias).mul_(factor).add_(self._bias)
            else:
                out.mul_(factor)
        own = slice(rows.first, rows.last)
        a = self.a[own]
        hidden = F.linear(x, a.flatten(0, 2)).view(len(x), *a.shape[:3])
        # Products of other slots are not multiplied by 0: they may be infinite.
        hidden = hidden.masked_fill(~rows.mask[:, own, None, None], 0)
        start = 0
        for index, b in enumerate(self.b.values()):
            stop = start + len(b)
            out[:, start:stop] += F.linear(hidden[:, :, index].flatten(1), b[:, own].flatten(1))
            start = stop
        return out

    def _dora(self, part: str, factors: LowRank) -> Tensor:
        """Returns the factors `[rows]` float32 of DoRA: magnitudes by norms of the changed rows."""
        a, b = held(factors.a, self.columns, 1), held(factors.b, self.rows[part], 0)
        device = self.a.device
        delta = (b.to(device).float() @ a.to(device).float()) * factors.scaling
        changed = self._weight()[self._range(part)].float() + delta
        squares = changed.square().sum(1)
        if not self.columns.is_whole:  # each rank has the sum over its own columns
            squares = self._ranks.all_reduce(squares)
        assert factors.magnitude is not None
        magnitude = held(factors.magnitude, self.rows[part], 0).to(device).float()
        return magnitude / squares.sqrt()

    def _set_factor(self, slot: int, part: str, factor: Tensor) -> None:
        if self.factor is None:
            width = sum(share.count for share in self.rows.values())
            self.factor = self.a.new_ones(self.slots + 1, width)
        self.factor[slot, self._range(part)] = factor.to(self.factor)

    def _range(self, part: str) -> slice:
        """Returns the rows of the layer that a module has."""
        start = 0
        for name, share in self.rows.items():
            if name == part:
                break
            start += share.count
        return slice(start, start + self.rows[part].count)


def held(tensor: Tensor, share: Share, dim: int) -> Tensor:
    """Returns the part of a tensor that a share of a dimension holds."""
    if share.is_whole:
        return tensor
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in share.ranges], dim)


def refused(where: str, problems: Mapping[str, str]) -> AdapterError:
    """Returns the error for modules of an adapter that do not fit, of which the first are named."""
    named = [f"{name} {why}" for name, why in list(problems.items())[:5]]
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return AdapterError(f"{where} cannot be served: {'; '.join(named)}{more}")
