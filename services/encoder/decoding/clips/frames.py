"""Decodes frames of a video by number, as a player would show them, in one forward pass.

A frame that cannot be decoded is replaced by the frame before, unless that frame is much earlier.
Frames between the requested ones are not decoded if no other frame refers to them.
Only child processes import this file.
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
    Index,
    check_amount,
    check_size,
    failures,
    opened,
    packets_of,
    read_index,
    upright_size,
)
from services.encoder.decoding.clips.questions import Facts

# A frame may be shown in the place of damaged frames for the longer of these two times.
_MAX_SHOWN_S = 1.0
_MAX_SHOWN_FRAMES = 3
# Most packets after a frame's packet before the decoder returns the frame. A gradual refresh of the
# picture takes some hundreds of packets.
_LATE_PACKETS = 1024
# Codecs whose decoders leave out the frames to which no other frame refers, if told so.
_DROPPING = {"h264"}


def probe(data: memoryview) -> Facts:
    """Reads the facts of a video file from its packets and its first frame.

    Raises:
        InvalidVideo: the first frame cannot be decoded, or the video has too many frames or pixels.
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
        key_frames=index.key_frames,
        index=index.encode(),
    )


class _Decoded(NamedTuple):
    """A frame that the decoder has returned.

    Attributes:
        pts: presentation time of the frame.
        packet: number of the frame's packet. -1 if unknown.
        frame: the frame.
    """

    pts: int
    packet: int
    frame: VideoFrame


class Frames:
    """A video file that is open for decoding.

    Args:
        data: the file, which stays in memory until `close`.
        index: frames of the file. None if all packets of the file have to be read first.

    Attributes:
        index: frames of the file, according to its packets.

    Raises:
        InvalidVideo: the file is not a video that can be decoded here.
    """

    def __init__(self, data: memoryview, index: Index | None = None) -> None:
        if index is None:
            with opened(data) as (container, stream):
                index = read_index(container, stream, len(data))
        self.index = index
        self._data = data
        frames_s = _MAX_SHOWN_FRAMES / index.rate if index.rate else 0.0
        self._max_shown_s = max(frames_s, _MAX_SHOWN_S)
        self._opened = None
        self._skips = True
        self._drops = index.codec in _DROPPING and not index.by_order
        # Presentation times of the requested frame and of the frame that is requested next.
        self._wanted = 0, 0
        self._rewind()

    def frame(self, index: int, following: int | None = None) -> VideoFrame:
        """Decodes a frame. Frames in rising order are decoded in one pass.

        Args:
            index: number of the frame, in order of presentation.
            following: number of the frame that is requested next, if it is known already.

        Raises:
            InvalidVideo: the video has no frame of this number, or the frame cannot be decoded.
        """
        if index >= self.index.num_frames:
            raise InvalidVideo(
                f"the video has {self.index.num_frames} frames, and no frame {index}"
            )
        entry = self.index.entry(index)
        last = min(max(following or 0, index), self.index.num_frames - 1)
        self._wanted = entry.pts, self.index.entry(last).pts
        with failures():
            found = self._found(entry)
            if self._drops and not self._is_exact(entry):
                self._drops = False
                self._rewind()
                found = self._found(entry)
        if found is None:
            raise InvalidVideo(f"frame {index} of the video cannot be decoded")
        check_size(found.height, found.width)
        return found

    def close(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            # A thread of the decoder that releases a packet (`copy_opaque`) waits for the
            # interpreter lock, which is held while the decoder is freed. Flushing releases the
            # packets before.
            self._stream.codec_context.flush_buffers()
            self._opened.__exit__(None, None, None)
            self._opened = None

    def _found(self, entry: Entry) -> VideoFrame | None:
        place = entry.pts, -1 if self.index.by_order else entry.packet
        if self._shown is not None and self._shown[:2] > place:
            self._rewind()
        if self._skips and entry.start > self._num_packets:
            self._skip(entry.start)
        while self._shown is None or self._shown[:2] < place:
            following = self._peek(entry.packet)
            if following is None or following.pts > entry.pts:
                break
            # An edit list may give two frames the same time. Their packets distinguish them.
            is_second = self._shown is not None and self._shown.pts == following.pts
            if is_second and following.packet > entry.packet:
                break
            self._shown = self._decoded.popleft()
        if self._shown is None:
            return None
        behind_s = float((entry.pts - self._shown.pts) * self.index.time_base)
        return self._shown.frame if behind_s <= self._max_shown_s else None

    def _is_exact(self, entry: Entry) -> bool:
        """Returns whether the shown frame is what the decoder returns if it leaves out no frames.

        A frame that is shown in the place of the entry's frame must not depend on the frames that
        were left out. And the two fields of an interlaced frame may have packets of their own. The
        decoder may then return the frame too early, with the first field in place of the second.
        """
        shown = self._shown
        return (
            shown is not None and shown.packet == entry.packet and not shown.frame.interlaced_frame
        )

    def _rewind(self) -> None:
        self.close()
        self._opened = opened(self._data)
        container, stream = self._opened.__enter__()
        self._stream: VideoStream = stream
        stream.codec_context.copy_opaque = True
        self._packets: Iterator[Packet] = packets_of(container, stream)
        self._num_packets = 0  # number of packets read
        self._num_decoded = 0  # number of frames that the decoder has returned
        self._decoded: deque[_Decoded] = deque()  # frames that are not shown yet
        self._shown: _Decoded | None = None
        self._is_over = False
        self._is_dropping = False

    def _skip(self, packet: int) -> None:
        """Skips the packets before a keyframe's packet without decoding them.

        If the packet only begins a gradual refresh of the picture, the decoder returns no frame for
        it, and some of the next frames would be wrong. In this case decoding starts again at the
        beginning of the file, without skipping.
        """
        while self._num_packets < packet and next(self._packets, None) is not None:
            self._num_packets += 1
        self._stream.codec_context.flush_buffers()
        self._decoded.clear()
        self._shown = None
        first = self._peek(packet)
        if first is None or first.packet not in (packet, -1):
            self._skips = False
            self._rewind()

    def _peek(self, wanted: int) -> _Decoded | None:
        """Returns the next frame from the decoder, without removing it.

        Args:
            wanted: number of the packet whose frame is sought.

        Returns:
            None at the end of the file, or if the decoder has read 1024 packets after `wanted` and
            thus will not return that packet's frame.
        """
        last = wanted + _LATE_PACKETS
        while not self._decoded and not self._is_over and self._num_packets <= last:
            packet = next(self._packets, None)
            if packet is not None:
                packet.opaque = self._num_packets
                self._set_dropping(packet)
            self._num_packets += 1
            self._is_over = packet is None
            self._decode(packet)
        return self._decoded[0] if self._decoded else None

    def _set_dropping(self, packet: Packet) -> None:
        """Tells the decoder whether it may leave out the packet's frame. It may if the frame is
        shown before the requested frames or between them, since frames are requested in rising
        order. It decodes the frame nevertheless if other frames refer to it.
        """
        first, last = self._wanted
        pts = packet.pts
        is_dropping = self._drops and pts is not None and (pts < first or first < pts < last)
        if is_dropping != self._is_dropping:
            self._stream.codec_context.skip_frame = "NONREF" if is_dropping else "DEFAULT"
            self._is_dropping = is_dropping

    def _decode(self, packet: Packet | None) -> None:
        """Decodes a packet, or flushes the decoder if `packet` is None. A damaged packet is
        ignored.
        """
        try:
            decoded = self._stream.codec_context.decode(packet)
        except FFmpegError as error:
            if isinstance(error, MemoryError):
                raise MemoryError from None
            return
        for frame in decoded:
            pts = frame.dts if frame.pts is None else frame.pts
            number = frame.opaque if isinstance(frame.opaque, int) else -1
            if self.index.by_order or pts is None:
                pts, number = self._num_decoded, -1
            self._num_decoded += 1
            self._decoded.append(_Decoded(pts, number, frame))
