"""The check of the ways that embeddings take, which a decoder makes when it starts.

One small image is sent to each listed encoder. Its embedding is fetched as that of a request is,
and read from Redis. A line of the log says how it came and at what rate, or what is broken. The
image has a salt of its own, so that no cache holds an embedding of the image.

A decoder waits only `_START_S` for the check before it is ready, because encoders may start later
than decoders. The check goes on in the background until it has reached each encoder once.
"""

import asyncio
import logging
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import replace

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_cache import RedisCache
from services.common.errors import TriptychError
from services.common.geometry import Geometry
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.known_encoders import KnownEncoders

log = logging.getLogger(__name__)

_START_S = 0.3
_RETRY_S = 5.0
_DESCRIBE_S, _ENCODE_S, _FETCH_S = 5.0, 60.0, 10.0
_REDIS_S = 3.0  # An encoder writes to Redis after it has sent an embedding.
_SIDE = 256  # pixels
_WAYS = {"shm": "through shared memory", "grpc": "over gRPC"}


class PathCheck:
    """Checks the way from each encoder to this decoder.

    Args:
        fetcher: client of the encoders.
        known: encoders that this decoder may dial. Encoders of ranges are not checked.
        geometry: the model's division of images into patches and tokens.
        like: dtype, number of features and hidden size of an embedding.
        cache: Redis. None if the settings name none.
        retry_s: seconds between two attempts to reach an encoder.
    """

    def __init__(
        self,
        fetcher: EncoderFetcher,
        known: KnownEncoders,
        geometry: Geometry,
        like: EmbeddingSpec,
        cache: RedisCache | None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._fetcher = fetcher
        self._known = known
        self._geometry = geometry
        self._like = like
        self._cache = cache
        self._retry_s = retry_s
        self._faults: dict[str, str] = {}  # last fault of each encoder
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the check, and waits for its end, but at most `_START_S` seconds."""
        self._task = asyncio.create_task(self._run())
        await asyncio.wait({self._task}, timeout=_START_S)

    async def close(self) -> None:
        """Ends the check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Checks each encoder until it has been reached once."""
        checked: set[str] = set()
        while True:
            addresses = await self._known.addresses()
            for address in addresses:
                if address not in checked and await self._is_checked(address):
                    checked.add(address)
            if addresses and checked >= set(addresses):
                return
            if not addresses and not self._known.has_names:
                return
            await asyncio.sleep(self._retry_s)

    async def _is_checked(self, address: str) -> bool:
        """Checks an encoder, and logs the result. Returns whether the way works. The same fault is
        logged once.
        """
        try:
            log.info("%s", await self.check(address))
        except (TriptychError, TimeoutError, ValueError) as error:
            fault = str(error) or "it does not answer in time"
            if self._faults.get(address) != fault:
                self._faults[address] = fault
                log.warning("no embedding can come from encoder %s now: %s", address, fault)
            return False
        return True

    async def check(self, address: str) -> str:
        """Sends an image over the whole way, and returns the line that describes the way.

        Raises:
            TriptychError: the encoder cannot be reached, refuses the image, or sends a wrong
                embedding.
            TimeoutError: the embedding does not come in time.
            ValueError: the encoder serves another model.
        """
        call = self._fetcher.call
        described = await call(
            address, "Describe", pb.DescribeEncoderRequest(), pb.DescribeEncoderResponse,
            _DESCRIBE_S,
        )  # fmt: skip
        if (described.num_features, described.hidden) != (
            self._like.num_features,
            self._like.hidden,
        ):
            raise ValueError(f"it serves another model, {described.model_name}")
        image, salt = _png(_SIDE), os.urandom(16)
        (unit,) = self._geometry.units((_SIDE, _SIDE))
        key = image_key(described.key_prefix, image, unit=unit, salt=salt)
        request = pb.EncodeRequest(image_key=key, image=image, cache_salt=salt, background=True)
        request.grid.t, request.grid.h, request.grid.w = unit.grid
        await call(address, "Encode", request, pb.EncodeResponse, _ENCODE_S)
        spec = replace(self._like, num_tokens=self._geometry.num_tokens(unit))
        into = memoryview(bytearray(spec.size_bytes))
        async with asyncio.timeout(_FETCH_S):
            await self._fetcher.fetch(address, key, spec, into)  # opens the connection
            start = time.monotonic()
            fetched = await self._fetcher.fetch(address, key, spec, into)
            line = (
                f"embeddings come from encoder {address} {_WAYS[fetched.path]}: "
                f"{_rate(spec, time.monotonic() - start)}"
            )
        if fetched.fell_back:
            line += " (its shared memory cannot be read)"
        return line + await self._redis_part(key, spec, into, fetched.digest)

    async def _redis_part(
        self, key: bytes, spec: EmbeddingSpec, into: memoryview, digest: bytes
    ) -> str:
        """Reads the embedding from Redis, and returns the end of the line about it."""
        if self._cache is None:
            return "; no Redis is set"
        with suppress(TimeoutError):
            async with asyncio.timeout(_REDIS_S):
                while True:
                    start = time.monotonic()
                    if await self._cache.read(key, spec, into) == digest:
                        return f"; from Redis: {_rate(spec, time.monotonic() - start)}"
                    await asyncio.sleep(0.05)
        log.warning(
            "Redis does not have an embedding that an encoder has just computed: see its log"
        )
        return "; not from Redis"


def _rate(spec: EmbeddingSpec, seconds: float) -> str:
    megabytes = spec.size_bytes / 1e6
    return (
        f"{megabytes:.2g} MB in {seconds * 1e3:.1f} ms, {megabytes / max(seconds, 1e-9):,.0f} MB/s"
    )


def _png(side: int) -> bytes:
    """Returns a grey square as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x80" * (3 * side)) * side)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
