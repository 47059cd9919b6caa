"""The contract between a vision tower and an attention backend.

Ragged, full (non-causal) multi-head attention: a batch packs segments (an image, or one frame of a
video) one after the other, and each attends to itself only. Passed as an argument all the way down;
there is no global context.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class LastingPlan(Protocol):
    """A plan whose memory stays where it is, for CUDA graphs: captured once, then set anew before
    each replay.
    """

    def set(self, lengths: Sequence[int]) -> None:
        """Plans for these segments, once the device gets there. Rows behind the last segment attend
        to nothing and get values of no meaning.
        """
        ...


class AttentionBackend(Protocol):
    """One implementation of ragged attention."""

    def plan(self, lengths: Sequence[int], device: torch.device) -> Any:  # noqa: ANN401 - its own
        """Host work once per batch, shared by all blocks.

        Args:
            lengths: patches of each segment, in the order they are packed; all positive.
            device: where the tensors will be.
        """
        ...

    def lasting_plan(
        self, max_rows: int, max_segments: int, device: torch.device
    ) -> LastingPlan | None:
        """A plan of up to so many patches and segments for `forward` in a graph; None: this backend
        has none there.
        """
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:  # noqa: ANN401
        """Attends within each segment, scaled by head_dim ** -0.5.

        Args:
            query: `[N, num_heads, head_dim]`, rotated, N the sum of the planned lengths; may be
                strided over N, as key and value may.
            key: as the query.
            value: as the query, not rotated.
            plan: what `plan` returned for these lengths, or a lasting plan that was set to them.

        Returns:
            `[N, num_heads, head_dim]`.
        """
        ...
