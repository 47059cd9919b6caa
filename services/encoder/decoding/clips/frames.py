"""Frames of a video by index, as a player would show them: forward in one pass, nothing kept.

A frame that cannot be decoded is the one before it, as on a screen, unless that is long gone. In
child processes alone.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from av.error import FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.container import (
    Entry,
    check_amount,
    check_size,
    failures,
    opened,
    packets_of,
    read_index,
    upright_size,
)
from services.encoder.decoding.clips.questions import Facts

_LONG_GONE_S = 1.0
_LONG_GONE_FRAMES = 3
# A decoder gives a frame at most so many packets behind its own, or not at all. Gradual refreshes
# of the picture take some hundreds.
_LATE_PACKETS = 1024


def probe(data: memoryview) -> Facts:
    """Reads a file's packets, and decodes its first frame for its size.

    Raises:
        InvalidVideo: it cannot be decoded, or has too many frames or pixels.
    """
    with closing(Frames(data)) as frames:
        height, width = upright_size(frames.frame(0))
    index = frames.index
    check_amount(index.num_frames, height, width, index.codec)
    return Facts(
        num_frames=index.num_frames,
        rate=index.rate,
        height=height,
        width=width,
        duration_s=index.duration_s,
        frame_digests=index.frame_digests,
    )


class _Given(NamedTuple):
    """A frame that the decoder has given, its time, and its packet; -1: not known."""

    pts: int
    packet: int
    frame: VideoFrame


class Frames:
    """A file that is being decoded, until `close`."""

    def __init__(self, data: memoryview) -> None:
        with opened(data) as (container, stream):
            self.index = index = read_index(container, stream, len(data))
        self._data = data
        frames_s = _LONG_GONE_FRAMES / index.rate if index.rate else 0.0
        self._most_s = max(frames_s, _LONG_GONE_S)
        self._opened = None
        self._skips = True
        self._rewind()

    def frame(self, index: int) -> VideoFrame:
        """A frame. Faster in rising order.

        Raises:
            InvalidVideo: there is none of that index, or it cannot be decoded.
        """
        if index >= self.index.num_frames:
            raise InvalidVideo(f"the video has {self.index.num_frames} frames, none of {index}")
        with failures():
            found = self._found(self.index.entry(index))
        if found is None:
            raise InvalidVideo(f"frame {index} of the video cannot be decoded")
        check_size(found.height, found.width)
        return found

    def close(self) -> None:
        if self._opened is not None:
            # A decoder's thread that lets a packet go (`copy_opaque`) waits for the interpreter,
            # which keeps still while a decoder is freed.
            self._stream.codec_context.flush_buffers()
            self._opened.__exit__(None, None, None)
            self._opened = None

    def _found(self, entry: Entry) -> VideoFrame | None:
        place = entry.pts, -1 if self.index.by_order else entry.packet
        if self._shown is not None and self._shown[:2] > place:
            self._rewind()
        if self._skips and entry.start > self._num_read:
            self._skip(entry.start)
        while self._shown is None or self._shown[:2] < place:
            following = self._peek(entry.packet)
            if following is None or following.pts > entry.pts:
                break
            # Edit lists may show two frames at one time, which their packets tell apart.
            is_second = self._shown is not None and self._shown.pts == following.pts
            if is_second and following.packet > entry.packet:
                break
            self._shown = self._decoded.popleft()
        if self._shown is None:
            return None
        behind_s = float((entry.pts - self._shown.pts) * self.index.time_base)
        return self._shown.frame if behind_s <= self._most_s else None

    def _rewind(self) -> None:
        self.close()
        self._opened = opened(self._data)
        container, stream = self._opened.__enter__()
        self._stream: VideoStream = stream
        stream.codec_context.copy_opaque = True
        self._packets: Iterator[Packet] = packets_of(container, stream)
        self._num_read = 0  # packets
        self._num_given = 0  # frames, by the decoder
        self._decoded: deque[_Given] = deque()  # not shown yet
        self._shown: _Given | None = None
        self._is_over = False

    def _skip(self, packet: int) -> None:
        """What is before a keyframe is not decoded, unless its packet only begins a gradual refresh
        of the picture: a decoder gives later frames alone, and some of them wrong.
        """
        while self._num_read < packet and next(self._packets, None) is not None:
            self._num_read += 1
        self._stream.codec_context.flush_buffers()
        self._decoded.clear()
        self._shown = None
        first = self._peek(packet)
        if first is None or first.packet not in (packet, -1):
            self._skips = False
            self._rewind()

    def _peek(self, wanted: int) -> _Given | None:
        """The frame that the decoder gives next. None if there is none, or none soon enough to be
        that of the packet `wanted`.
        """
        last = wanted + _LATE_PACKETS
        while not self._decoded and not self._is_over and self._num_read <= last:
            packet = next(self._packets, None)
            if packet is not None:
                packet.opaque = self._num_read
            self._num_read += 1
            self._is_over = packet is None
            self._decode(packet)
        return self._decoded[0] if self._decoded else None

    def _decode(self, packet: Packet | None) -> None:
        """None: what the decoder has kept. A packet that is damaged gives no frame."""
        try:
            given = self._stream.codec_context.decode(packet)
        except FFmpegError as error:
            if isinstance(error, MemoryError):
                raise MemoryError from None
            return
        for frame in given:
            pts = frame.dts if frame.pts is None else frame.pts
            number = frame.opaque if isinstance(frame.opaque, int) else -1
            if self.index.by_order or pts is None:
                pts, number = self._num_given, -1
            self._num_given += 1
            self._decoded.append(_Given(pts, number, frame))
