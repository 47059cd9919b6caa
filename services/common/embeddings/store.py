"""The embeddings that a pod has or can obtain. The encoder and the decoder have a store each.

An embedding is looked up in the arena, which is the store's own memory, and then in the store's
*tiers*, one after the other: Redis and the vision tower in the encoder, Redis and the encoders in
the decoder. To add a tier, write a subclass of `Tier`, and put it into the list that the service's
`__main__` gives to the store. If several callers want the same embedding at the same time, they
share one lookup. A lookup that fails leaves nothing in the arena. One that is cancelled while a
tier computes the embedding may still leave the embedding there.

An *entry* is the memory of one embedding in the arena. It is *committed* when the embedding is
complete. Readers and writers of an entry have a reference to it. An entry without references may be
evicted, to make room for another embedding.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import Counter

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_write import Digests, EmbeddingWrite
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import EmbeddingUnavailable, Overloaded

MEMORY = "memory"  # name of the arena in metrics, beside the names of the tiers
# Longest time to wait until memory of the arena is free. Readers release their entries soon, but
# writing the entry of a large image takes seconds.
_RESERVE_TIMEOUT_S = 60.0
_CLOSE_ATTEMPTS = 50
Inputs = TypeVar("Inputs")


@dataclass(slots=True, eq=False)
class Lookup(Generic[Inputs]):
    """A running lookup of one embedding in the tiers. All callers that want the embedding share it.

    Attributes:
        store: the store that runs the lookup.
        key: key of the embedding.
        spec: shape and dtype of the embedding.
        inputs: data that a tier needs besides the key: in the encoder the image and its tenant, in
            the decoder the address of an encoder.
        needs_bytes: True if the embedding has to be written into the arena. False if an embedding
            in Redis is enough, because other pods can read it there.
        placed: future whose result is the `EmbeddingWrite` through which a tier writes the
            embedding into its entry. The future is done when the entry has been reserved.
        seconds: duration of each stage of the lookup, by the stage's name.
        task: the task that asks the tiers. It is cancelled when nobody waits for it any more. Its
            result is the name of the tier that had the embedding. The attribute is deleted when the
            lookup ends.
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
        """Reserves the embedding's entry, unless that was done before. Returns None if the entry is
        committed already, so that there is nothing to write.

        Returns:
            The `EmbeddingWrite`, which the store releases when the lookup ends.

        Raises:
            Overloaded: no memory was free for too long.
        """
        if not self.placed.done():
            self.placed.set_result(await self.store.reserve(self.key, self.spec))
        write = self.placed.result()
        return None if write.entry.committed else write


class Tier(ABC, Generic[Inputs]):
    """A source of embeddings, which is asked if the arena and the tiers before it have none.

    For each lookup, the store calls `begin` of all tiers, then `find` of one tier after the other
    until a tier has the embedding, and at last `end` of all tiers.

    Attributes:
        name: name of the tier in metrics and results.
    """

    name: str

    def begin(self, lookup: Lookup[Inputs]) -> None:
        """Prepares for a lookup, before the first tier is asked.

        Raises:
            TriptychError: the tier refuses the lookup, for example because it has too much work.
        """
        return

    @abstractmethod
    async def find(self, lookup: Lookup[Inputs]) -> bool:
        """Looks for an embedding. If the bytes of a found embedding are needed, the tier writes
        them with the `EmbeddingWrite` of `Lookup.place`, and commits the entry. When the call
        has ended, nothing may write to the entry any more, unless the writer has called
        `EmbeddingWrite.retain`.

        Returns:
            True if the embedding was found. If False, the next tier is asked.

        Raises:
            TriptychError: the lookup fails, and no further tier is asked.
        """

    def put(self, write: EmbeddingWrite) -> None:
        """Offers an embedding that a later tier has found, so that this tier can store it for later
        lookups. The call must not wait and must not fail. If the tier copies the bytes later, it
        has to call `retain` of the write, and to release that reference after the copy.
        """
        return

    def end(self, lookup: Lookup[Inputs], *, succeeded: bool) -> None:
        """Ends what `begin` has begun. Called after each lookup, and also if another tier has
        refused the lookup.
        """
        return

    def join(self, lookup: Lookup[Inputs], inputs: Inputs) -> None:
        """Takes note of a further caller that waits for a running lookup. The call must not fail.

        Args:
            lookup: the running lookup, which another caller has started.
            inputs: inputs of the further caller. They may differ from those of the lookup, for
                example by the caller's priority.
        """
        return

    async def close(self) -> None:
        """Closes the tier, after all lookups have ended."""
        return


@dataclass(frozen=True, slots=True)
class _EntryClaim(Claim[ArenaEntry]):
    """A claim on the entry of one key: a committed entry if there is one, or else a new entry. The
    arena serves claims in order, when memory becomes free.
    """

    arena: Arena
    key: bytes
    spec: EmbeddingSpec

    def attempt(self) -> ArenaEntry | None:
        if entry := self.arena.get(self.key):
            self.arena.acquire(entry)
            return entry
        # A writer of a cancelled lookup may still be writing to an entry of this key. `try_reserve`
        # then raises a KeyError, and the arena calls `attempt` again when that entry is complete
        # or freed.
        return self.arena.try_reserve(self.key, self.spec)

    def undo(self, result: ArenaEntry) -> None:
        self.arena.release(result)


class EmbeddingStore(Generic[Inputs]):
    """The embeddings in the arena, and the running lookups of embeddings that are not in it. One
    event loop uses the store.

    Args:
        arena: memory for embeddings, which the store owns.
        tiers: tiers that are asked for embeddings that are not in the arena, in this order.
        hits: counter of embeddings that a tier had, by tier.
        misses: counter of embeddings that a tier did not have, by tier.

    Attributes:
        arena: memory for embeddings.
        digests: digests of the arena's embeddings.
        hits: counter of embeddings that a tier had, by tier.
        misses: counter of embeddings that a tier did not have, by tier.
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

    def running(self, key: bytes) -> Lookup[Inputs] | None:
        """Returns the running lookup of a key, which callers may join. None if there is none."""
        lookup = self._lookups.get(key)
        has_ended = lookup is None or lookup.task.is_abandoned or lookup.task.task.done()
        return None if has_ended else lookup

    def join(self, lookup: Lookup[Inputs], inputs: Inputs) -> "asyncio.Future[str]":
        """Returns a future of a running lookup's result for a further caller.

        Args:
            lookup: the lookup, which `running` has returned.
            inputs: data that the tiers would need if the caller had started the lookup.
        """
        for tier in self._tiers:
            tier.join(lookup, inputs)
        return lookup.task.join()

    def start(
        self,
        key: bytes,
        spec: EmbeddingSpec,
        inputs: Inputs,
        *,
        needs_bytes: bool = True,
        entry: ArenaEntry | None = None,
    ) -> Lookup[Inputs]:
        """Starts a lookup. If another lookup of the key is running, that lookup is cancelled, and
        the new lookup asks no tier before the cancelled lookup has ended.

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
        for number, tier in enumerate(self._tiers):
            try:
                tier.begin(lookup)
            except BaseException:
                for begun in self._tiers[:number]:
                    begun.end(lookup, succeeded=False)
                raise
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
        """Waits for memory, and reserves the entry of an embedding. If a committed entry appears
        while the call waits, nothing is reserved.

        Returns:
            The `EmbeddingWrite`, which the caller has to release. If its entry is committed, there
            is nothing to write.

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
        """Waits until running computations of digests have ended, and unmaps the arena."""
        await self.digests.close()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that has ended may hold its view of the memory for a moment longer.
                await asyncio.sleep(0.01)

    async def _run(self, lookup: Lookup[Inputs], before: SharedTask[str] | None) -> str:
        """Asks the tiers, and returns the name of the tier that had the embedding. If that tier has
        written it to the arena, the tiers that did not have it may store it, too.
        """
        if before is not None:
            await before.ended()
        if lookup.placed.done() and await lookup.place() is None:
            return MEMORY  # The lookup that was cancelled had written the embedding before.
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
        """Ends a lookup in all tiers, and releases its memory."""
        succeeded = not task.cancelled() and task.exception() is None
        for tier in self._tiers:
            tier.end(lookup, succeeded=succeeded)
        if lookup.placed.done():
            lookup.placed.result().release()
        if self._lookups.get(lookup.key) is lookup:  # If not, a newer lookup has replaced it.
            del self._lookups[lookup.key]
        # An error of the task refers to the lookup through its traceback, so keeping the task here
        # would be a reference cycle.
        del lookup.task
