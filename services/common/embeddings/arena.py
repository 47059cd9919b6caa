"""A bounded shared-memory pool of embeddings, between a front process and its engine process.

The front owns the arena: it alone reserves, commits, references and evicts. The engine maps the
same memory and reads or writes the byte ranges it is told of; on a GPU it registers the mapping as
pinned memory. The memory is anonymous (a memfd), so the kernel frees it with the last process that
maps it, however that one dies. Another service on the same machine may read it: `address` says
where. What an entry means is its owner's business. A lack of room is `None` or a wait, never an
error.
"""

import asyncio
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_memory import (
    PAGE_BYTES,
    MemoryAddress,
    create_memory,
    prefault,
)

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class ArenaEntry:
    """One embedding's range of the arena.

    Attributes:
        digest: of the bytes; empty until known.
        references: users that keep the entry from being evicted.
        committed: the bytes are complete.
    """

    key: bytes
    spec: EmbeddingSpec
    offset: int
    digest: bytes = b""
    references: int = 0
    committed: bool = False


class Arena:
    """The pool, as its owner sees it. Not thread-safe: one event loop owns it.

    Callers that need room wait for it in order of arrival (`when_room`); whatever may make room
    (`release`, `commit`) lets the first of them try again.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = _align(size_bytes)
        self.fd, self.name = create_memory(self.size_bytes)
        self.memory = mmap.mmap(self.fd, self.size_bytes)
        self._entries: OrderedDict[bytes, ArenaEntry] = OrderedDict()
        self._free = [(0, self.size_bytes)]  # (offset, size), by offset
        # Callers that wait for room: what each attempts, and where the result goes.
        self._claims: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._serving = False

    @property
    def address(self) -> MemoryAddress:
        """Where other processes find the memory while this one lives."""
        return MemoryAddress(os.getpid(), self.fd, self.name, self.size_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes held by entries, committed or not."""
        return self.size_bytes - sum(size for _, size in self._free)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_claims(self) -> bool:
        """Whether callers wait for room."""
        return bool(self._claims)

    def get(self, key: bytes) -> ArenaEntry | None:
        """The committed entry of `key`, made the most recently used; the caller must `acquire`
        it before it yields to the event loop.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.committed:
            return None
        self._entries.move_to_end(key)
        return entry

    def try_reserve(self, key: bytes, spec: EmbeddingSpec) -> ArenaEntry | None:
        """Makes room for an embedding, evicting the least recently used unreferenced entries.

        Returns:
            An uncommitted entry with one reference, the writer's; or None where room cannot be
            made now.

        Raises:
            KeyError: the key has an entry already.
        """
        if key in self._entries:
            raise KeyError(key.hex())
        size = _align(spec.size_bytes)
        if size > self.size_bytes:
            return None
        while (offset := self._take(size)) is None:
            victim = next((e for e in self._entries.values() if e.references == 0), None)
            if victim is None:
                return None
            self._drop(victim)
        entry = ArenaEntry(key, spec, offset, references=1)
        self._entries[key] = entry
        return entry

    async def when_room(
        self, attempt: Callable[[], Result | None], undo: Callable[[Result], None]
    ) -> Result:
        """The first result of `attempt` that is not None, tried when the claims before it are
        granted and again whenever there may be more room.

        Args:
            attempt: takes what it needs, all or nothing. KeyError: another caller still writes to
                what it needs; others need not wait for that. Another exception ends the claim.
            undo: releases a result that comes too late, because the caller is cancelled.
        """
        granted: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._claims.append((attempt, granted))
        self._serve_claims()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                undo(granted.result())
            self._serve_claims()
            raise

    def evict_unreferenced(self) -> None:
        """Makes all the room that can be made now."""
        for entry in [e for e in self._entries.values() if e.references == 0]:
            self._drop(entry)

    def view(self, entry: ArenaEntry) -> memoryview:
        """The entry's bytes, writable. Release the view before the arena is closed."""
        return memoryview(self.memory)[entry.offset : entry.offset + entry.spec.size_bytes]

    def prefault(self) -> None:
        """Maps what the engine has allocated (all, where it is pinned) into this process; may run
        in a thread.
        """
        prefault(self.fd, self.memory)

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the bytes as complete; the writer's reference stays until released."""
        entry.committed = True
        self._serve_claims()

    def has(self, entry: ArenaEntry) -> bool:
        """Whether the entry still owns its range of the arena."""
        return self._entries.get(entry.key) is entry

    def acquire(self, entry: ArenaEntry) -> None:
        """Keeps an entry that is there from being evicted until `release`."""
        assert self.has(entry), "the entry has been evicted"
        entry.references += 1

    def release(self, entry: ArenaEntry) -> None:
        """Drops one reference. An uncommitted entry without references is removed."""
        assert entry.references > 0, "released more often than acquired"
        entry.references -= 1
        if entry.references == 0:
            if not entry.committed:
                self._drop(entry)
            self._serve_claims()

    def close(self) -> None:
        """Unmaps the memory in this process."""
        self._entries.clear()
        self.memory.close()
        os.close(self.fd)

    def _serve_claims(self) -> None:
        """Grants claims in order until one needs more room than there is."""
        if self._serving:
            return
        for attempt, granted in list(self._claims):
            if not granted.done():
                try:
                    result = self._try(attempt)
                except KeyError:
                    continue
                except Exception as error:
                    granted.set_exception(error)
                else:
                    if result is None:
                        return
                    granted.set_result(result)
            self._claims.remove((attempt, granted))

    def _try(self, attempt: Callable[[], Result | None]) -> Result | None:
        """An attempt that fails releases what it took: that must not serve other claims."""
        self._serving = True
        try:
            return attempt()
        finally:
            self._serving = False

    def _drop(self, entry: ArenaEntry) -> None:
        assert self.has(entry), "the entry has been evicted"
        del self._entries[entry.key]
        self._add_free(entry.offset, _align(entry.spec.size_bytes))

    def _take(self, size: int) -> int | None:
        """First fit."""
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, free - size)
                return offset
        return None

    def _add_free(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def _align(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
