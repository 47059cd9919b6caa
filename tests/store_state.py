"""What an embedding store does at the moment, for tests that wait for it or look for leaks."""

from typing import Any

from services.common.embeddings.store import EmbeddingStore


def num_waiters(store: EmbeddingStore[Any], key: bytes) -> int:
    """Number of callers that wait for the lookup of a key."""
    lookup = store.running(key)
    return lookup.task.num_waiters if lookup else 0


def num_unfinished(store: EmbeddingStore[Any]) -> int:
    """Number of entries that are not complete, or whose digest is not known yet."""
    return sum(not (entry.committed and entry.digest) for entry in store.arena.entries)


def num_lookups(store: EmbeddingStore[Any]) -> int:
    """Number of lookups that have not been forgotten."""
    return len(store._lookups)
