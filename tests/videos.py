"""Video files for tests, made by PyAV; what is odd about them is made here, too."""

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

Size = tuple[int, int]  # (height, width)
# Container, its encoder and pixel format.
KINDS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "mpeg4", "yuv420p"),
    "hevc 10 bits": ("mp4", "libx265", "yuv420p10le"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "vp8": ("webm", "libvpx", "yuv420p"),
    "matroska": ("matroska", "libx264", "yuv420p"),
    "avi": ("avi", "libx264", "yuv420p"),
    "asf": ("asf", "wmv2", "yuv420p"),
    "transport stream": ("mpegts", "libx264", "yuv420p"),
    "program stream": ("mpeg", "mpeg2video", "yuv420p"),
    "flv": ("flv", "flv", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
    "apng": ("apng", "apng", "rgba"),
    "lossless": ("matroska", "ffv1", "yuv444p"),
}
_OPTIONS = {
    "libx264": {"preset": "ultrafast", "bf": "2", "x264-params": "log-level=-1"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=-1"},
    "libvpx": {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "realtime"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
}


def picture(index: int, size: Size) -> np.ndarray:
    """RGB `[height, width, 3]`: a square walks over a ground whose colour tells the index."""
    height, width = size
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = 8 * index % 256
    pixels[..., 1] = np.linspace(0, 255, width).astype(np.uint8)
    pixels[..., 2] = np.linspace(255, 0, height).astype(np.uint8)[:, None]
    left = 5 * index % max(width - 8, 1)
    pixels[height // 4 : height // 4 + 8, left : left + 8] = 255
    return pixels


def make(
    kind: str = "mp4",
    *,
    frames: int = 24,
    size: Size = (48, 64),
    rate: Fraction | int = 12,
    times: Sequence[int] | None = None,
    rotation: int = 0,
    still: bool = False,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A video of `picture`s, or of the first alone; `times`: of frames, in periods of `rate`."""
    name, codec, pixel_format = KINDS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=name, container_options=container_options or {}) as container:
        stream = container.add_stream(
            codec, rate=rate, options=_OPTIONS.get(codec, {}) | (options or {})
        )
        stream.height, stream.width = size
        stream.pix_fmt = pixel_format
        if rotation:
            stream.set_display_rotation(rotation)
        for packet in _packets(stream, [0] * frames if still else range(frames), size, times):
            container.mux(packet)
    return file.getvalue()


def _packets(
    stream: av.VideoStream, pictures: Sequence[int], size: Size, times: Sequence[int] | None
) -> Iterator[av.Packet]:
    for index, number in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
        frame = frame.reformat(format=stream.pix_fmt)
        frame.pts = index if times is None else times[index]
        yield from stream.encode(frame)
    yield from stream.encode()


def av1() -> bytes:
    """An MP4 of 24 `picture`s, 12 a second, keyframes each 6, by libsvtav1 of PyAV 18.1: a file,
    for that encoder gives the process that calls it real-time priority.
    """
    return (Path(__file__).parent / "fixtures" / "av1.mp4").read_bytes()


def sound() -> bytes:
    """An MP4 without a picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return file.getvalue()


def decoded(data: bytes) -> list[np.ndarray]:
    """All frames as PyAV gives them, `[height, width, 3]`, neither turned nor blended."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def patched(data: bytes, *changes: tuple[bytes, bytes]) -> bytes:
    """With other bytes in place of some that are there once or more."""
    for old, new in changes:
        assert old in data and len(old) == len(new)
        data = data.replace(old, new)
    return data


def index_first(data: bytes) -> bytes:
    """An MP4 of ours with its index (moov) before its data."""
    moov_at, mdat_at = data.index(b"moov") - 4, data.index(b"mdat") - 4
    assert mdat_at < moov_at
    moov = bytearray(data[moov_at:])
    at = moov.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", moov, at)
    for place in range(at + 4, at + 4 + 4 * count, 4):
        (offset,) = struct.unpack_from(">I", moov, place)
        struct.pack_into(">I", moov, place, offset + len(moov))
    return data[:mdat_at] + bytes(moov) + data[mdat_at:moov_at]


def box(data: bytes, name: bytes) -> int:
    """Where the contents of an MP4's first box of that name begin."""
    return data.index(name) + 4


def cut(data: bytes, frames: int) -> bytes:
    """An MP4 or MOV of ours, 12 frames a second, whose edit list begins that many frames later: as
    phones cut, and FFmpeg with `-ss` and `-c copy`.
    """
    at = box(data, b"elst")
    version, count, duration, start = struct.unpack_from(">4I", data, at)
    assert (version, count) == (0, 1)
    later = struct.pack(">II", duration - frames * 1000 // 12, start + frames * 1024)
    return data[: at + 8] + later + data[at + 16 :]


def segments(data: bytes, *edits: tuple[int, int]) -> bytes:
    """An MP4 of ours, 12 frames a second, whose edit list has these segments.

    Args:
        edits: milliseconds of each, and where it begins: a frame.
    """
    at, out = box(data, b"elst"), bytearray(data)
    _, count = struct.unpack_from(">2I", data, at)
    entries = [struct.pack(">IIHH", ms, 1024 * (1 + frame), 1, 0) for ms, frame in edits]
    for name in (b"elst", b"edts", b"trak", b"moov"):
        place = box(data, name) - 8
        (size,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", out, place, size + 12 * (len(edits) - count))
    out[at : at + 8 + 12 * count] = struct.pack(">2I", 0, len(edits)) + b"".join(entries)
    return bytes(out)
