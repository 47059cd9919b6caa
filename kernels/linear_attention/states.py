"""Recurrent states of linear attention layers, and the layout of a step's sequences over them.

Each running sequence has the slot with the number of its row. Slots are never cleared: when a
kernel computes the token with index 0, it starts from a zero state and ignores the contents of the
slot.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.linear_attention.draft_runs import KeptInputs, StepRuns

# Tokens of a chunk whose recurrence kernels solve at the same time. The state is only known after
# each piece.
PIECE = 64


class LinearAttentionSizes(Protocol):
    """Sizes of a gated delta net layer, see `services.common.model_spec.LinearAttentionSpec`."""

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
    """States of a layer for all slots.

    Attributes:
        conv: last inputs of the convolution, `[slots, width, channels]` in the model's dtype. The
            input of token i is in column i % width, so a decode never reads the column to which it
            writes.
        recurrent: recurrent states `[slots, value_heads, key_head_dim, value_head_dim]` float32.
    """

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """States of all layers, with a slot for each row and a scratch slot for padding.

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
        """Allocates states with undefined contents."""
        heads = spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
        conv = spec.conv_width, spec.num_channels
        return cls(
            torch.empty(num_layers, num_slots, *conv, dtype=dtype, device=device),
            torch.empty(num_layers, num_slots, *heads, device=device),
        )

    @staticmethod
    def slot_bytes(spec: LinearAttentionSizes, num_layers: int, dtype: torch.dtype) -> int:
        """Size of a slot in bytes, summed over all layers."""
        conv = spec.conv_width * spec.num_channels * dtype.itemsize
        return num_layers * (conv + 4 * spec.value_size * spec.key_head_dim)

    def copy_slot(self, slot: int, target: "StateCache", to: int) -> None:
        """Copies the states of a slot to a slot of another cache."""
        target.conv[:, to].copy_(self.conv[:, slot])
        target.recurrent[:, to].copy_(self.recurrent[:, slot])

    def layer(self, index: int) -> LayerStates:
        return LayerStates(self.conv[index], self.recurrent[index])


@dataclass(slots=True)
class StateLayout:
    """Sequences of a step and their slots, decodes first and then chunks.

    Sequence s computes tokens [cu_query_lens[s], cu_query_lens[s + 1]) of the step, which are the
    last of its seq_lens[s] tokens.

    Attributes:
        cache: states of running sequences.
        num_decodes: number of decodes, which have one token each. Padding among the decodes of a
            captured step with chunks has no token.
        cu_query_lens: `[S + 1]` on the host.
        seq_lens: `[S]` on the host.
        slots: `[S]` int64 on the device.
        cu_query_lens_device: `[S + 1]` int32 on the device.
        seq_lens_device: `[S]` int32 on the device.
        work: `[W, 2]` int32 on the device, from `prefill_pieces`. None if there are no chunks.
        checkpoints: states that are saved within chunks. None if no state is saved.
        saves: `[T]` int32 on the device, slot of `checkpoints` for the state after each token, or
            -1 if the state is not saved. None if there are no chunks or no checkpoints. Kernels can
            save only after whole pieces of a chunk. The reference implementation can save after any
            token, except the only token of a chunk.
        runs: the decodes as runs of tokens. None if an eager step has no drafts and no inputs to
            fold, or if sequences have no drafts at all.
        kept: inputs of each row's last drafts. None if sequences have no drafts.
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
    runs: StepRuns | None = None
    kept: KeptInputs | None = None

    def saved(self, layer: int) -> tuple[Tensor, LayerStates] | None:
        """Returns `saves` and a layer's states of the checkpoints. None if no state is saved."""
        if self.saves is None or self.checkpoints is None:
            return None
        return self.saves, self.checkpoints.layer(layer)


def prefill_pieces(
    cu_query_lens: npt.NDArray[np.int32], num_decodes: int, num_tokens: int
) -> npt.NDArray[np.int32]:
    """Lists the pieces of a step's chunks.

    Args:
        cu_query_lens: see `StateLayout`.
        num_decodes: number of decodes of the step.
        num_tokens: number of tokens of the step.

    Returns:
        Sequence, and index in the step of the first token, of each piece: `[W, 2]`. Padding has -1
        and 0. W depends only on the numbers of tokens and sequences.
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
    """Projections of a step's T tokens and parameters of a layer, which the delta rule reads.

    Attributes:
        spec: sizes of the layer.
        qkv: queries, keys and values before the convolution, `[T, channels]`. Rows may be strided.
        beta: beta before the sigmoid, `[T, value_heads]`. Rows may be strided.
        decay: decay before `dt_bias` and softplus, `[T, value_heads]`. Rows may be strided.
        conv: taps of the convolution, `[channels, width]`. The last tap is for the token itself.
        a_log: logarithm of the decay rate, `[value_heads]` float32.
        dt_bias: bias of the decay, `[value_heads]`.
    """

    spec: LinearAttentionSizes
    qkv: Tensor
    beta: Tensor
    decay: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
