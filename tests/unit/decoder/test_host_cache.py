"""Copies of blocks to the host and back, on a CPU, and what a GPU's streams are given."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.decoder.engine.run.host_cache import HostPool
from services.decoder.engine.schedule.host_slots import HostSlots
from tests.decoder_harness import Harness, write_checkpoint, write_hybrid


class Streams:
    """Stands for the streams of a GPU, and notes the ids that are to be uploaded."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def save(self, blocks: Tensor, slots: Tensor, *, idle: bool) -> None:
        self.found.append((blocks, slots))

    def load(self, blocks: Tensor, slots: Tensor, pool: Tensor) -> None:
        self.found.append((blocks, slots))


def test_blocks_come_back_to_other_places() -> None:
    content = torch.arange(3 * 8 * 16, dtype=torch.bfloat16).view(3, 8, 4, 4)
    pool, rows = content.clone(), torch.zeros(3, 5, 4, 4, dtype=torch.bfloat16)
    cache = HostPool(pool, 6, 1, 1)
    cache.save(np.array([[2, 5], [7, 0]]))
    pool.zero_()
    cache.load(np.array([[1, 0], [0, 5]]))
    cache.load(np.array([[4, 5]]), rows)
    assert torch.equal(pool[:, 1], content[:, 7]) and torch.equal(pool[:, 0], content[:, 2])
    assert torch.equal(rows[:, 4], content[:, 2])
    assert not pool[:, 2:].any() and not rows[:, :4].any()


def test_ids_are_contiguous_so_that_their_upload_makes_no_one_wait() -> None:
    cache, streams = HostPool(torch.zeros(3, 8, 4, 4), 6, 1, 1), Streams()
    cache._streams = streams  # type: ignore[assignment]
    copies = np.array([[2, 5], [7, 0], [1, 3]])
    copies.flags.writeable = False  # as other ranks have them
    cache.save(copies)
    cache.load(copies)
    for blocks, slots in streams.found:
        assert blocks.tolist() == [2, 7, 1] and slots.tolist() == [5, 0, 3]
        assert blocks.is_contiguous() and slots.is_contiguous()
    assert len(streams.found) == 2


@pytest.mark.parametrize("write", [write_checkpoint, write_hybrid])
def test_the_start_says_if_blocks_are_copied_only_when_they_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write
) -> None:
    """And how much memory copies them ahead of time."""
    directory = write(tmp_path / "model")
    sizes = {"kv_cache_bytes": 40 << 20, "checkpoint_bytes": 1 << 20}
    found: list[tuple[bool, str]] = []
    more = 0.0
    for memory in (0, 10 << 20, None):
        caplog.clear()
        with caplog.at_level("INFO"):
            info = Harness(
                directory, kv_host_bytes=int(more) if memory is None else memory, **sizes
            ).runner.info
        lines = [line for line in caplog.messages if "DECODER_KV_HOST_BYTES" in line]
        offers = HostSlots(info.num_host_blocks, info.num_blocks)._takes_offers
        found.append((offers, "".join(lines)))
        if lines:
            more = 1e9 * (float(lines[0].split()[-2]) + 0.05)
    assert [offers for offers, _ in found] == [False, False, True]
    assert not found[0][1] and not found[2][1]
    assert "ahead of time" in found[1][1]
