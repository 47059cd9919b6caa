"""Recurrent states of linear attention layers: where they are, and a step's layout over them.

Each running sequence has a slot, that of its row. Nothing clears a slot: a sequence whose first
token is computed starts from zero, whatever the slot holds. That follows from the token's index, so
that no flag can be forgotten.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE = 64  # tokens of a chunk whose recurrence kernels solve at once; a state is there after each


class LinearAttentionSizes(Protocol):
    """Sizes of a gated delta net layer; `services.common.model_spec.LinearAttentionSpec` is one."""

    @property
    def num_key_heads(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def key_head_dim(self) -> int: ...
    @property
    def value_head_dim(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def key_size(self) -> int: ...
    @property
    def value_size(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def group_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's states of all slots.

    Attributes:
        conv: `[slots, width, channels]` in the model's dtype: the convolution's last inputs. That
            of token i is in column i % width, so that a decode writes one column, which it does not
            read.
        recurrent: `[slots, value_heads, key_head_dim, value_head_dim]` float32.
    """

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """All layers' states: a slot for each row, and one of scratch for padding.

    Attributes:
        conv: `[layers, slots, width, channels]`, see `LayerStates`.
        recurrent: `[layers, slots, value_heads, key_head_dim, value_head_dim]` float32.
    """

    conv: Tensor
    recurrent: Tensor

    @classmethod
    def allocate(
        cls,
        spec: LinearAttentionSizes,
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "StateCache":
        """Memory of undefined contents."""
        heads = spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
        conv = spec.conv_width, spec.num_channels
        return cls(
            torch.empty(num_layers, num_slots, *conv, dtype=dtype, device=device),
            torch.empty(num_layers, num_slots, *heads, device=device),
        )

    @staticmethod
    def slot_bytes(spec: LinearAttentionSizes, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes of one slot, summed over all layers."""
        conv = spec.conv_width * spec.num_channels * dtype.itemsize
        return num_layers * (conv + 4 * spec.value_size * spec.key_head_dim)

    def copy_slot(self, slot: int, target: "StateCache", to: int) -> None:
        """Copies a slot's states to a slot of another cache."""
        target.conv[:, to].copy_(self.conv[:, slot])
        target.recurrent[:, to].copy_(self.recurrent[:, slot])

    def layer(self, index: int) -> LayerStates:
        return LayerStates(self.conv[index], self.recurrent[index])


@dataclass(slots=True)
class StateLayout:
    """One step's sequences and their slots: decodes first, then chunks.

    Sequence s computes tokens [cu_query_lens[s], cu_query_lens[s + 1]) of the step, which are the
    last of its seq_lens[s] tokens.

    Attributes:
        num_decodes: the first sequences, of one token each; in a captured step with chunks, padding
            among them has none.
        cu_query_lens: `[S + 1]`, host.
        seq_lens: `[S]`, host.
        slots: `[S]` int64, device.
        cu_query_lens_device: `[S + 1]` int32.
        seq_lens_device: `[S]` int32.
        work: `[W, 2]` int32, device: see `prefill_pieces`; None: there are no chunks.
        checkpoints: slots for states within chunks; None: there are none.
        saves: `[T]` int32, device: the slot of `checkpoints` that takes the state after a token,
            -1: none; None: there are no chunks, or no checkpoints. Kernels save after whole pieces
            of a chunk alone, plain functions anywhere but after a chunk's only token.
    """

    cache: StateCache
    num_decodes: int
    cu_query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    slots: Tensor
    cu_query_lens_device: Tensor
    seq_lens_device: Tensor
    work: Tensor | None = None
    checkpoints: StateCache | None = None
    saves: Tensor | None = None

    def saved(self, layer: int) -> tuple[Tensor, LayerStates] | None:
        """`saves`, and a layer's states of the checkpoints; None: nothing is saved."""
        if self.saves is None or self.checkpoints is None:
            return None
        return self.saves, self.checkpoints.layer(layer)


def prefill_pieces(
    cu_query_lens: npt.NDArray[np.int32], num_decodes: int, num_tokens: int
) -> npt.NDArray[np.int32]:
    """Pieces of a step's chunks: the sequence, and the piece's first token in the step; -1 and 0
    for padding. `[W, 2]`, where W depends only on the numbers of tokens and of sequences.
    """
    starts = cu_query_lens[num_decodes:].tolist()
    found = [
        (num_decodes + index, first)
        for index, (start, stop) in enumerate(pairwise(starts))
        for first in range(start, stop, PIECE)
    ]
    pieces = np.zeros((num_tokens // PIECE + len(starts) - 1, 2), np.int32)
    pieces[:, 0] = -1
    pieces[: len(found)] = found
    return pieces


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer's projections and parameters give the delta rule for a step's T tokens.

    Attributes:
        qkv: `[T, channels]`: queries, keys and values before the convolution; rows may be strided.
        beta: `[T, value_heads]`, before the sigmoid; strided, too.
        decay: `[T, value_heads]`, before `dt_bias` and softplus; strided, too.
        conv: `[channels, width]`, taps; the last one is the token's own.
        a_log: `[value_heads]` float32.
        dt_bias: `[value_heads]`.
    """

    spec: LinearAttentionSizes
    qkv: Tensor
    beta: Tensor
    decay: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
