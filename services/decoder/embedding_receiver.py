"""The parts of one Fetch put in their places and checked; nothing received is trusted."""

from google.protobuf.message import DecodeError

from services.common.embedding import (
    ITEM_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    TensorDigest,
    all_finite,
)
from services.common.fetch_wire import WireChunk, parse
from services.common.pb import encoder_pb2 as pb

DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}


class WrongContent(ValueError):
    """What the encoder sent is not the embedding."""


class Receiver:
    """Fills `into` from one Fetch stream.

    `accept` runs in the event loop, `store` in a thread. Where the encoder answers with shared
    memory, somebody else copies the ranges that are ready and adds them to `digest`.
    """

    def __init__(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> None:
        self.key = key
        self.spec = spec
        self.into = into
        self._header_seen = False
        self._shared = False
        self._trailer: bytes | None = None
        self._num_accepted = 0
        self.digest = TensorDigest(into)  # of the bytes as they lie in `into`

    @property
    def needs_nothing(self) -> bool:
        """All is said: the bytes lie in shared memory, and their digest is known."""
        return self._shared and self._trailer is not None

    def accept(self, message: bytes) -> WireChunk | pb.FetchShared | pb.FetchReady | None:
        """Takes one message; what must be stored, opened or copied, or None.

        Raises:
            WrongContent: not what was asked for.
        """
        if self._trailer is not None:
            raise WrongContent("there is more after the trailer")
        try:
            part = parse(message)
        except DecodeError:
            raise WrongContent("a message cannot be read") from None
        if isinstance(part, WireChunk):
            if self._shared:
                raise WrongContent("its bytes come twice")
            self._check_place(part.offset, len(part.data))
            return part
        match part.WhichOneof("part"):
            case "header":
                self._check_header(part.header)
                return None
            case "shared" if self._header_seen:
                self._check_shared(part.shared)
                return part.shared
            case "ready" if self._shared:
                self._check_place(part.ready.offset, part.ready.size_bytes)
                return part.ready
            case "trailer" if self._header_seen:
                self._trailer = part.trailer.digest
                return None
            case kind:
                raise WrongContent(f"{kind} before the header")

    def store(self, chunk: WireChunk) -> None:
        """Copies an accepted chunk to its place.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        start, end = chunk.offset, chunk.offset + len(chunk.data)
        self.into[start:end] = chunk.data
        if not all_finite(self.into[start:end], self.spec.dtype):
            raise WrongContent("it has values that are not finite")
        self.digest.add(start, end)

    def finish(self) -> bytes:
        """The digest, after the stream's end, once all is in its place.

        Raises:
            WrongContent: parts are missing, or the digest is another's.
        """
        size = self.spec.size_bytes
        if self._trailer is None or self._num_accepted != size:
            raise WrongContent(f"it ended after {self._num_accepted} of {size} bytes")
        try:
            digest = self.digest.finish()
        except CorruptEmbedding as error:
            raise WrongContent(str(error)) from None
        if digest != self._trailer:
            raise WrongContent("its digest does not match")
        return digest

    def _check_header(self, header: pb.FetchHeader) -> None:
        spec = self.spec
        if self._header_seen:
            raise WrongContent("it has two headers")
        if header.image_key != self.key:
            raise WrongContent(f"it is of image {header.image_key.hex()[:16]}")
        if header.dtype != DTYPES[spec.dtype]:
            raise WrongContent(f"its dtype is {header.dtype}, not {spec.dtype}")
        shape = (header.num_features, header.num_tokens, header.hidden)
        if shape != spec.shape:
            raise WrongContent(f"its shape is {shape}, not {spec.shape}")
        self._header_seen = True

    def _check_shared(self, shared: pb.FetchShared) -> None:
        if self._shared or self._num_accepted:
            raise WrongContent("its bytes come twice")
        if shared.offset + self.spec.size_bytes > shared.size_bytes:
            raise WrongContent("it lies outside of the shared memory")
        self._shared = True

    def _check_place(self, offset: int, length: int) -> None:
        # Ranges that overlap are found by `finish`: then others are missing.
        item = ITEM_BYTES[self.spec.dtype]
        if not self._header_seen:
            raise WrongContent("chunk before the header")
        if length == 0 or offset % item or length % item:
            raise WrongContent("a part is empty or cuts a value in two")
        self._num_accepted += length
        if max(offset + length, self._num_accepted) > self.spec.size_bytes:
            raise WrongContent("parts overlap or lie outside of the embedding")


__all__ = ["DTYPES", "Receiver", "WrongContent"]
