"""No byte belongs to two entries, none is lost, and what is held stays."""

import os
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.common.embeddings.arena import Arena, ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec

PAGE = 4096


def spec(num_bytes: int) -> EmbeddingSpec:
    return EmbeddingSpec("float16", 1, num_bytes // 2, 1)


@pytest.fixture
def arena() -> Arena:
    arena = Arena(8 * PAGE)
    yield arena  # type: ignore[misc]
    arena.close()


def committed(arena: Arena, key: bytes, num_bytes: int) -> ArenaEntry:
    entry = arena.try_reserve(key, spec(num_bytes))
    assert entry is not None
    arena.commit(entry)
    arena.release(entry)
    return entry


def test_the_least_recently_used_goes_first(arena: Arena) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        committed(arena, key, 2 * PAGE)
    assert arena.get(b"a") is not None
    committed(arena, b"e", 2 * PAGE)
    assert arena.get(b"b") is None and arena.get(b"a") is not None


def test_what_is_held_is_not_evicted(arena: Arena) -> None:
    held = committed(arena, b"a", 4 * PAGE)
    arena.acquire(held)
    committed(arena, b"b", 4 * PAGE)
    assert arena.try_reserve(b"c", spec(8 * PAGE)) is None
    assert arena.get(b"a") is held
    arena.release(held)
    assert arena.try_reserve(b"c", spec(8 * PAGE)) is not None


def test_an_abandoned_entry_is_dropped(arena: Arena) -> None:
    entry = arena.try_reserve(b"a", spec(PAGE))
    assert entry is not None and arena.get(b"a") is None
    with pytest.raises(KeyError):
        arena.try_reserve(b"a", spec(PAGE))
    arena.release(entry)
    assert arena.used_bytes == 0 and len(arena) == 0


def test_another_mapping_sees_the_same_bytes(arena: Arena) -> None:
    entry = arena.try_reserve(b"a", spec(PAGE))
    assert entry is not None
    with arena.view(entry) as view:
        view[:5] = b"hello"
    assert os.pread(arena.fd, 5, entry.offset) == b"hello"


class ArenaMachine(RuleBasedStateMachine):
    """Reserves, commits, holds and releases in any order."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(16 * PAGE)
        self.held: dict[int, tuple[ArenaEntry, int]] = {}
        self.next_key = 0

    def hold(self, entry: ArenaEntry) -> ArenaEntry:
        found = self.held.get(id(entry), (entry, 0))
        self.held[id(entry)] = (entry, found[1] + 1)
        return entry

    @rule(target=entries, num_bytes=st.integers(1, 20 * PAGE).map(lambda n: 2 * n))
    def reserve(self, num_bytes: int) -> ArenaEntry | None:
        key = b"%d" % self.next_key
        self.next_key += 1
        entry = self.arena.try_reserve(key, spec(num_bytes))
        return self.hold(entry) if entry else None

    @rule(entry=entries)
    def commit(self, entry: ArenaEntry | None) -> None:
        if entry and id(entry) in self.held:
            self.arena.commit(entry)

    @rule(entry=entries)
    def acquire(self, entry: ArenaEntry | None) -> None:
        if entry and self.arena.get(entry.key) is entry:
            self.arena.acquire(entry)
            self.hold(entry)

    @rule(entry=consumes(entries))
    def release(self, entry: ArenaEntry | None) -> None:
        if entry and id(entry) in self.held:
            self.arena.release(entry)
            count = self.held[id(entry)][1] - 1
            if count:
                self.held[id(entry)] = (entry, count)
            else:
                del self.held[id(entry)]

    @rule()
    def evict_unreferenced(self) -> None:
        self.arena.evict_unreferenced()
        assert all(e.references for e in self.arena.entries)

    @invariant()
    def places_are_disjoint_and_complete(self) -> None:
        places = [
            (e.offset, e.offset + -(-e.spec.size_bytes // PAGE) * PAGE) for e in self.arena.entries
        ]
        places += [(start, start + size) for start, size in self.arena.free_ranges]
        places.sort()
        assert places[0][0] == 0 and places[-1][1] == self.arena.size_bytes
        assert all(a[1] == b[0] for a, b in pairwise(places))

    @invariant()
    def what_is_held_is_there(self) -> None:
        for entry, count in self.held.values():
            assert entry.references == count
            assert self.arena.has(entry)

    def teardown(self) -> None:
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, deadline=None)
