"""The embeddings of all pods: what Redis has, and who makes what it has not."""

import asyncio
import itertools
import os
from dataclasses import dataclass, field

from services.common.embedding import EmbeddingSpec
from services.common.embedding_cache import RedisCache
from services.encoder.encoded import Encoded, Origin
from services.encoder.memory_tier import MemoryTier

# A pod that claimed a key and says nothing for this long is not waited for.
_PEER_TIMEOUT_S = 3.0
_LOCK_TTL_S = 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.05


@dataclass(frozen=True, slots=True)
class Wish:
    """What is looked for.

    Attributes:
        into_memory: Redis alone is not enough: somebody asks for the bytes.
    """

    key: bytes
    spec: EmbeddingSpec
    into_memory: bool


@dataclass(slots=True)
class SharedTier:
    """Looks in Redis, and claims there what is to be made.

    Args:
        cache: shared by all pods.
        memory: this pod's own.
    """

    cache: RedisCache
    memory: MemoryTier
    _owner: str = field(default_factory=lambda: os.urandom(8).hex())
    _claims: "itertools.count[int]" = field(default_factory=itertools.count)

    async def find(self, wish: Wish) -> Encoded | bytes:
        """The embedding, from Redis or another pod's work; or our claim on making it, perhaps
        empty, which `give_up` or the writer gives back.
        """
        if found := await self._read(wish, Origin.REDIS):
            return found
        if claim := await self._claim(wish.key):
            return claim
        return await self._from_peer(wish) or b""

    async def give_up(self, key: bytes, claim: bytes) -> None:
        """The claim's work has failed."""
        if claim:
            await self.cache.unlock(key, claim)

    async def _read(self, wish: Wish, origin: Origin) -> Encoded | None:
        """The entry in Redis, if it is there; its bytes too, if they are wanted."""
        header = await self.cache.header(wish.key)
        if header is None:
            return None
        spec, digest = header
        if spec != wish.spec:
            await self.cache.delete(wish.key)
            return None
        if not wish.into_memory:
            return Encoded(origin)
        entry = await self.memory.reserve(wish.key, spec)
        if entry.committed:
            return Encoded(Origin.MEMORY, entry)
        try:
            view = self.memory.arena.view(entry)
            if not await self.cache.read(wish.key, spec, digest, view):
                return None
            entry.digest = digest
            self.memory.commit(entry)
            return Encoded(origin, entry)
        finally:
            self.memory.release(entry)

    async def _claim(self, key: bytes) -> bytes:
        """Our claim on making the key, or nothing while another pod holds one."""
        owner = f"{self._owner}:{next(self._claims)}".encode()
        try:
            return owner if await self.cache.try_lock(key, owner, _LOCK_TTL_S) else b""
        except asyncio.CancelledError:
            await self.cache.unlock(key, owner)  # it may have been granted
            raise

    async def _from_peer(self, wish: Wish) -> Encoded | None:
        """Waits for the pod that claimed the key; None: it is not worth waiting any longer."""
        pause_s = _FIRST_POLL_S
        deadline = asyncio.get_running_loop().time() + _PEER_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
            if claim := await self._claim(wish.key):
                # The other pod stored its result before it gave the claim back, or has failed.
                await self.cache.unlock(wish.key, claim)
                return await self._read(wish, Origin.JOINED)
        return None
