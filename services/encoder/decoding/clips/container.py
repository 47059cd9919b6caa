"""Reads a video's container with PyAV: its frames, their order, and where decoding may start.

Headers may be wrong about counts, rates and sizes. Therefore all packets are counted, their
timestamps are read, and one frame is decoded. The demuxer is chosen by the file's first bytes, not
by FFmpeg, so that demuxers which open other files or URLs (playlists, SDP, concat) are never used.
Only child processes import this file. Each defect of a file is reported as an `InvalidVideo`.
"""

import errno
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, NoReturn

import av
import msgspec
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Discard
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from blake3 import blake3

from services.common.errors import InvalidVideo
from services.common.images.image_key import FRAME_DIGEST_BYTES
from services.encoder.decoding.clips.questions import CORRUPT, DECODER_THREADS, MAX_FRAME_PIXELS

MAX_FRAMES = 250_000
# Most pixels of all frames of a video: nine minutes of 1080p at 60 frames per second.
_MAX_DECODED_PIXELS = 1 << 36
# The same for codecs whose frames need all earlier frames: five seconds of decoding.
_MAX_DEPENDENT_PIXELS = 1 << 32
# Demuxers by the first bytes of their files.
_MATROSKA, _OGG, _ASF = b"\x1aE\xdf\xa3", b"OggS", bytes.fromhex("3026b2758e66cf11")
_PREFIXES = {
    _MATROSKA: "matroska", _OGG: "ogg", _ASF: "asf", b"FLV\x01": "flv", b"GIF87a": "gif",
    b"GIF89a": "gif", b"\x89PNG\r\n\x1a\n": "apng", b"\0\0\x01\xba": "mpeg", b"DKIF": "ivf",
}  # fmt: skip
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_TS_BYTES = (188, 192)  # sizes of a packet of an MPEG transport stream
_APNG_HEAD = 1 << 16  # bytes in which an animated PNG has its chunk `acTL`
# Decoders whose keyframes need no earlier frame, so that decoding may start with any keyframe.
_INDEPENDENT = {
    "h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg",
}  # fmt: skip
_DECODERS = _INDEPENDENT | {
    "gif", "apng", "png", "wmv1", "wmv2", "wmv3", "vc1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3",
    "msmpeg4", "h263", "h263p", "flv", "theora", "prores", "dnxhd", "ffv1", "vp6f", "vp6", "qtrle",
    "rawvideo", "huffyuv", "ffvhuff", "libvpx-vp9",
}  # fmt: skip
_REORDERED = 16  # most frames that a decoder delays to return later frames first
# Packets that overlap in the file would make a small file as expensive as a large file. All packets
# together may have `_OVERLAP` times the file's bytes and `_OVERLAP_BYTES` more: in valid files,
# too, packets have a few more bytes than the file stores for them, such as a common prefix.
_OVERLAP = 2
_OVERLAP_BYTES = 1 << 20
_RATE_SLACK = 0.02
_DOMAIN = b"triptych/frame/v1"


class Entry(NamedTuple):
    """The position of a frame in the file.

    Attributes:
        pts: presentation time of the frame, in the stream's units.
        packet: number of the frame's packet, in the order of decoding.
        start: number of the packet with which decoding may start.
    """

    pts: int
    packet: int
    start: int


@dataclass(frozen=True, slots=True)
class Index:
    """The frames of a file, according to its packets.

    Attributes:
        entries: frames in order of presentation, `[num_frames, 3]` int64. The columns are those of
            `Entry`.
        by_order: True if timestamps are missing or are decoding times. The frames then have the
            order in which the decoder returns them.
        codec: FFmpeg's name of the codec, which does not depend on the decoder.
        rate: frames per second on average. 0 if unknown.
        duration_s: seconds from the start of the first frame to the end of the last frame. 0 if
            unknown.
        digests: `FRAME_DIGEST_BYTES` for each packet, in order of decoding: the digest of all
            packets up to this packet.
        time_base: seconds of one unit of `Entry.pts`.
    """

    entries: np.ndarray
    by_order: bool
    codec: str
    rate: float
    duration_s: float
    digests: bytes
    time_base: Fraction

    @classmethod
    def decode(cls, data: "bytes | memoryview") -> "Index":
        """Returns the index that `encode` has encoded. It refers to `data`."""
        fields = msgspec.msgpack.decode(data, type=_EncodedIndex)
        entries = np.frombuffer(fields.entries, np.int64).reshape(-1, 3)
        return cls(
            entries,
            fields.by_order,
            fields.codec,
            fields.rate,
            fields.duration_s,
            b"",
            Fraction(*fields.time_base),
        )

    def encode(self) -> bytes:
        """Returns the index without its digests, so that other processes need not read all packets
        of the file.
        """
        fields = _EncodedIndex(
            memoryview(self.entries.tobytes()),
            self.by_order,
            self.codec,
            self.rate,
            self.duration_s,
            self.time_base.as_integer_ratio(),
        )
        return msgspec.msgpack.encode(fields)

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.entries)

    def entry(self, frame: int) -> Entry:
        """Returns the position of a frame, by its number in order of presentation."""
        return Entry(*self.entries[frame].tolist())

    @property
    def frame_digests(self) -> bytes:
        """Digests of all frames' packets, in order of presentation, one after another."""
        of_packets = np.frombuffer(self.digests, f"V{FRAME_DIGEST_BYTES}")
        return of_packets[self.entries[:, 1]].tobytes()

    @property
    def key_frames(self) -> bytes:
        """Numbers of the frames behind the first with which decoding may start, int32: the first
        frame of each `Entry.start`.
        """
        starts = np.maximum.accumulate(self.entries[:, 2])
        return (np.flatnonzero(np.diff(starts)) + 1).astype("<i4").tobytes()


class _EncodedIndex(msgspec.Struct, array_like=True):
    """The fields of an encoded `Index`. The time base is a numerator and a denominator."""

    entries: memoryview
    by_order: bool
    codec: str
    rate: float
    duration_s: float
    time_base: tuple[int, int]


class Reader:
    """A file in memory with the methods that PyAV calls. The file is not copied as a whole."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        stop = len(self._data) if size < 0 else min(self._position + size, len(self._data))
        part = bytes(self._data[self._position : stop])
        self._position = max(stop, self._position)
        return part

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, len(self._data))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position


def demuxer_of(data: memoryview) -> str:
    """Returns FFmpeg's name of the demuxer for a file.

    Raises:
        InvalidVideo: the container is unknown or not supported.
    """
    head = bytes(data[:16])
    for prefix, name in _PREFIXES.items():
        if head.startswith(prefix) and (name != "apng" or b"acTL" in bytes(data[:_APNG_HEAD])):
            return name
    if head[4:8] in _MOV_BOXES:
        return "mov"
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"AVIX"):
        return "avi"
    for size in _TS_BYTES:
        first = size - 188
        if len(data) >= 3 * size and all(data[first + at * size] == 0x47 for at in range(3)):
            return "mpegts"
    raise InvalidVideo(
        "the file is not a video in a supported container: MP4, MOV, WebM, Matroska, AVI, MPEG, "
        "ASF, FLV, Ogg, IVF, GIF or APNG"
    )


def _no_other_file(*_: object) -> NoReturn:
    raise OSError(errno.EACCES, "a video must not open another file")


@contextmanager
def opened(data: memoryview) -> Generator[tuple[InputContainer, VideoStream]]:
    """Opens a file during the `with` block.

    Yields:
        The file's demuxer and its video stream.

    Raises:
        InvalidVideo: the file cannot be opened, or has no video stream of a supported codec.
    """
    with failures():
        container: InputContainer = av.open(  # pyright: ignore[reportAssignmentType]
            Reader(data),
            format=demuxer_of(data),
            io_open=_no_other_file,
            options={"protocol_whitelist": "none", "max_pixels": str(MAX_FRAME_PIXELS)},
            metadata_errors="replace",
        )
    try:
        stream = container.streams.best("video")
        if not isinstance(stream, VideoStream):
            raise InvalidVideo("the file has no video stream")
        for other in container.streams:
            if other is not stream:
                other.discard = Discard.all
        codec = stream.codec_context
        if codec.name not in _DECODERS:
            raise InvalidVideo(f"videos of the codec {codec.name} are not decoded here")
        check_size(codec.height, codec.width)
        codec.thread_type, codec.thread_count = "AUTO", DECODER_THREADS
        codec.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        yield container, stream
    finally:
        container.close()


@contextmanager
def failures() -> Generator[None]:
    """Converts FFmpeg's errors inside the `with` block to `MemoryError` or `InvalidVideo`. Clients
    do not see their text.
    """
    try:
        yield
    except FFmpegError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from None
        raise InvalidVideo(CORRUPT) from None


def packets_of(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """Yields the stream's packets in order of decoding, until the file ends or cannot be read.

    Raises:
        InvalidVideo: the stream has too many packets.
    """
    last: Packet | None = None
    try:
        for count, packet in enumerate(container.demux(stream)):
            if count > MAX_FRAMES:
                raise InvalidVideo(f"the video has more than {MAX_FRAMES} frames")
            if packet.size:  # the demuxer returns an empty packet at the end
                if last is not None:
                    yield last
                last = packet
    except FFmpegError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from None
    if last is not None and not last.is_corrupt:  # the last packet of a truncated file is corrupt
        yield last


def read_index(container: InputContainer, stream: VideoStream, file_bytes: int) -> Index:
    """Reads all packets of a file.

    Args:
        container: demuxer of the file.
        stream: video stream of the file.
        file_bytes: size of the file.

    Raises:
        InvalidVideo: the file has no frame, or its packets overlap.
    """
    codec, time_base = stream.codec_context, stream.time_base or Fraction(1, 1000)
    digest = _PacketsDigest(codec, time_base, _OVERLAP * file_bytes + _OVERLAP_BYTES)
    shown = _Frames()
    keys = _Frames()  # keyframes with which decoding may start, including frames that are not shown
    is_apng, is_vp8 = codec.name == "apng", codec.name == "vp8"
    is_independent, by_order = codec.name in _INDEPENDENT, container.format.name == "avi"
    first_pts = latest = end = 0
    for number, packet in enumerate(packets_of(container, stream)):
        pts = packet.dts if packet.pts is None else packet.pts
        by_order = by_order or packet.pts is None
        pts = number if pts is None else pts
        digest.add(packet, pts - first_pts)
        # The first frame of an APNG is a keyframe even if it is marked as blended over others.
        is_key = packet.is_keyframe or is_apng
        if is_key and (is_independent or not keys.pts):
            if not keys.pts:
                first_pts = latest = pts
            keys.add(pts, number)
        # An edit list may cut a video anywhere. Frames before the cut are decoded, but not shown.
        if not keys.pts or packet.is_discard or (is_vp8 and _is_hidden(packet)):
            continue
        # In a concatenation of files, the timestamps of each file start again.
        by_order = by_order or (packet.is_keyframe and pts < latest)
        latest = max(latest, pts)
        if pts >= first_pts or by_order:
            shown.add(pts, number)
            end = max(end, pts + max(packet.duration or 0, 0))
    if not shown.pts:
        raise InvalidVideo("the video has no frame")
    entries = _in_order(shown, keys) if by_order else _presented(shown, keys)
    end = len(entries) if by_order else end
    time_base = 1 / (stream.average_rate or Fraction(24)) if by_order else time_base
    rate, duration_s = _times(entries, end, time_base, stream.average_rate)
    name = codec.codec.canonical_name
    return Index(entries, by_order, name, rate, duration_s, bytes(digest.digests), time_base)


class _Frames:
    """Frames in order of decoding. As a file may have 250,000, they are stored in lists of numbers.

    Attributes:
        pts: presentation time of each frame.
        packets: number of each frame's packet.
    """

    def __init__(self) -> None:
        self.pts: list[int] = []
        self.packets: list[int] = []

    def add(self, pts: int, packet: int) -> None:
        """Appends a frame."""
        self.pts.append(pts)
        self.packets.append(packet)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns times and packet numbers as int64 arrays."""
        return np.array(self.pts, np.int64), np.array(self.packets, np.int64)


class _PacketsDigest:
    """The running digest of a stream's configuration and of its packets.

    Args:
        codec: codec of the stream, with its configuration.
        time_base: seconds of one unit of the timestamps.
        max_bytes: most bytes of all packets with their side data.

    Attributes:
        digests: `FRAME_DIGEST_BYTES` for each packet: the digest of all packets up to this packet.
    """

    def __init__(self, codec: VideoCodecContext, time_base: Fraction, max_bytes: int) -> None:
        self._bytes_left = max_bytes
        setup = f"{codec.name},{codec.width},{codec.height},{codec.pix_fmt},{time_base}"
        self._hasher = blake3(_DOMAIN)
        for part in (setup.encode(), codec.extradata or b""):
            self._hasher.update(len(part).to_bytes(8, "little") + part)
        self.digests = bytearray()

    def add(self, packet: Packet, pts: int) -> None:
        """Adds a packet to the digest.

        Raises:
            InvalidVideo: the packets have too many bytes together.
        """
        self._count(packet.size)
        hasher = self._hasher
        hasher.update(b"%d,%d,%d," % (pts, packet.is_discard, packet.size))
        hasher.update(packet)
        for side in packet.iter_sidedata():
            extra = bytes(side)
            self._count(len(extra))
            hasher.update(b"%s,%d," % (side.data_type.encode(), len(extra)))
            hasher.update(extra)
        self.digests += hasher.digest(FRAME_DIGEST_BYTES)

    def _count(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise InvalidVideo(
                "the video's frames overlap in the file: together they have more than twice its "
                "bytes"
            )


def _is_hidden(packet: Packet) -> bool:
    """Returns whether a VP8 frame is only a reference for other frames and is never shown."""
    return not memoryview(packet)[0] >> 4 & 1


def _in_order(shown: _Frames, keys: _Frames) -> np.ndarray:
    """Returns the entries of the frames in order of decoding, `[num_frames, 3]`."""
    _, packets = shown.arrays()
    entries = np.empty((len(packets), 3), np.int64)
    entries[:, 0] = np.arange(len(packets))
    entries[:, 1] = np.minimum(packets + _REORDERED, packets[-1])
    entries[:, 2] = keys.packets[0]
    return entries


def _presented(shown: _Frames, keys: _Frames) -> np.ndarray:
    """Returns the entries of the frames in order of presentation, `[num_frames, 3]`.

    Decoding may start with the last keyframe that is both decoded and shown before a frame. A frame
    that is decoded after a keyframe but shown before the keyframe may need earlier frames.
    """
    pts, packets = shown.arrays()
    order = np.lexsort((packets, pts))
    pts, packets = pts[order], packets[order]
    key_pts, key_packets = keys.arrays()  # the first keyframe has the lowest time
    start = np.searchsorted(key_packets, packets, "right") - 1
    for _ in range(_REORDERED):
        start -= key_pts[start] > pts
    start[key_pts[start] > pts] = 0
    return np.stack((pts, packets, key_packets[start]), axis=1)


def _times(
    entries: np.ndarray, end: int, time_base: Fraction, average: Fraction | None
) -> tuple[float, float]:
    """Returns the rate in frames per second and the duration in seconds. The rate is the header's
    if it agrees with the timestamps.
    """
    stated = float(average) if average else 0.0
    first, last = int(entries[0, 0]), int(entries[-1, 0])
    span = float((last - first) * time_base)
    duration_s = float((end - first) * time_base)
    if len(entries) < 2 or span <= 0:
        return stated, max(duration_s, 0.0)
    counted = (len(entries) - 1) / span
    rate = stated if abs(stated - counted) <= _RATE_SLACK * counted else counted
    return rate, duration_s if duration_s > span else len(entries) / rate


def upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Returns a frame's height and width after rotation."""
    if _matrix(frame)[1]:
        return frame.width, frame.height
    return frame.height, frame.width


def check_size(height: int, width: int) -> None:
    """Raises InvalidVideo if a frame has too many pixels."""
    if height * width > MAX_FRAME_PIXELS:
        raise InvalidVideo(
            f"the video's frames have {width}x{height} pixels; at most {MAX_FRAME_PIXELS} pixels "
            "are decoded here"
        )


def check_amount(num_frames: int, height: int, width: int, codec: str) -> None:
    """Raises InvalidVideo if decoding all frames would be too much."""
    most = _MAX_DECODED_PIXELS if codec in _INDEPENDENT else _MAX_DEPENDENT_PIXELS
    if num_frames * height * width > most:
        raise InvalidVideo(
            f"the video has {num_frames} frames of {width}x{height} pixels; at most {most} pixels "
            f"in all are decoded of {codec}"
        )


def to_rgb(frame: VideoFrame, out: np.ndarray) -> None:
    """Converts a frame to upright RGB pixels, with transparency composited on white.

    swscale converts from the frame's colour space and range, as `VideoFrame.to_ndarray` does. Tones
    are not mapped, and pixels that are not square are not rescaled.

    Args:
        frame: the decoded frame.
        out: uint8 array `[height, width, 3]`, into which the pixels are written.
    """
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba", threads=1)
        alpha = rgba[..., 3:].astype(np.uint16)
        mixed = rgba[..., :3] * alpha + 255 * (255 - alpha) + 127
        pixels = (mixed // 255).astype(np.uint8)
    else:
        pixels = frame.to_ndarray(format="rgb24", threads=1)
    flips, transposed = _matrix(frame)
    if transposed:
        pixels = pixels.transpose(1, 0, 2)
    out[...] = pixels[:: flips[0], :: flips[1]]


def _matrix(frame: VideoFrame) -> tuple[tuple[int, int], bool]:
    """Reads a frame's display matrix. A rotation that is no multiple of 90 degrees is ignored.

    Returns:
        The steps along rows and columns, 1 or -1 each, and whether the pixels are transposed before
        the steps apply.
    """
    side = frame.side_data.get("DISPLAYMATRIX")
    if side is None or len(bytes(side)) < 20:
        return (1, 1), False
    a, b, _, c, d = np.frombuffer(bytes(side), np.int32, 5).tolist()
    # x' = a x + c y, y' = b x + d y
    if b == c == 0 and a and d:
        return (1 if d > 0 else -1, 1 if a > 0 else -1), False
    if a == d == 0 and b and c:
        return (1 if b > 0 else -1, 1 if c > 0 else -1), True
    return (1, 1), False
