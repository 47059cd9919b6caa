import time

import pytest

from services.common.geometry import Unit
from services.encoder.engine.messages import Source
from services.encoder.front.admission import Share
from services.encoder.front.source_store import SourceStore, Work

UNIT = Unit((1, 2, 2))


def test_a_file_is_kept_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = SourceStore(max_bytes=100)
    store.put(b"a", Work(Source(b"x" * 10), UNIT))
    now = 160.0
    store.put(b"b", Work(Source(b"y" * 10), UNIT))
    found = store.get(b"a")
    assert found is not None and (found.source.image, found.unit) == (b"x" * 10, UNIT)
    now = 220.5
    assert store.get(b"a") is None and store.get(b"b") is not None
    now = 280.0
    assert store.get(b"b") is None and len(store) == 0


def test_the_oldest_make_room() -> None:
    store = SourceStore(max_bytes=30)
    for key in (b"a", b"b", b"c"):
        store.put(key, Work(Source(b"x" * 10), UNIT))
    store.put(b"a", Work(Source(b"x" * 10), UNIT))  # asked for again: the youngest now
    store.put(b"d", Work(Source(b"x" * 15), UNIT))
    assert [store.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [
        True, False, False, True,
    ]  # fmt: skip
    store.put(b"e", Work(Source(b"x" * 31), UNIT))
    assert store.get(b"e") is None and store.get(b"d") is not None


def test_background_work_does_not_replace_the_share_of_a_request() -> None:
    store, batch = SourceStore(100), Share("a/batch", background=True)
    for share, stored in ((batch, batch), (Share("a"), Share("a")), (batch, Share("a"))):
        store.put(b"key", Work(Source(b"x"), UNIT, share))
        found = store.get(b"key")
        assert found is not None and found.share == stored
