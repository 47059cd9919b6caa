"""The tensors that the kernels of adapters read: factors by slot, and the slot of each token."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.adapters.token_groups import TokenGroups, group_tokens
from kernels.gemm.changes import LEAST_RANK, Changes, num_words


def padded_rank(rank: int) -> int:
    """Returns the power of two to which factors of a rank are padded with zeros."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


class Norm(Protocol):
    """An RMSNorm.

    Attributes:
        weight: `[K]`, weight of the norm.
        eps: constant of the norm.
    """

    eps: float

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SlotFactors:
    """The factors of all slots for one linear layer with K columns and N rows.

    The tensors keep their memory when adapters are loaded and unloaded, so CUDA graphs may read
    them.

    Attributes:
        a: `[slots, modules, rank, K]`, factors that are applied to the layer's input. The rank is
            padded, see `padded_rank`.
        b: `[N, slots, rank]`, factors that are applied to the product, times the scaling.
        sizes: number of rows of each of the layer's modules. Their sum is N.
        bias: `[N]`, bias of the layer, which DoRA does not scale. None if the layer has no bias.
        words: memory of the kernels that add changes, see `Changes`.
        factor: `[slots, N]`, factors of the base layer's output for DoRA, 1 in slots without it.
            None as long as no slot has DoRA.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    words: Tensor
    bias: Tensor | None = None
    factor: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        sizes: tuple[int, ...],
        columns: int,
        slots: int,
        rank: int,
        like: Tensor,
        bias: Tensor | None = None,
    ) -> "SlotFactors":
        """Makes factors of empty slots with the data type and the device of `like`."""
        width = padded_rank(rank)
        a = like.new_zeros(slots, len(sizes), width, columns)
        b = like.new_zeros(sum(sizes), slots, width)
        words = like.new_zeros(num_words(sizes, slots, width), dtype=torch.int32)
        return cls(a, b, sizes, words, bias)

    def changes(self, rows: "AdapterRows") -> Changes:
        """Returns the changes of tokens, for kernels that know no DoRA."""
        return Changes(self.a, self.b, self.sizes, self.words, rows.slots, rows.first, rows.last)

    def with_factor(self) -> "SlotFactors":
        """Returns the same factors with memory for those of DoRA."""
        if self.factor is not None:
            return self
        return replace(self, factor=self.b.new_ones(self.b.shape[1], len(self.b)))


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of T tokens.

    Attributes:
        slots: `[T]` int64, slot of each token's adapter, -1 for none.
        count: number of slots.
        first, last: range [first, last) of the slots that may occur, which the host knows.
        in_graph: True if a CUDA graph is captured, which runs for any adapters of these tokens.
        groups: the tokens by slot. None if there are few tokens, or if the caller does not
            group them. Then each kernel that needs groups makes them first.
    """

    slots: Tensor
    count: int
    first: int
    last: int
    in_graph: bool = False
    groups: TokenGroups | None = None

    @property
    def token_groups(self) -> TokenGroups:
        """The tokens by slot, which are grouped now in plain torch if `groups` is None."""
        return self.groups or group_tokens(self.slots, self.count)

    @property
    def mask(self) -> Tensor:
        """`[T, slots]`, True where a token has the adapter of a slot."""
        return self.slots[:, None] == torch.arange(self.count, device=self.slots.device)

    def part(self, rows: Tensor) -> "AdapterRows":
        """Returns the adapters of some of the tokens, whose indices are `rows` `[R]`."""
        return self._of(self.slots[rows])

    def piece(self, start: int, stop: int) -> "AdapterRows":
        """Returns the adapters of the tokens [start, stop)."""
        return self._of(self.slots[start:stop])

    def _of(self, slots: Tensor) -> "AdapterRows":
        return AdapterRows(slots, self.count, self.first, self.last, self.in_graph)
