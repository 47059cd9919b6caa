"""The factors of several adapters for one linear layer, applied to the tokens of a step at once.

The factors of all slots are stacked and padded with zeros to the same rank (`SlotFactors`). The
operations `shrink_adapters` and `expand_adapters` of the dispatch table apply them.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.adapters import plain
from kernels.adapters.factors import AdapterRows, SlotFactors
from services.common.adapter_config import AdapterError
from services.common.nn.adapter import LowRank
from services.common.nn.collectives import ALONE, Ranks, Share
from services.common.nn.linear import Linear
from services.common.nn.quantized import QuantizedLinear


class AdapterStack:
    """The factors of all slots for one layer.

    Args:
        rows: share of each module's rows that the layer holds, by module name (`Linear.rows`).
        columns: share of the modules' columns that the layer holds.
        slots: number of slots.
        rank: largest rank of an adapter.
        like: tensor with the data type of activations, on their device.
        bias: bias of the layer, which DoRA does not scale. None if the layer has no bias.
        weight: function that returns the layer's weight `[out_features, in_features]`, for DoRA.
        ranks: ranks that share the model.

    Attributes:
        factors: the factors of all slots. Another object from the first adapter with DoRA on.
        used: slots whose adapter changes the layer.
        scaled: slots of `used` whose adapter scales the layer's output, for DoRA.
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
        sizes = tuple(share.count for share in rows.values())
        self.factors = SlotFactors.zeros(sizes, columns.count, slots, rank, like, bias)
        self.used: set[int] = set()
        self.scaled: set[int] = set()
        self._weight, self._ranks = weight, ranks

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
        if factors.magnitude is not None and factors.magnitude.shape != found[:1]:
            return f"has magnitudes of {list(factors.magnitude.shape)} for {found[0]} rows"
        if factors.rank > self.rank:
            return f"has rank {factors.rank}, more than the largest rank {self.rank}"
        return ""

    def set(self, slot: int, part: str, factors: LowRank) -> Tensor:
        """Sets a slot's factors of a module, which have passed `check`.

        Kernels multiply the factors of a slot by zeros for the tokens of other slots. So the slot
        has to be cleared before the next step if a factor is not finite.

        Returns:
            `[]` bool on the layer's device, True if all factors are finite.
        """
        self.used.add(slot)
        index = list(self.rows).index(part)
        factors = factors.on(self.factors.a.device)
        stored = factors.a.to(self.factors.a), factors.b.float() * factors.scaling
        finite = all_finite(stored[0], stored[1].to(stored[0]))
        target = self.factors.a[slot, index]
        target.zero_()
        target[: factors.rank] = held(stored[0], self.columns, 1)
        scaled = held(stored[1], self.rows[part], 0)
        if factors.magnitude is not None:
            self.scaled.add(slot)
            factor = self._dora(part, factors)
            self.factors = self.factors.with_factor()
            found = self.factors.factor
            assert found is not None
            found[slot, self._range(part)] = factor.to(found)
            scaled = scaled.to(factor) * factor[:, None]
            finite &= all_finite(factors.magnitude, found[slot, self._range(part)])
            finite &= all_finite(scaled.to(found))
        target = self.factors.b[self._range(part), slot]
        target.zero_()
        target[:, : factors.rank] = scaled.to(target)
        return finite

    def clear(self, slot: int) -> None:
        """Removes the factors of a slot."""
        if slot not in self.used:
            return
        self.used.remove(slot)
        self.scaled.discard(slot)
        self.factors.a[slot].zero_()
        self.factors.b[:, slot].zero_()
        if self.factors.factor is not None:
            self.factors.factor[slot] = 1.0

    def applies(self, rows: AdapterRows) -> bool:
        """Returns whether an adapter of the tokens changes the layer, as far as the host knows.

        A CUDA graph serves any adapters, even those that are loaded after the graph's capture.
        """
        return rows.in_graph or any(rows.first <= slot < rows.last for slot in self.used)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """Adds the adapters' changes to the layer's output in plain torch.

        Args:
            out: `[T, out_features]`, output of the base layer, which may be overwritten.
            x: `[T, in_features]`, input of the layer.
            rows: adapters of the tokens.
        """
        products = plain.shrink_adapters(x, None, self.factors, rows)
        return plain.expand_adapters(out, products, self.factors, rows)

    def _dora(self, part: str, factors: LowRank) -> Tensor:
        """Returns the factors `[rows]` float32 of DoRA: magnitudes by norms of the changed rows.

        Args:
            part: name of the module.
            factors: the module's factors on the layer's device.
        """
        a, b = held(factors.a, self.columns, 1), held(factors.b, self.rows[part], 0)
        delta = (b.float() @ a.float()) * factors.scaling
        changed = self._weight()[self._range(part)].float() + delta
        squares = changed.square().sum(1)
        if not self.columns.is_whole:  # each rank has the sum over its own columns
            squares = self._ranks.all_reduce(squares)
        assert factors.magnitude is not None
        return held(factors.magnitude, self.rows[part], 0).float() / squares.sqrt()

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


def all_finite(*tensors: Tensor) -> Tensor:
    """Returns `[]` bool on the device, True if all values are finite. The host does not wait."""
    return torch.stack([each.isfinite().all() for each in tensors]).all()


def refused(where: str, problems: Mapping[str, str]) -> AdapterError:
    """Returns the error for modules of an adapter that do not fit, of which the first are named."""
    named = [f"{name} {why}" for name, why in list(problems.items())[:5]]
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return AdapterError(f"{where} cannot be served: {'; '.join(named)}{more}")
