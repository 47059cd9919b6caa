"""The factors of adapters for the same linear layer of all experts.

Unlike those of other layers, the factors of experts are not padded and not stacked over slots: an
adapter of rank r has as many of them as a dense layer has of an adapter of rank r times the number
of experts. A slot without such an adapter takes no memory.
"""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.nn.adapter import LowRank
from services.common.nn.adapter_stack import AdapterRows, all_finite, held
from services.common.nn.linear import Linear

# A module of one expert, as files name it that hold a tensor for each expert.
MODULE = re.compile(r"(.+\.experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class _Factors:
    """The factors of one expert: `b @ a` is added to some rows of the expert's matrix.

    Attributes:
        start, stop: range of the rows.
        a: `[rank, in_features]`.
        b: `[stop - start, rank]`, times the scaling.
    """

    start: int
    stop: int
    a: Tensor
    b: Tensor


@dataclass(slots=True)
class ExpertStack:
    """The factors of all slots for one layer of all experts.

    Args:
        layer: the layer, a `StackedLinear`.
        like: tensor with the data type of activations, on their device.
    """

    layer: Linear
    like: Tensor
    _found: dict[tuple[int, int], list[_Factors]] = field(
        default_factory=dict[tuple[int, int], list[_Factors]]
    )

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.layer.stack[0]

    @property
    def used(self) -> set[int]:
        """The slots whose adapter changes an expert."""
        return {slot for slot, _ in self._found}

    def check_one(self, expert: int, part: str, factors: LowRank) -> str:
        """Returns why the factors of one expert's module do not fit, or an empty string."""
        if expert >= self.count:
            return f"does not exist: the model has {self.count} experts"
        found = len(factors.b), factors.a.shape[1]
        wanted = self.layer.rows[part].size, self.layer.columns.size
        if found != wanted:
            return f"is {list(found)}, the model has {list(wanted)}"
        if factors.magnitude is not None:
            return "has DoRA, which is not computed for experts by name"
        return ""

    def set_all(self, slot: int, factors: LowRank) -> Tensor:
        """Sets a slot's factors of all experts, which have the layer's shape.

        Returns:
            `[]` bool on the layer's device, True if all factors are finite.
        """
        factors = factors.on(self.like.device)
        count, shares = self.count, self.layer.rows.values()
        a = factors.a.reshape(count, -1, factors.a.shape[1])
        b = factors.b.reshape(len(factors.b), -1, count).permute(2, 0, 1)
        own = zip(b.split([share.size for share in shares], 1), shares, strict=True)
        b = torch.cat([held(part, share, 1) for part, share in own], 1)
        a, b = self._stored(held(a, self.layer.columns, 2), b, factors.scaling)
        for expert in range(count):
            found = _Factors(0, b.shape[1], a[expert], b[expert])
            self._found.setdefault((slot, expert), []).append(found)
        return self._finite(factors)

    def set_one(self, slot: int, expert: int, part: str, factors: LowRank) -> Tensor:
        """Sets a slot's factors of one expert's module, which have passed `check_one`.

        Returns:
            `[]` bool on the layer's device, True if all factors are finite.
        """
        factors = factors.on(self.like.device)
        start = 0
        for name, share in self.layer.rows.items():
            if name == part:
                break
            start += share.count
        b = held(factors.b, self.layer.rows[part], 0)
        a, b = self._stored(held(factors.a, self.layer.columns, 1), b, factors.scaling)
        found = _Factors(start, start + len(b), a, b)
        self._found.setdefault((slot, expert), []).append(found)
        return self._finite(factors)

    def _finite(self, factors: LowRank) -> Tensor:
        """Returns `[]` bool on the device, True if all factors of the file are finite.

        All ranks check the whole factors, not only the shares that they hold. So they refuse the
        same adapters.
        """
        scaled = factors.b.float() * factors.scaling
        return all_finite(factors.a.to(self.like), scaled.to(self.like))

    def _stored(self, a: Tensor, b: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return a.to(self.like), (b.float() * scaling).to(self.like).contiguous()

    def clear(self, slot: int) -> None:
        """Removes the factors of a slot."""
        self._found = {key: value for key, value in self._found.items() if key[0] != slot}

    def applies(self, rows: AdapterRows) -> bool:
        """Returns whether an adapter of the tokens changes the layer, as far as the host knows."""
        return any(rows.first <= slot < rows.last for slot in self.used)

    def add(self, out: Tensor, x: Tensor, expert: int, slots: Tensor) -> Tensor:
        """Adds the adapters' changes to an expert's output, in place, and returns it.

        Args:
            out: `[P, out_features]`, output of the base model's matrix.
            x: `[P, in_features]`, input.
            expert: index of the expert.
            slots: `[P]`, slot of each token's adapter.
        """
        for slot in sorted({slot for slot, found in self._found if found == expert}):
            chosen = torch.where(slots == slot)[0]
            for factors in self._found[slot, expert]:
                change = F.linear(F.linear(x[chosen], factors.a), factors.b)
                out[chosen, factors.start : factors.stop] += change
        return out
