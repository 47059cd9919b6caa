"""What ranks say to each other on the host."""

from pathlib import Path

import pytest
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from services.common.nn.collectives import Ranks


def test_a_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    first, second = (Ranks(rank, 2, store) for rank in range(2))
    with pytest.raises(RuntimeError, match=r"rank 1 has sent nothing for 0\.05 s"):
        first.exchange("a", 0.05)
    assert second.exchange("b", 5.0) == ["a", "b"]
