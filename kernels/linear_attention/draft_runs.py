"""Decodes that verify drafts, as runs of tokens over recurrent states.

A recurrent state that has seen a rejected draft cannot be taken back. So a step changes the state
of a row by the row's first token alone, which is never rejected. It computes the drafts behind that
token from a copy of the state, and keeps the inputs of the drafts (`KeptInputs`). The next step of
the row first *folds* the inputs of the accepted drafts into the state, which is then the state that
the row would have without drafts.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class OfRun:
    """Indices of the fields in `StepRuns.table`.

    Attributes:
        FIRST: index of the run's first decode. The others follow it.
        LENGTH: number of decodes of the run: its known token and its drafts. 0 for padding.
        FOLDS: number of kept inputs that are folded into the state before the run.
        COUNT: number of fields.
    """

    FIRST, LENGTH, FOLDS = 0, 1, 2
    COUNT = 3


def run_table(
    slots: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], folds: dict[int, int]
) -> npt.NDArray[np.int32]:
    """Groups a step's D decodes into runs of consecutive tokens of a slot.

    Padding decodes of a captured step share a slot, and each of them is a run. Decodes without a
    token (a length of 0) belong to no run.

    Args:
        slots: `[D]`, slot of each decode. The decodes of a slot follow each other.
        seq_lens: `[D]`, number of the sequence's tokens up to and with each decode.
        folds: number of kept inputs that are folded before a decode, by the decode's index.

    Returns:
        The runs `[3, D]` with the fields of `OfRun`, and then padding of zeros.
    """
    count, firsts, lengths = len(slots), list[int](), list[int]()
    following: tuple[int, int] | None = None  # slot and number of tokens that continue a run
    for index, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        if (slot, seq_len) == following:
            lengths[-1] += 1
        elif seq_len > 0:
            firsts.append(index)
            lengths.append(1)
        following = (slot, seq_len + 1) if seq_len > 0 else None
    table = np.zeros((OfRun.COUNT, count), np.int32)
    table[: OfRun.FOLDS, : len(firsts)] = firsts, lengths
    for index, number in folds.items():
        table[OfRun.FOLDS, bisect_left(firsts, index)] = number
    return table


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Kept inputs of one layer.

    Attributes:
        qkv: `[slots, drafts, channels]`, inputs of the convolution.
        gates: `[slots, drafts, 2 * value_heads]`: beta before the sigmoid, then the decay before
            `dt_bias`.
    """

    qkv: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """Inputs of each row's last drafts, for all layers, in the model's data type.

    Attributes:
        qkv, gates: see `LayerInputs`, with a leading dimension for the layers.
    """

    qkv: Tensor
    gates: Tensor

    @classmethod
    def allocate(
        cls,
        num_channels: int,
        num_value_heads: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Allocates inputs with undefined contents.

        Args:
            num_channels: number of channels of the convolution.
            num_value_heads: number of value heads.
            sizes: numbers of layers, of slots, and of drafts of a slot.
            dtype: the model's data type.
            device: the device that computes.
        """
        return cls(
            torch.empty(*sizes, num_channels, dtype=dtype, device=device),
            torch.empty(*sizes, 2 * num_value_heads, dtype=dtype, device=device),
        )

    def layer(self, index: int) -> LayerInputs:
        return LayerInputs(self.qkv[index], self.gates[index])


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive tokens of several sequences, the longest span first.

    Attributes:
        slots: `[R]` int64 on the device, slot of each sequence.
        starts: `[R]` int64 on the device, index in the sequence of each span's first token.
        lengths: number of tokens of each span, in descending order.
        tokens: `[R, L]` int64 on the device, place of each token in the tensor that has the inputs.
            L is the longest length. Shorter spans repeat their last token.
    """

    slots: Tensor
    starts: Tensor
    lengths: list[int]
    tokens: Tensor

    def num_longer(self, length: int) -> int:
        """Returns the number of spans with more than `length` tokens, which come first."""
        return sum([each > length for each in self.lengths])


@dataclass(frozen=True, slots=True)
class DraftRuns:
    """The tokens of a step's runs, as the reference implementation reads them.

    Attributes:
        own: the step's tokens, a span for each row: its first token and its drafts.
        span_of, place_of: `[D]` int64 on the device, the span of each decode and its place there.
        kept_slots, kept_places, kept_tokens: int64 on the device, for each draft: slot and place in
            `LayerInputs` that get the draft's inputs, and place of the draft in the step.
        folds: tokens whose inputs were kept and are folded into the states first, as places in
            `LayerInputs` with slots and drafts flattened. None if there are none.
        folded: `[F]` int64 on the device, the span of `own` that follows each span of `folds`.
        ring_slots, ring_tokens: int64 on the device, slot and index in the sequence of the folded
            tokens that the convolution may need later.
        ring_places: int64 on the device, places of the same tokens in `LayerInputs`, flattened.
    """

    own: Spans
    span_of: Tensor
    place_of: Tensor
    kept_slots: Tensor
    kept_places: Tensor
    kept_tokens: Tensor
    folds: Spans | None = None
    folded: Tensor | None = None
    ring_slots: Tensor | None = None
    ring_tokens: Tensor | None = None
    ring_places: Tensor | None = None

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        seq_lens: Sequence[int],
        folds: dict[int, int],
        *,
        num_drafts: int,
        width: int,
        device: torch.device,
    ) -> Self:
        """Lists the tokens of a step's runs. No decode is padding.

        Args:
            slots: slot of each decode. The decodes of a slot follow each other.
            seq_lens: number of the sequence's tokens up to and with each decode.
            folds: number of kept inputs that are folded before a decode, by the decode's index.
            num_drafts: number of drafts of a slot in `LayerInputs`.
            width: width of the convolution.
            device: the device that computes.
        """

        def put(values: npt.ArrayLike) -> Tensor:
            return torch.from_numpy(np.asarray(values, np.int64)).to(device)

        groups = [[*group] for _, group in groupby(range(len(slots)), key=lambda i: slots[i])]
        groups.sort(key=len, reverse=True)
        firsts = [group[0] for group in groups]
        own = _spans(
            [slots[i] for i in firsts], [seq_lens[i] - 1 for i in firsts], groups, device=device
        )
        places = np.zeros((2, len(slots)), np.int64)
        for span, group in enumerate(groups):
            places[0, group], places[1, group] = span, range(len(group))
        drafts = [(slots[i], place, i) for g in groups for place, i in enumerate(g[1:])]
        kept = np.array(drafts, np.int64).reshape(-1, 3).T
        found = cls(own, put(places[0]), put(places[1]), *map(put, kept))
        counts = {i: folds[i] for i in sorted(folds, key=lambda i: -folds[i])}
        if not counts:
            return found
        bases = [slots[i] * num_drafts for i in counts]
        tokens = [[*range(base, base + n)] for base, n in zip(bases, counts.values(), strict=True)]
        starts = [seq_lens[i] - 1 - n for i, n in counts.items()]
        ring = [
            (slots[i], seq_lens[i] - 1 - back, base + n - back)
            for (i, n), base in zip(counts.items(), bases, strict=True)
            for back in range(1, min(n, width) + 1)
        ]
        return cls(
            own,
            found.span_of,
            found.place_of,
            found.kept_slots,
            found.kept_places,
            found.kept_tokens,
            _spans([slots[i] for i in counts], starts, tokens, device=device),
            put([firsts.index(i) for i in counts]),
            *map(put, np.array(ring, np.int64).T),
        )


def _spans(
    slots: list[int], starts: list[int], tokens: list[list[int]], *, device: torch.device
) -> Spans:
    """Returns spans of which `tokens` has the places; the longest is the first."""
    longest = len(tokens[0])
    padded = [[*each, *each[-1:] * (longest - len(each))] for each in tokens]
    arrays = (np.array(each, np.int64) for each in (slots, starts, padded))
    found = [torch.from_numpy(each).to(device) for each in arrays]
    return Spans(found[0], found[1], [len(each) for each in tokens], found[2])


@dataclass(slots=True)
class StepRuns:
    """The decodes of a step as runs: of one that has drafts, follows drafts, or is captured.

    Attributes:
        table: `[3, D]` int32 on the device, from `run_table`. Kernels read only this.
        slots: `[D]` on the host, slot of each decode.
        seq_lens: `[D]` on the host, number of the sequence's tokens up to and with each decode.
        folds: number of kept inputs that are folded before a decode, by the decode's index.
    """

    table: Tensor
    slots: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    folds: dict[int, int]
    _tokens: DraftRuns | None = field(default=None, init=False)

    def tokens(self, num_drafts: int, width: int) -> DraftRuns:
        """Returns the tokens of the runs, which all layers share; see `DraftRuns.of`."""
        if self._tokens is None:
            self._tokens = DraftRuns.of(
                self.slots.tolist(),
                self.seq_lens.tolist(),
                self.folds,
                num_drafts=num_drafts,
                width=width,
                device=self.table.device,
            )
        return self._tokens
