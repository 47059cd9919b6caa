"""The embeddings that a pod has or can obtain, in the encoder and in the decoder.

An embedding is looked up in the arena, which is the store's own memory, and then in the store's
tiers, in their order: Redis and the vision tower in the encoder, Redis and the encoders in the
decoder. A further tier is a subclass of `Tier` and its place in the list that the service's
`__main__` gives to the store. All callers that want one key share one lookup, and a lookup that
fails leaves nothing behind.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import Counter

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_write import Digests, EmbeddingWrite
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import EmbeddingUnavailable, Overloaded

MEMORY = "memory"  # name of the arena among the tiers
# Readers release their entries soon, but the largest images take seconds to encode.
_RESERVE_TIMEOUT_S = 60.0
_CLOSE_ATTEMPTS = 50
Inputs = TypeVar("Inputs")


@dataclass(slots=True, eq=False)
class Lookup(Generic[Inputs]):
    """A lookup of one embedding in the tiers, which all callers that want the embedding share.

    Attributes:
        store: the store of the lookup.
        key: key of the embedding.
        spec: shape and dtype of the embedding.
        inputs: data that a tier needs besides the key: in the encoder the image and its tenant, in
            the decoder the address of an encoder.
        needs_bytes: whether the embedding must be written into the arena. If not, it is enough that
            a tier which other pods reach has it.
        placed: future of the writing, done when the embedding has its memory.
        seconds: time of each stage of the lookup by name.
        task: the task that asks the tiers, with its waiters. Its result is the name of the tier
            that had the embedding. It is deleted when the lookup ends.
    """

    store: "EmbeddingStore[Inputs]"
    key: bytes
    spec: EmbeddingSpec
    inputs: Inputs
    needs_bytes: bool
    placed: asyncio.Future[EmbeddingWrite]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    task: SharedTask[str] = field(init=False)

    async def place(self) -> EmbeddingWrite | None:
        """Returns the writing of the embedding, for which memory is reserved now unless it was
        before. The store releases it. Returns None if the embedding is in the arena by now.

        Raises:
            Overloaded: no memory was free for too long.
        """
        if not self.placed.done():
            self.placed.set_result(await self.store.reserve(self.key, self.spec))
        write = self.placed.result()
        return None if write.entry.committed else write


class Tier(ABC, Generic[Inputs]):
    """A place where embeddings are found or made, which is asked if the tiers before it have none.

    Attributes:
        name: name of the tier in metrics and results.
    """

    name: str

    def begin(self, lookup: Lookup[Inputs]) -> None:
        """Prepares for a lookup before the first tier is asked, and may refuse the lookup.

        Raises:
            TriptychError: the lookup is refused, before any work.
        """
        return

    @abstractmethod
    async def find(self, lookup: Lookup[Inputs]) -> bool:
        """Writes an embedding into the memory of `Lookup.place`, and commits it there.

        Returns whether the embedding is there. If not, the next tier is asked. When the call
        returns, raises or is cancelled, nothing may write to the memory any more, unless its writer
        has called `EmbeddingWrite.retain`.

        Raises:
            TriptychError: the lookup has failed, and no further tier is asked.
        """

    def put(self, write: EmbeddingWrite) -> None:
        """Gets a committed embedding that this tier did not have. A tier that stores it for later
        lookups acquires its entry until then. It does not wait and does not fail.
        """
        return

    def end(self, lookup: Lookup[Inputs], *, succeeded: bool) -> None:
        """Releases what `begin` took, also if a later tier has refused the lookup."""
        return

    async def close(self) -> None:
        """Closes the tier, after all lookups have ended."""
        return


@dataclass(frozen=True, slots=True)
class _EntryClaim(Claim[ArenaEntry]):
    """A claim of one embedding's entry: the complete entry if there is one, else a new entry."""

    arena: Arena
    key: bytes
    spec: EmbeddingSpec

    def attempt(self) -> ArenaEntry | None:
        if entry := self.arena.get(self.key):
            self.arena.acquire(entry)
            return entry
        return self.arena.try_reserve(self.key, self.spec)  # KeyError: a cancelled job writes there

    def undo(self, result: ArenaEntry) -> None:
        self.arena.release(result)


class EmbeddingStore(Generic[Inputs]):
    """The embeddings in the arena, and the lookups of further ones. One event loop uses it.

    Args:
        arena: memory for embeddings, which the store owns.
        tiers: places where an embedding is looked up that is not in the arena, in this order.
        hits: counter of embeddings obtained, by tier.
        misses: counter of embeddings not found, by tier.

    Attributes:
        arena: as above.
        digests: digests of the arena's embeddings.
        hits: as above.
        misses: as above.
    """

    def __init__(
        self, arena: Arena, tiers: Sequence[Tier[Inputs]], hits: Counter, misses: Counter
    ) -> None:
        self.arena = arena
        self.digests = Digests()
        self.hits = hits
        self.misses = misses
        self._tiers = tiers
        self._lookups: dict[bytes, Lookup[Inputs]] = {}

    @property
    def keys_in_lookup(self) -> list[bytes]:
        """Keys of the lookups that run."""
        return list(self._lookups)

    @property
    def num_unfinished(self) -> int:
        """Number of entries that are not complete, or whose digest is not known yet."""
        return sum(not (entry.committed and entry.digest) for entry in self.arena.entries)

    def num_waiters(self, key: bytes) -> int:
        """Returns how many callers wait for the lookup of a key."""
        lookup = self.running(key)
        return lookup.task.num_waiters if lookup else 0

    def running(self, key: bytes) -> Lookup[Inputs] | None:
        """Returns the lookup of a key that callers may join, or None if they have to start one."""
        lookup = self._lookups.get(key)
        has_ended = lookup is None or lookup.task.is_abandoned or lookup.task.task.done()
        return None if has_ended else lookup

    def start(
        self,
        key: bytes,
        spec: EmbeddingSpec,
        inputs: Inputs,
        *,
        needs_bytes: bool = True,
        entry: ArenaEntry | None = None,
    ) -> Lookup[Inputs]:
        """Starts a lookup. A lookup of the key that runs already is cancelled, and the new lookup
        asks no tier before the cancelled lookup has ended.

        Args:
            key: key of the embedding.
            spec: shape and dtype of the embedding.
            inputs: data that the tiers need besides the key.
            needs_bytes: see `Lookup.needs_bytes`.
            entry: uncommitted entry of the embedding, to which the caller has a reference. None if
                the lookup has to reserve memory.

        Raises:
            TriptychError: a tier refuses the lookup.
        """
        placed: asyncio.Future[EmbeddingWrite] = asyncio.get_running_loop().create_future()
        lookup = Lookup(self, key, spec, inputs, needs_bytes, placed)
        with ExitStack() as refused:
            for tier in self._tiers:
                tier.begin(lookup)
                refused.callback(tier.end, lookup, succeeded=False)
            refused.pop_all()
        if entry is not None:
            self.arena.acquire(entry)
            placed.set_result(EmbeddingWrite(self.arena, self.digests, entry))
        before = self._lookups.get(key)
        self._lookups[key] = lookup
        lookup.task = SharedTask(self._run(lookup, before.task if before else None))
        lookup.task.task.add_done_callback(lambda task: self._end(lookup, task))
        if before is not None:
            before.task.cancel()
        return lookup

    async def reserve(self, key: bytes, spec: EmbeddingSpec) -> EmbeddingWrite:
        """Reserves memory for an embedding, unless a complete entry appears meanwhile.

        Returns:
            The writing of the embedding, which the caller has to release. There is nothing to write
            if its entry is committed.

        Raises:
            Overloaded: no memory was free for too long.
        """
        try:
            async with asyncio.timeout(_RESERVE_TIMEOUT_S):
                entry = await self.arena.claim(_EntryClaim(self.arena, key, spec))
        except TimeoutError:
            raise Overloaded("no memory for the embedding", retry_after_s=1.0) from None
        return EmbeddingWrite(self.arena, self.digests, entry)

    async def close(self) -> None:
        """Cancels all lookups, and closes the tiers."""
        tasks = [lookup.task.task for lookup in self._lookups.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tier in self._tiers:
            await tier.close()

    async def unmap(self) -> None:
        """Waits for digests under way, and unmaps the memory."""
        await self.digests.close()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that has ended may still have its view for a moment.
                await asyncio.sleep(0.01)

    async def _run(self, lookup: Lookup[Inputs], before: SharedTask[str] | None) -> str:
        """Looks an embedding up, and returns the name of the tier that had it. The tiers before
        that tier get the embedding, if it was written.
        """
        if before is not None:
            await before.ended()
        if lookup.placed.done() and await lookup.place() is None:
            return MEMORY  # written by the lookup that was cancelled
        for number, tier in enumerate(self._tiers):
            if await tier.find(lookup):
                self.hits.labels(tier.name).inc()
                if lookup.placed.done():
                    for other in self._tiers[:number]:
                        other.put(lookup.placed.result())
                return tier.name
            self.misses.labels(tier.name).inc()
        raise EmbeddingUnavailable("no tier has the embedding")

    def _end(self, lookup: Lookup[Inputs], task: "asyncio.Task[str]") -> None:
        """Releases what a lookup holds."""
        succeeded = not task.cancelled() and task.exception() is None
        for tier in self._tiers:
            tier.end(lookup, succeeded=succeeded)
        if lookup.placed.done():
            lookup.placed.result().release()
        if self._lookups.get(lookup.key) is lookup:  # else a newer lookup has replaced it
            del self._lookups[lookup.key]
        del lookup.task  # its error's traceback refers to the lookup, which would be a cycle
