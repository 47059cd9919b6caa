"""POST /v1/media and DELETE /v1/media/{id}: files that later requests name by `media:` URLs."""

import asyncio

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.errors import InvalidRequest
from services.gateway.clients.uploads import Uploads
from services.gateway.endpoints.endpoint import received
from services.gateway.http.exchange import JsonResponse
from services.gateway.tenancy.admission import Admission

# No form of a page can declare one of these, so that a page of another origin has to ask first.
TYPES = ("image/", "video/", "application/octet-stream")


class UploadRoutes:
    """The views of one gateway.

    Args:
        uploads: where files go.
        admission: of requests.
        max_bytes: of one file; the call to an encoder carries it whole.
    """

    def __init__(self, uploads: Uploads, admission: Admission, max_bytes: int) -> None:
        self._uploads = uploads
        self._admission = admission
        self._max_bytes = max_bytes

    def table(self) -> list[Route]:
        """Every route."""
        return [
            Route("/v1/media", self.upload, methods=["POST"]),
            Route("/v1/media/{id}", self.delete, methods=["DELETE"]),
        ]

    async def upload(self, request: Request) -> Response:
        """The body is the file: an image, a video, or a tensor of `image_embeds`."""
        async with received(self._admission, request, TYPES) as (slot, body):
            data = bytes(body)
            if not 0 < len(data) <= self._max_bytes:
                raise InvalidRequest(f"an upload has 1 to {self._max_bytes} bytes")
            digest = await asyncio.to_thread(lambda: blake3(data).digest())
            found = await self._uploads.put(slot.tenant.name, data, digest)
        answer = {
            "id": found.handle,
            "object": "media",
            "bytes": len(data),
            "kept_seconds": found.kept_s,
        }
        return JsonResponse(answer)

    async def delete(self, request: Request) -> Response:
        """Forgets a file."""
        handle: str = request.path_params["id"]
        async with received(self._admission, request) as (slot, _):
            await self._uploads.delete(slot.tenant.name, handle)
        return JsonResponse({"id": handle, "object": "media", "deleted": True})
