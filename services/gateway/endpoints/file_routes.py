"""/v1/files: the files of batches. Images and videos are uploaded to /v1/media."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.common.errors import Forbidden, InvalidRequest
from services.gateway.batches.batch_files import (
    LIFETIME_S,
    BatchFiles,
    FileRecord,
    check_purpose,
)
from services.gateway.batches.batch_store import BatchStore
from services.gateway.forms.batches import DeletedFile, FileList, FileObject
from services.gateway.forms.json_body import Body
from services.gateway.http.exchange import JsonResponse
from services.gateway.http.multipart import Form, FormFile, parse_form
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import bound_tenant

_MAX_FILENAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
Item = TypeVar("Item")


class FileRoutes:
    """The handlers of files.

    Args:
        batches: batches of all tenants. None if batches are switched off.
    """

    def __init__(self, batches: BatchStore | None) -> None:
        self._batches = batches

    @property
    def _files(self) -> BatchFiles:
        return needed(self._batches).files

    async def upload(self, _: ChatService, request: Request, slot: Slot, body: Body) -> Response:
        """Stores the file of a form."""
        files = self._files
        _check_origin(request)
        content_type = request.headers.get("content-type", "")
        form = await asyncio.to_thread(parse_form, content_type, body)
        check_purpose(form.texts.get("purpose"))
        if (file := form.files.get("file")) is None:
            raise InvalidRequest("a file is needed", param="file")
        known = {"purpose", _ANCHOR, _SECONDS}
        if unknown := (form.texts.keys() | form.files.keys()) - known - {"file"}:
            raise InvalidRequest("unknown field", param=min(unknown)[:100])
        record = await self._store(files, slot.tenant.name, file, _lifetime_s(form))
        return JsonResponse(_object(record))

    async def files(self, request: Request) -> Response:
        """Returns a page of the tenant's files."""
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order")
        if order not in (None, "asc", "desc"):
            raise InvalidRequest("order is 'asc' or 'desc'", param="order")
        found = await self._files.all(bound_tenant().name)
        found = [record for record in found if purpose in (None, record.purpose)]
        if order != "asc":
            found.reverse()
        shown, has_more = page(request, found, [record.id for record in found], 10_000, 10_000)
        data = [_object(record) for record in shown]
        return JsonResponse(
            FileList(data, data[0].id if data else None, data[-1].id if data else None, has_more)
        )

    async def file(self, request: Request) -> Response:
        """Returns a file's description."""
        return JsonResponse(_object(await self._record(request)))

    async def content(self, request: Request) -> Response:
        """Returns a file's content."""
        record = await self._record(request)
        pieces = self._files.read(bound_tenant().name, record)
        headers = {"content-length": str(record.num_bytes)}
        return StreamingResponse(_whole(pieces, record), 200, headers, "application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Deletes a file that no batch needs."""
        record, tenant = await self._record(request), bound_tenant().name
        if (batch := await needed(self._batches).uses(tenant, record.id)) is not None:
            raise InvalidRequest(f"{batch} reads the file: wait for it, or cancel it", param="id")
        await self._files.delete(tenant, record.id)
        return JsonResponse(DeletedFile(record.id))

    async def _record(self, request: Request) -> FileRecord:
        return await self._files.get(bound_tenant().name, request.path_params["name"])

    async def _store(
        self, files: BatchFiles, tenant: str, file: FormFile, lifetime_s: int
    ) -> FileRecord:
        filename = file.filename[:_MAX_FILENAME] or "file.jsonl"
        if not file.data.strip():
            raise InvalidRequest("the file is empty", param="file")
        return await files.put(tenant, filename, file.data, lifetime_s)


def needed(batches: BatchStore | None) -> BatchStore:
    """Returns the batches.

    Raises:
        InvalidRequest: batches are switched off.
    """
    if batches is None:
        raise InvalidRequest("batches are switched off here: GATEWAY_BATCH_BYTES is 0")
    return batches


def page(
    request: Request, items: Sequence[Item], ids: Sequence[str], limit: int, most: int
) -> tuple[Sequence[Item], bool]:
    """Returns the page of a list that a request asks for by `after` and `limit`, and whether there
    is more behind it.

    Args:
        items: the whole list.
        ids: id of each item.
        limit: number of items of a page, if the request does not say.
        most: most items of a page.
    """
    query = request.query_params
    given, after = query.get("limit"), query.get("after")
    if given is not None:
        if not (given.isascii() and given.isdigit() and 1 <= int(given[:6]) <= most):
            raise InvalidRequest(f"limit is a number from 1 to {most}", param="limit")
        limit = int(given[:6])
    start = 0
    if after is not None:
        if after not in ids:
            raise InvalidRequest("after is the id of an item of the list", param="after")
        start = ids.index(after) + 1
    return items[start : start + limit], start + limit < len(items)


async def _whole(pieces: AsyncGenerator[bytes], record: FileRecord) -> AsyncGenerator[bytes]:
    """Yields the pieces of a file. If a piece is missing, the answer breaks off, and the client
    does not take it for the whole file.
    """
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        yield piece
    if num_bytes != record.num_bytes:
        raise RuntimeError(f"file {record.id} has {num_bytes} bytes of {record.num_bytes}")


def _check_origin(request: Request) -> None:
    """Refuses a form of another origin's page that has no key. Browsers send forms without asking
    first (CORS), other than the bodies of all other requests.

    Raises:
        Forbidden: the request is such a form.
    """
    headers = request.headers
    origin, has_key = (
        headers.get("origin", ""),
        "authorization" in headers or "x-api-key" in headers,
    )
    if origin and not has_key and origin.partition("://")[2] != headers.get("host", ""):
        raise Forbidden("pages of another origin need an Authorization header for uploads")


def _object(record: FileRecord) -> FileObject:
    return FileObject(
        record.id, record.num_bytes, record.created_at, record.filename, record.purpose,
        record.expires_at,
    )  # fmt: skip


def _lifetime_s(form: Form) -> int:
    anchor, seconds = form.texts.get(_ANCHOR), form.texts.get(_SECONDS)
    if anchor is None and seconds is None:
        return LIFETIME_S
    if anchor != "created_at":
        raise InvalidRequest("the anchor is 'created_at'", param=_ANCHOR)
    text = seconds or ""
    if not (text.isascii() and text.isdigit() and 3600 <= int(text[:9]) <= LIFETIME_S):
        raise InvalidRequest(f"a number from 3600 to {LIFETIME_S}", param=_SECONDS)
    return int(text)
