"""POST /v1/media and DELETE /v1/media/{name}: files that later requests name by `media:` URLs."""

import asyncio
from dataclasses import replace

from blake3 import blake3
from msgspec import Struct
from starlette.requests import Request

from services.common.errors import InvalidRequest
from services.gateway.clients.uploads import Uploads
from services.gateway.forms.json_body import Body, Parser
from services.gateway.http.exchange import JsonResponse
from services.gateway.media.kinds import IMAGE, VIDEO
from services.gateway.media.media_loader import decode_data_url
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot

# An HTML form cannot send bodies of these types, so a web page of another origin has to ask with a
# CORS preflight before it can upload a file.
TYPES = ("application/json", "image/", "video/", "application/octet-stream")
_MAX_BYTES = 60 << 20  # A call to an encoder carries the whole file.
_IMAGE = replace(IMAGE, setting="")  # GATEWAY_MAX_IMAGE_BYTES does not limit uploads.


class UploadRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/media in JSON: the file as a `data:` URL."""

    url: str


class UploadAnswer(Struct):
    """The name and size of an uploaded file, and its lifetime after each use in seconds."""

    id: str
    bytes: int
    kept_seconds: int
    object: str = "media"


class DeletedUpload(Struct):
    """The answer of DELETE /v1/media/{name}."""

    id: str
    object: str = "media"
    deleted: bool = True


_parse = Parser(UploadRequest)


async def upload(service: ChatService, request: Request, slot: Slot, body: Body) -> JsonResponse:
    """Stores an uploaded image, video or tensor of `image_embeds`. The body is the file itself, or
    JSON with a `data:` URL.
    """
    is_json = request.headers.get("content-type", TYPES[0]).startswith(TYPES[0])
    data = await asyncio.to_thread(_file_in, body) if is_json else bytes(body)
    if not 0 < len(data) <= _MAX_BYTES:
        raise InvalidRequest(f"an upload has 1 to {_MAX_BYTES} bytes")
    digest = await asyncio.to_thread(lambda: blake3(data).digest())
    handle, ttl_s = await _uploads(service).put(slot.tenant.name, data, digest)
    return JsonResponse(UploadAnswer(handle, len(data), ttl_s))


async def delete_upload(
    service: ChatService, request: Request, slot: Slot, _: Body
) -> JsonResponse:
    """Deletes an uploaded file."""
    handle: str = request.path_params["name"]
    await _uploads(service).delete(slot.tenant.name, handle)
    return JsonResponse(DeletedUpload(handle))


def _uploads(service: ChatService) -> Uploads:
    if service.images is None:
        raise InvalidRequest("the model takes only text")
    return Uploads(service.encoders)


def _file_in(body: Body) -> bytes:
    url = _parse(body).url
    kind = VIDEO if url.startswith("data:video/") else _IMAGE
    if not url.startswith("data:"):
        raise InvalidRequest("an upload is the file itself, or a data: URL in JSON", param="url")
    return decode_data_url(url, _MAX_BYTES, kind)
