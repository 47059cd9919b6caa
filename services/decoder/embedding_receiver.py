"""The parts of one Fetch put in their places and checked; nothing received is trusted."""

from google.protobuf.message import DecodeError

from services.common.embedding import (
    BLOCK_BYTES,
    ITEM_BYTES,
    EmbeddingSpec,
    all_finite,
    block_digests,
    join_digests,
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

    `accept` runs in the event loop, `store` in a thread, one chunk at a time. Where the encoder
    answers with shared memory, somebody else copies and hands the copy's digest to `finish`.
    """

    def __init__(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> None:
        self.key = key
        self.spec = spec
        self.into = into
        self._header_seen = False
        self._shared = False
        self._trailer: bytes | None = None
        self._num_accepted = 0
        self._ranges: dict[int, int] = {}  # start → end, stored, beyond the first gap
        self._stored = 0  # bytes before the first gap
        self._digests: list[bytes] = []  # of the blocks that are complete

    @property
    def needs_nothing(self) -> bool:
        """All is said: the bytes lie in shared memory, and their digest is known."""
        return self._shared and self._trailer is not None

    def accept(self, message: bytes) -> WireChunk | pb.FetchShared | None:
        """Takes one message; what must be stored or copied, or None.

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
            self._check_place(part)
            return part
        match part.WhichOneof("part"):
            case "header":
                self._check_header(part.header)
                return None
            case "shared" if self._header_seen:
                self._check_shared(part.shared)
                return part.shared
            case "trailer" if self._header_seen:
                self._trailer = part.trailer.digest
                return None
            case kind:
                raise WrongContent(f"{kind} before the header")

    def store(self, chunk: WireChunk) -> None:
        """Copies an accepted chunk to its place, digests blocks as far as there is no gap.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        start, end = chunk.offset, chunk.offset + len(chunk.data)
        self.into[start:end] = chunk.data
        if not all_finite(self.into[start:end], self.spec.dtype):
            raise WrongContent("it has values that are not finite")
        self._ranges[start] = end
        while (end := self._ranges.pop(self._stored, -1)) >= 0:
            self._stored = end
        first = BLOCK_BYTES * len(self._digests)
        last = self._stored // BLOCK_BYTES * BLOCK_BYTES
        if self._stored == self.spec.size_bytes:
            last = self._stored
        self._digests += block_digests(self.into[first:last])

    def finish(self, digest: bytes = b"") -> bytes:
        """The digest, after the stream's end.

        Args:
            digest: of the copy, if it was copied from shared memory.

        Raises:
            WrongContent: parts are missing, or the digest is another's.
        """
        size = self.spec.size_bytes
        if self._trailer is None or (self._stored != size and not digest):
            raise WrongContent(f"it ended after {self._num_accepted} of {size} bytes")
        digest = digest or join_digests(self._digests)
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
        shape = (header.levels, header.num_tokens, header.hidden)
        if shape != spec.shape:
            raise WrongContent(f"its shape is {shape}, not {spec.shape}")
        self._header_seen = True

    def _check_shared(self, shared: pb.FetchShared) -> None:
        if self._shared or self._num_accepted:
            raise WrongContent("its bytes come twice")
        if shared.offset + self.spec.size_bytes > shared.size_bytes:
            raise WrongContent("it lies outside of the shared memory")
        self._shared = True

    def _check_place(self, chunk: WireChunk) -> None:
        # Chunks that overlap cannot end without a gap when all of them have just the right size
        # together; `finish` looks for the gap.
        item = ITEM_BYTES[self.spec.dtype]
        length = len(chunk.data)
        if not self._header_seen:
            raise WrongContent("chunk before the header")
        if self._shared:
            raise WrongContent("its bytes come twice")
        if length == 0 or chunk.offset % item or length % item:
            raise WrongContent("a chunk is empty or cuts a value in two")
        self._num_accepted += length
        if max(chunk.offset + length, self._num_accepted) > self.spec.size_bytes:
            raise WrongContent("chunks overlap or lie outside of the embedding")


__all__ = ["DTYPES", "Receiver", "WrongContent"]
