"""What rows have beside KV blocks. In the core: nothing. Pure Python."""

import importlib
from collections.abc import Iterable

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.sequence import Sequence

Checkpoints = tuple[tuple[int, int], ...]  # of a chunk, see `Chunk.checkpoints`


class RowStates:
    """Of a model without recurrent states: a prefix is its blocks, and a chunk ends anywhere."""

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a sequence can go on behind a prefix that ends with this block."""
        return True

    def drop(self, block_hash: bytes) -> None:
        """This block is not found any more."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has a row and the blocks of its prefix, `num_computed_tokens` long."""

    def boundary(self, num_tokens: int) -> int:
        """The last index up to there at which a chunk within a prompt may end."""
        return num_tokens

    def plan(
        self, sequence: Sequence, start: int, end: int, admitted: Iterable[Sequence]
    ) -> tuple[int, Checkpoints]:
        """Where a chunk [start, end) ends, and what is kept within it.

        Args:
            admitted: sequences that begin with the step; it is not launched yet.
        """
        return end, ()

    def commit(self, planned: Checkpoints) -> None:
        """The step that fills them was launched: later ones may read them."""

    def abandon(self, planned: Checkpoints) -> None:
        """It was not."""


def row_states(info: EngineInfo) -> RowStates:
    """Those of a model's rows, by `state_pool` if there are any."""
    if not info.has_states:
        return RowStates()
    module = importlib.import_module("services.decoder.engine.schedule.state_pool")
    return module.StateCheckpoints(info)
