"""A bounded pool of embeddings in memory that a front process and its engine process share.

The front owns the arena. It alone reserves ranges, commits, references and evicts entries. The
engine maps the same memory, and reads or writes the byte ranges that the front names; on a GPU it
registers the mapping as pinned memory.

The memory is anonymous (a memfd): the kernel frees it when the last process with a mapping ends, in
whatever way. Another service on the same machine may read the memory under its `address`.

An entry goes through these states. A lack of memory is never an error: `try_reserve` returns None,
and `claim` waits.

    try_reserve → uncommitted, one reference (the writer's) → commit → readable by `get`
                              ↓ release without commit                ↓ no references, evicted
                           removed                                 removed
"""

import asyncio
import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
    """An embedding's range of the arena.

    Attributes:
        key: image key of the embedding.
        spec: shape and dtype of the embedding.
        offset: offset of the first byte in the arena.
        digest: digest of the bytes. Empty until it is known.
        references: number of users because of which the entry is not evicted.
        committed: True once the bytes are complete.
    """

    key: bytes
    spec: EmbeddingSpec
    offset: int
    digest: bytes = b""
    references: int = 0
    committed: bool = False


class Claim(ABC, Generic[Result]):
    """A caller's need for memory of the arena, for one entry or for several at once."""

    @abstractmethod
    def attempt(self) -> Result | None:
        """Takes all that the caller needs, or nothing. Returns None if there is too little memory.

        Raises:
            KeyError: another caller still writes an entry that is needed. Claims behind this one
                need not wait for that. Any other exception ends the claim.
        """

    @abstractmethod
    def undo(self, result: Result) -> None:
        """Releases the result of a successful attempt whose caller has been cancelled."""


class Arena:
    """The pool, as its owner uses it. It is not thread-safe: one event loop owns it.

    Claims are granted in order of arrival. Each `release` and `commit` lets the first claim try
    again.

    Args:
        size_bytes: size of the pool, which is rounded up to whole pages.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = _align(size_bytes)
        self.fd, self.name = create_memory(self.size_bytes)
        self.memory = mmap.mmap(self.fd, self.size_bytes)
        self._entries: OrderedDict[bytes, ArenaEntry] = OrderedDict()
        self._free = [(0, self.size_bytes)]  # (offset, size), by offset
        self._claims: list[tuple[Claim[Any], asyncio.Future[Any]]] = []  # with their results
        self._serving = False

    @property
    def address(self) -> MemoryAddress:
        """Address at which other processes find the memory while this process lives."""
        return MemoryAddress(os.getpid(), self.fd, self.name, self.size_bytes)

    @property
    def used_bytes(self) -> int:
        """Number of bytes of all entries, committed or not."""
        return self.size_bytes - sum(size for _, size in self._free)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Collection[ArenaEntry]:
        """All entries, the least recently used first."""
        return self._entries.values()

    @property
    def free_ranges(self) -> Sequence[tuple[int, int]]:
        """Ranges (offset, size) that belong to no entry, in order of their offsets."""
        return self._free

    @property
    def has_claims(self) -> bool:
        """Returns whether callers wait for memory."""
        return bool(self._claims)

    def find(self, key: bytes) -> ArenaEntry | None:
        """Returns the entry of a key, committed or not, or None. The entry becomes the most
        recently used.

        The caller must `acquire` the entry before it yields to the event loop.
        """
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return entry

    def get(self, key: bytes) -> ArenaEntry | None:
        """Returns the committed entry of a key, as `find` does, or None."""
        entry = self.find(key)
        return entry if entry is not None and entry.committed else None

    def try_reserve(self, key: bytes, spec: EmbeddingSpec) -> ArenaEntry | None:
        """Reserves a range for an embedding and evicts unreferenced entries for it, the least
        recently used first.

        Returns:
            An uncommitted entry with one reference, which is the writer's. None if too many bytes
            are referenced now.

        Raises:
            KeyError: the key already has an entry.
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

    async def claim(self, claim: Claim[Result]) -> Result:
        """Waits until a claim is granted and returns the result of its successful attempt.

        The claim is attempted when all claims before it have been granted, and again whenever more
        memory may be free.

        Raises:
            Exception: an error of `Claim.attempt` other than KeyError.
        """
        granted: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._claims.append((claim, granted))
        self._serve_claims()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                claim.undo(granted.result())
            self._serve_claims()
            raise

    def evict_unreferenced(self) -> None:
        """Removes all entries without references."""
        for entry in [e for e in self._entries.values() if e.references == 0]:
            self._drop(entry)

    def view(self, entry: ArenaEntry) -> memoryview:
        """Returns a writable view of the entry's bytes. It must be released before `close`."""
        return memoryview(self.memory)[entry.offset : entry.offset + entry.spec.size_bytes]

    def prefault(self) -> None:
        """Maps the pages that exist already into this process: all pages if the engine has pinned
        the memory. It may run in a thread.
        """
        prefault(self.fd, self.memory)

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the bytes as complete. The writer still has its reference."""
        entry.committed = True
        self._serve_claims()

    def has(self, entry: ArenaEntry) -> bool:
        """Returns whether the entry still owns its range of the arena."""
        return self._entries.get(entry.key) is entry

    def acquire(self, entry: ArenaEntry) -> None:
        """Adds a reference, so that the entry is not evicted before the matching `release`."""
        assert self.has(entry), "the entry has been evicted"
        entry.references += 1

    def release(self, entry: ArenaEntry) -> None:
        """Removes a reference. An uncommitted entry without references is removed."""
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
        """Grants claims in order until the first that needs more memory than is free."""
        if self._serving:
            return
        for claim, granted in list(self._claims):
            if not granted.done():
                try:
                    result = self._attempt(claim)
                except KeyError:
                    continue
                except Exception as error:
                    granted.set_exception(error)
                else:
                    if result is None:
                        return
                    granted.set_result(result)
            self._claims.remove((claim, granted))

    def _attempt(self, claim: Claim[Result]) -> Result | None:
        """Attempts a claim. The entries that a failed attempt releases must not serve other claims
        meanwhile.
        """
        self._serving = True
        try:
            return claim.attempt()
        finally:
            self._serving = False

    def _drop(self, entry: ArenaEntry) -> None:
        assert self.has(entry), "the entry has been evicted"
        del self._entries[entry.key]
        self._add_free(entry.offset, _align(entry.spec.size_bytes))

    def _take(self, size: int) -> int | None:
        """Takes a free range, by first fit. Returns its offset, or None if no range is so large."""
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
