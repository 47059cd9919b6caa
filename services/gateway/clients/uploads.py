"""Files that clients upload once and name by media: URLs. Encoders and their Redis keep the files.

A handle contains the file's digest, which also determines the encoder that keeps the file. If the
encoders share no Redis, the other encoders are asked, too. `MediaLoader` gets files, and
`upload_routes` stores and deletes them.
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


class Uploads:
    """The files that tenants have uploaded.

    Args:
        encoders: encoders that keep the files.
    """

    def __init__(self, encoders: EncoderPool) -> None:
        self._encoders = encoders

    async def put(self, tenant: str, data: bytes, digest: bytes) -> tuple[str, int]:
        """Stores a file at an encoder, or at a second encoder if the first is unavailable.

        Args:
            tenant: name of the tenant.
            digest: BLAKE3 digest of the file.

        Returns:
            The file's handle, and the time in seconds for which the file is kept after each use.

        Raises:
            TriptychError: no encoder takes the file.
        """
        cause: TriptychError | None = None
        for pod in self._ranked(digest)[:2]:
            try:
                upload = pod.bulk("Upload", pb.UploadResponse)
                request = pb.UploadRequest(file=data, tenant=tenant)
                ttl_s = (await pod.call(upload, request, _TIMEOUT_S)).kept_s
            except Unavailable as error:
                cause = error.without_frames()
                continue
            return SCHEME + digest.hex(), ttl_s
        raise cause or Unavailable("no encoder is available", retry_after_s=1)

    async def get(self, tenant: str, handle: str) -> bytes:
        """Returns the file that a handle names.

        Raises:
            InvalidRequest: `handle` is no handle of a file.
            NotFound: the tenant has no such file, or has not used the file for long.
            TriptychError: an encoder that may have the file does not answer.
        """
        digest = _read_handle(handle)
        cause: TriptychError = NotFound("the uploaded file is not stored any more: upload it again")
        for pod in self._ranked(digest):
            try:
                return await _download(pod, digest, tenant)
            except NotFound:
                continue
            except Unavailable as error:
                cause = error.without_frames()
        raise cause

    async def delete(self, tenant: str, handle: str) -> None:
        """Deletes a file at all encoders, including encoders that are unhealthy.

        Raises:
            InvalidRequest: `handle` is no handle of a file.
            NotFound: the tenant has no such file.
            TriptychError: an encoder does not answer. The other encoders have deleted the file.
        """
        digest, was_found = _read_handle(handle), False
        pods = self._encoders.fitting()
        cause = None if pods else Unavailable("no encoder is available", retry_after_s=1)
        for pod in pods:
            try:
                await _download(pod, digest, tenant, forget=True)
                was_found = True
            except NotFound:
                continue
            except TriptychError as error:
                cause = error.without_frames()
        if cause is not None:
            raise cause
        if not was_found:
            raise NotFound("no such upload is stored")

    def _ranked(self, digest: bytes) -> Sequence[EncoderPod]:
        """Returns the healthy encoders, in the order of their rank for a file."""
        pods = sorted(self._encoders.healthy(), key=lambda pod: rank(pod.address, digest))
        if not pods:
            raise Unavailable("no encoder is available", retry_after_s=1)
        return pods


async def _download(pod: EncoderPod, digest: bytes, tenant: str, *, forget: bool = False) -> bytes:
    """Returns a file of a tenant. With `forget`, deletes the file and returns no bytes.

    Raises:
        NotFound: the encoder has no file of the tenant with that digest.
        TriptychError: see `EncoderPod.encode`.
    """
    download = pod.bulk("Download", pb.DownloadResponse)
    request = pb.DownloadRequest(digest=digest, tenant=tenant, forget=forget)
    return (await pod.call(download, request, _TIMEOUT_S)).file


def _read_handle(handle: str) -> bytes:
    """Returns the digest in a handle. Raises InvalidRequest if `handle` is malformed."""
    if not (found := _HANDLE.fullmatch(handle)):
        raise InvalidRequest("a media: URL is one that POST /v1/media has given")
    return bytes.fromhex(found[1])
