"""Files that clients upload once and name by `media:` URLs. They lie with an encoder and in its
Redis, never here.

A handle is the file's digest. The encoder that keeps a file is chosen by it; where encoders share
no Redis, the others are asked, too. `MediaLoader` gets files, `upload_routes` puts them.
"""

import re
from collections.abc import Sequence

from services.common.errors import InvalidRequest, NotFound, TriptychError, Unavailable
from services.common.pb import encoder_pb2 as pb
from services.gateway.clients.encoders import EncoderPod, EncoderPool
from services.gateway.clients.pods import rank

SCHEME = "media:"
_HANDLE = re.compile(r"media:([0-9a-f]{64})")
_TIMEOUT_S = 30.0


async def put(encoders: EncoderPool, tenant: str, data: bytes, digest: bytes) -> tuple[str, int]:
    """Leaves a file at an encoder; another one, if that is lost.

    Returns:
        Its handle, and for how many seconds after its last use it is kept.

    Raises:
        TriptychError: no encoder takes it.
    """
    cause: TriptychError | None = None
    for pod in _by_rank(encoders, digest)[:2]:
        try:
            upload = pod.unary("Upload", pb.UploadRequest, pb.UploadResponse)
            request = pb.UploadRequest(file=data, tenant=tenant)
            kept_s = (await pod.call(upload, request, _TIMEOUT_S)).kept_s
        except Unavailable as error:
            cause = error.without_frames()
            continue
        return SCHEME + digest.hex(), kept_s
    raise cause or Unavailable("no encoder is available", retry_after_s=1)


async def get(encoders: EncoderPool, tenant: str, handle: str) -> bytes:
    """The file that a handle names.

    Raises:
        InvalidRequest: it is no handle.
        NotFound: the tenant has no such file, or has not used it for long.
        TriptychError: an encoder that may have it does not answer.
    """
    digest = _read_handle(handle)
    cause: TriptychError = NotFound("no such upload is kept: upload the file again")
    for pod in _by_rank(encoders, digest):
        try:
            return await _download(pod, digest, tenant)
        except NotFound:
            continue
        except Unavailable as error:
            cause = error.without_frames()
    raise cause


async def delete(encoders: EncoderPool, tenant: str, handle: str) -> None:
    """Forgets a file, at all encoders, those that are unwell included.

    Raises:
        InvalidRequest, NotFound, TriptychError: as of `get`; others have forgotten it then.
    """
    digest, was_kept = _read_handle(handle), False
    pods = encoders.fitting()
    cause = None if pods else Unavailable("no encoder is available", retry_after_s=1)
    for pod in pods:
        try:
            await _download(pod, digest, tenant, forget=True)
            was_kept = True
        except NotFound:
            continue
        except TriptychError as error:
            cause = error.without_frames()
    if cause is not None:
        raise cause
    if not was_kept:
        raise NotFound("no such upload is kept")


def _by_rank(encoders: EncoderPool, digest: bytes) -> Sequence[EncoderPod]:
    pods = sorted(encoders.healthy(), key=lambda pod: rank(pod.address, digest))
    if not pods:
        raise Unavailable("no encoder is available", retry_after_s=1)
    return pods


async def _download(pod: EncoderPod, digest: bytes, tenant: str, *, forget: bool = False) -> bytes:
    """A file of a tenant; with `forget`, no bytes, and the file is gone.

    Raises:
        NotFound: the tenant has left none of that digest there.
        TriptychError: as of `EncoderPod.encode`.
    """
    download = pod.unary("Download", pb.DownloadRequest, pb.DownloadResponse)
    request = pb.DownloadRequest(digest=digest, tenant=tenant, forget=forget)
    return (await pod.call(download, request, _TIMEOUT_S)).file


def _read_handle(handle: str) -> bytes:
    """The digest in a handle; raises InvalidRequest if it is none."""
    if not (found := _HANDLE.fullmatch(handle)):
        raise InvalidRequest("a media: URL is one that POST /v1/media has given")
    return bytes.fromhex(found[1])
