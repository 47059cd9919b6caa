"""The adapters of a decoder by name, and the sequences that use them.

An adapter that is unloaded is refused to new sequences at once. Its slot becomes free when the last
sequence with the adapter has ended, so that running answers are not changed.
"""

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from services.common.adapter_config import (
    ADAPTER_NAME,
    AdapterConfig,
    adapts_tower,
    already_loaded,
    named_digest,
)
from services.common.errors import InvalidRequest, ModelNotFound, TriptychError, Unavailable
from services.common.model_spec import ModelSpecError
from services.common.pb import decoder_pb2 as pb
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import AdapterLoaded, EngineMessage, LoadAdapter


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter of the engine.

    Attributes:
        name: name by which requests call the adapter.
        digest: digest of the name and of the adapter's files. It is part of the prefix cache's
            hashes.
        root: directory of the adapter, or its name on the hub.
        slot: the adapter's slot in the engine.
        num_sequences: number of sequences that have not ended.
        num_waiting: number of these sequences that have no token yet.
        is_leaving: True if the adapter was unloaded.
        adapts_tower: True if the adapter changes the vision tower.
    """

    name: str
    digest: bytes
    root: str
    slot: int
    num_sequences: int = 0
    num_waiting: int = 0
    is_leaving: bool = False
    adapts_tower: bool = False


class AdapterTable:
    """Owner of the engine's slots for adapters.

    Args:
        given: directories of the adapters in the slots 0, 1, … by name.
        slots: number of slots.
        channel: connection to the engine.

    Raises:
        ModelSpecError: the files of an adapter cannot be read.
    """

    def __init__(
        self, given: Mapping[str, Path], slots: int, channel: FrontChannel[EngineMessage]
    ) -> None:
        self._channel = channel
        self._by_digest: dict[bytes, LoadedAdapter] = {}
        self._free = list(range(len(given), slots))
        self._waiting: deque[asyncio.Future[str]] = deque()
        self._changes = asyncio.Lock()
        for slot, (name, directory) in enumerate(given.items()):
            digest, root = named_digest(name, directory), str(directory)
            found = LoadedAdapter(name, digest, root, slot, adapts_tower=adapts_tower(directory))
            self._by_digest[found.digest] = found

    @property
    def is_loading(self) -> bool:
        """Returns whether the engine has messages about slots that it has not answered."""
        return bool(self._waiting)

    def described(self) -> list[pb.Adapter]:
        """Returns the adapters that new sequences may have."""
        return [
            pb.Adapter(
                name=each.name,
                digest=each.digest,
                root=each.root,
                num_waiting=each.num_waiting,
                adapts_tower=each.adapts_tower,
            )
            for each in self._by_digest.values()
            if not each.is_leaving
        ]

    def take(self, digest: bytes) -> LoadedAdapter | None:
        """Returns the adapter of a new sequence, which uses it until `release`. None for the base
        model.

        Raises:
            Unavailable: the adapter is not loaded here. Another decoder may have it.
        """
        if not digest:
            return None
        found = self._by_digest.get(digest)
        if found is None or found.is_leaving:
            raise Unavailable("the adapter is not loaded on this decoder")
        found.num_sequences += 1
        found.num_waiting += 1
        return found

    def started(self, adapter: LoadedAdapter | None) -> None:
        """Notes that a sequence has its first token."""
        if adapter is not None:
            adapter.num_waiting -= 1

    def release(self, adapter: LoadedAdapter | None, *, had_started: bool = False) -> None:
        """Notes that a sequence has ended.

        Args:
            adapter: adapter of the sequence. None for the base model.
            had_started: True if `started` was called for the sequence.
        """
        if adapter is not None:
            adapter.num_sequences -= 1
            adapter.num_waiting -= not had_started
            self._free_slot_of(adapter)

    async def load(self, name: str, directory: str, *, load_inplace: bool = False) -> None:
        """Loads an adapter, and returns when sequences may have it.

        Args:
            name: name by which requests call the adapter.
            directory: absolute directory of the adapter.
            load_inplace: True if the adapter takes the place of a loaded one of the same name.
                Sequences of the former adapter run to their ends. If no slot is free and the former
                adapter has no sequence, it is unloaded first, and lost if the new one is refused.

        Raises:
            InvalidRequest: the adapter cannot be served, or its name is in use.
            ModelNotFound: there is no such directory.
        """
        async with self._changes:
            if not ADAPTER_NAME.fullmatch(name):
                raise InvalidRequest(f"the name {name[:100]!r} is not {ADAPTER_NAME.pattern}")
            if not Path(directory).is_absolute():
                raise InvalidRequest("the path of an adapter is an absolute directory of decoders")
            if not await asyncio.to_thread(os.path.isdir, directory):
                raise ModelNotFound(f"there is no directory {directory[:200]}", param="lora_path")
            try:
                AdapterConfig.read(directory)
                digest = await asyncio.to_thread(named_digest, name, Path(directory))
            except ModelSpecError as error:
                raise InvalidRequest(str(error)) from None
            if adapts_tower(directory):
                raise InvalidRequest(
                    "the adapter changes the vision tower, so that encoders need it, too: start "
                    "them and the decoders with it (--adapter, ENCODER_ADAPTERS, DECODER_ADAPTERS)"
                )
            loaded = [a for a in self._by_digest.values() if a.name == name and not a.is_leaving]
            former = loaded[0] if loaded else None
            if former is not None and former.digest == digest:
                return  # a repeated call, for instance by another gateway
            if former is not None and not load_inplace:
                raise InvalidRequest(already_loaded(name), param="lora_name")
            if digest in self._by_digest:
                self._by_digest[digest].is_leaving = False
                self._leave(former)
                return
            if not self._free and former is not None and not former.num_sequences:
                self._leave(former)
                former = None
            if not self._free:
                raise InvalidRequest(
                    f"all slots for adapters are in use ({len(self._by_digest)}): unload one, or "
                    "start decoders with more (--max-adapters, DECODER_MAX_ADAPTERS)"
                )
            slot = self._free.pop()
            try:
                error = await self._ask(LoadAdapter(slot, directory))
            except asyncio.CancelledError:  # The caller has given up, and gets no adapter.
                self._empty(slot)
                raise
            if error:
                self._free.append(slot)
                raise InvalidRequest(error)
            self._by_digest[digest] = LoadedAdapter(name, digest, directory, slot)
            self._leave(former)

    async def unload(self, name: str) -> None:
        """Unloads an adapter. Sequences that have it run to their ends.

        Raises:
            ModelNotFound: no adapter with this name is loaded.
        """
        found = [a for a in self._by_digest.values() if a.name == name and not a.is_leaving]
        if not found:
            raise ModelNotFound(f"the adapter {name[:100]!r} is not loaded", param="lora_name")
        self._leave(found[0])

    def answered(self, message: AdapterLoaded) -> None:
        """Takes the engine's answer to the oldest message about a slot."""
        waiting = self._waiting.popleft()
        if not waiting.done():
            waiting.set_result(message.error)

    def close(self, error: TriptychError) -> None:
        """Fails the calls that wait for the engine, which has ended."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    def _ask(self, message: LoadAdapter) -> asyncio.Future[str]:
        """Sends a message to the engine, and returns its answer, which is empty without error."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._channel.send(message)
        return waiting

    def _leave(self, adapter: LoadedAdapter | None) -> None:
        """Refuses an adapter to new sequences, if there is one."""
        if adapter is not None and not adapter.is_leaving:
            adapter.is_leaving = True
            self._free_slot_of(adapter)

    def _free_slot_of(self, adapter: LoadedAdapter) -> None:
        """Empties the slot of an adapter that was unloaded and that no sequence uses."""
        if adapter.is_leaving and not adapter.num_sequences:
            del self._by_digest[adapter.digest]
            self._empty(adapter.slot)

    def _empty(self, slot: int) -> None:
        emptied = self._ask(LoadAdapter(slot, ""))
        # Nobody waits for the answer. Without this, asyncio would log an error that `close` sets.
        emptied.add_done_callback(lambda answer: answer.exception())
        # The engine empties the slot before it handles any later message.
        self._free.append(slot)


def salted(cache_salt: bytes, adapter: LoadedAdapter | None) -> bytes:
    """Returns the salt of a sequence's prefix cache: no two adapters share keys and values."""
    if adapter is None:
        return cache_salt
    return b"adapter" + blake3(adapter.digest + cache_salt).digest()
