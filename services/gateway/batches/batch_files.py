"""The files of batches: what tenants upload, and the results of their batches.

An uploaded file lies in pieces, and the results of a batch lie in a hash with a field for each
line. A file of results is read from that hash, in the order of the lines. The bytes of each tenant
are bounded, those of all tenants, too.
"""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
from msgspec import Struct

from services.common.errors import InvalidRequest, NotFound, PayloadTooLarge, TriptychError
from services.gateway.batches.state import Check, State, Write

# Seconds for which a file is stored, unless its upload says otherwise; as with OpenAI.
LIFETIME_S = 30 * 24 * 3600
# Most bytes of the files and results of a tenant, of all tenants after an upload, and of all
# tenants, as multiples of the bytes that a tenant may upload. Uploads leave bytes to results, and
# others can upload while one tenant has all its bytes.
_OWN_PARTS, _UPLOAD_PARTS, _ALL_PARTS = 2, 3, 4
_PIECE_BYTES = 1 << 20
_UPLOAD_S = 3600  # An upload that has not ended after this time is removed.
OVERHEAD_BYTES = 4096  # counted for each file in addition to its content
_READ_LINES = 64
_ALL = "@"  # field with the bytes of all tenants
_BYTES = "bytes"  # hash with the bytes of each tenant
ENDS = "ends"  # sorted set of what expires, by Unix time


class FileRecord(Struct, omit_defaults=True):
    """A stored file.

    Attributes:
        id: name of the file.
        num_bytes: size of its content.
        created_at: Unix time of its upload, in seconds.
        expires_at: Unix time at which it is removed.
        filename: name that the client has given, or that of the results.
        purpose: `batch` for an upload, `batch_output` for results.
        num_pieces: number of pieces in which an upload lies.
        results: key of the hash in which results lie. Empty for an upload.
        num_lines: number of lines of the batch whose results the file has.
        is_complete: false while the file is uploaded.
    """

    id: str
    num_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    num_pieces: int = 0
    results: str = ""
    num_lines: int = 0
    is_complete: bool = True


_decoder = msgspec.json.Decoder(FileRecord)


def new_id(prefix: str) -> str:
    """Returns a new name. Names sort by the time of their making."""
    return f"{prefix}{round(time.time() * 1e3):011x}{os.urandom(10).hex()}"


def file_writes(tenant: str, record: FileRecord) -> list[Write]:
    """Returns the writes that store the record of a file."""
    name = f"{tenant}/{record.id}"
    return [
        ("set", f"file:{name}", msgspec.json.encode(record)),
        ("zadd", f"files:{tenant}", record.created_at, record.id),
        ("zadd", ENDS, record.expires_at, f"file:{name}"),
    ]


def bytes_writes(tenant: str, num_bytes: int) -> list[Write]:
    """Returns the writes that count bytes of a tenant."""
    return [("hincrby", _BYTES, f"/{tenant}", num_bytes), ("hincrby", _BYTES, _ALL, num_bytes)]


class BatchFiles:
    """The files of all tenants.

    Args:
        state: state of the batches.
        max_tenant_bytes: most bytes of the files that one tenant has uploaded. The results of its
            batches may take as many again.
    """

    def __init__(self, state: State, max_tenant_bytes: int) -> None:
        self._state = state
        self.max_tenant_bytes = max_tenant_bytes

    async def put(self, tenant: str, filename: str, data: bytes, lifetime_s: int) -> FileRecord:
        """Stores an uploaded file.

        Raises:
            PayloadTooLarge: the tenant's files would take too many bytes.
            Unavailable: the state cannot be reached, or it is full.
        """
        now = int(time.time())
        pieces = range(0, len(data), _PIECE_BYTES)
        record = FileRecord(
            new_id("file-"), len(data), now, now + _UPLOAD_S, filename, "batch", len(pieces)
        )
        record.is_complete = False
        await self._reserve(tenant, record)
        try:
            for number, first in enumerate(pieces):
                piece = data[first : first + _PIECE_BYTES]
                key = f"piece:{tenant}/{record.id}/{number}"
                await self._state.transact((), [("set", key, piece)])
            record.is_complete, record.expires_at = True, now + lifetime_s
            await self._state.transact((), file_writes(tenant, record))
        except BaseException:
            with suppress(TriptychError):
                await self._remove(tenant, record)
            raise
        return record

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Returns a tenant's file.

        Raises:
            NotFound: the tenant has no such file.
        """
        record = await self.input(tenant, file_id)
        if record.expires_at <= time.time():
            raise NotFound(f"No such File object: {file_id[:100]}", param="id")
        return record

    async def input(self, tenant: str, file_id: str) -> FileRecord:
        """Returns the file that an open batch reads. The file may have expired: it is removed only
        after the batch has ended.

        Raises:
            NotFound: the tenant has no such file.
        """
        data = await self._state.get(f"file:{tenant}/{file_id}")
        record = None if data is None else _decoder.decode(data)
        if record is None or not record.is_complete:
            raise NotFound(f"No such File object: {file_id[:100]}", param="id")
        return record

    async def all(self, tenant: str) -> list[FileRecord]:
        """Returns the files of a tenant, the oldest first."""
        found: list[FileRecord] = []
        for file_id in await self._state.members(f"files:{tenant}"):
            with suppress(NotFound):
                found.append(await self.get(tenant, file_id))
        return found

    async def delete(self, tenant: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            NotFound: the tenant has no such file.
        """
        await self._remove(tenant, await self.get(tenant, file_id))

    async def expire(self, tenant: str, file_id: str) -> None:
        """Removes a file whose time is over, or whose upload has not ended."""
        if data := await self._state.get(f"file:{tenant}/{file_id}"):
            await self._remove(tenant, _decoder.decode(data))

    async def read(self, tenant: str, record: FileRecord) -> AsyncGenerator[bytes]:
        """Yields the content of a file, in pieces of any size.

        Raises:
            NotFound: the file was removed meanwhile.
        """
        for number in range(record.num_pieces):
            piece = await self._state.get(f"piece:{tenant}/{record.id}/{number}")
            if piece is None:
                raise NotFound(f"the file {record.id} was removed")
            yield piece
        if not record.results:
            return
        for first in range(0, record.num_lines, _READ_LINES):
            numbers = range(first, min(first + _READ_LINES, record.num_lines))
            found = await self._state.values(record.results, [str(number) for number in numbers])
            if lines := b"".join([line for line in found if line is not None]):
                yield lines

    async def room_for_results(self, tenant: str) -> tuple[int, int]:
        """Returns how many more bytes results of a tenant's batches may take: within the bound of
        the tenant, and within that of all tenants. They are negative beyond the bounds.
        """
        own, every = await self._state.values(_BYTES, [f"/{tenant}", _ALL])
        most = self.max_tenant_bytes
        return _OWN_PARTS * most - int(own or 0), _ALL_PARTS * most - int(every or 0)

    async def _reserve(self, tenant: str, record: FileRecord) -> None:
        """Counts the bytes of a file before they are stored."""
        size = record.num_bytes + OVERHEAD_BYTES
        while True:
            before, in_all = await self._state.values(_BYTES, [f"/{tenant}", _ALL])
            own, every = int(before or 0), int(in_all or 0)
            if own + size > self.max_tenant_bytes:
                raise PayloadTooLarge(
                    f"the files of batches would take {own + size} bytes, and may take "
                    f"{self.max_tenant_bytes} (GATEWAY_BATCH_BYTES): delete files first",
                    param="file",
                )
            if every + size > _UPLOAD_PARTS * self.max_tenant_bytes:
                raise PayloadTooLarge(
                    "the files of all tenants' batches take all memory that there is for them",
                    param="file",
                )
            writes = [*bytes_writes(tenant, size), *file_writes(tenant, record)]
            if await self._state.transact([Check(_BYTES, before, f"/{tenant}")], writes):
                return

    async def _remove(self, tenant: str, record: FileRecord) -> None:
        name = f"{tenant}/{record.id}"
        data = await self._state.get(f"file:{name}")
        if data is None:
            return
        size = record.num_bytes + (0 if record.results else OVERHEAD_BYTES)
        writes: list[Write] = [
            ("del", f"file:{name}"),
            ("zrem", f"files:{tenant}", record.id),
            ("zrem", ENDS, f"file:{name}"),
            *bytes_writes(tenant, -size),
        ]
        if record.results:
            writes.append(("del", record.results))
        # The pieces are removed first: what remains after a failure is removed when it expires.
        for number in range(record.num_pieces):
            await self._state.transact((), [("del", f"piece:{name}/{number}")])
        await self._state.transact([Check(f"file:{name}", data)], writes)


def check_purpose(purpose: str | None) -> None:
    """Refuses a purpose that is not served.

    Raises:
        InvalidRequest: the purpose is not `batch`.
    """
    if purpose != "batch":
        raise InvalidRequest(
            "a file's purpose is 'batch'; images and videos are uploaded to /v1/media",
            param="purpose",
        )
