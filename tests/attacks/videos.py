"""Videos that cost more than they weigh. `number` makes each file different from the others."""

import io
import struct
from functools import cache

import av

from tests.videos import box, make

MOST_FRAMES = 250_000  # that an encoder reads of a file
_FRAME_TICKS = 128  # of 12,288 a second: all frames last 2,604 s
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def piled(number: int = 0, *, frames: int = MOST_FRAMES, frame_bytes: int | None = None) -> bytes:
    """A QuickTime file of a MiB whose frames all lie at one place, where a keyframe lies.

    Args:
        frame_bytes: size that the file gives for each frame. None for the keyframe's size.
    """
    data, offset, num_bytes = _one_frame()
    tables = {
        b"stts": struct.pack(">4I", 0, 1, frames, _FRAME_TICKS),
        b"stsz": struct.pack(">3I", 0, num_bytes if frame_bytes is None else frame_bytes, frames),
        b"stsc": struct.pack(">5I", 0, 1, 1, 1, 1),
        b"stco": struct.pack(">2I", 0, frames) + struct.pack(">I", offset) * frames,
        b"edts": None,
    }
    return _with_boxes(data, tables) + _box(b"free", b"%d" % number)


@cache
def _one_frame() -> tuple[bytes, int, int]:
    """A file of one frame, where the frame lies, and its size."""
    data = make("mov", frames=1)
    (offset,) = struct.unpack_from(">I", data, box(data, b"stco") + 8)
    (num_bytes,) = struct.unpack_from(">I", data, box(data, b"stsz") + 4)
    return data, offset, num_bytes


def _box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + name + content


def _with_boxes(data: bytes, contents: dict[bytes, bytes | None]) -> bytes:
    """The same boxes with other contents. A box whose contents are None is left out."""
    boxes, at = list[bytes](), 0
    while at < len(data):
        (size,), name = struct.unpack_from(">I", data, at), data[at + 4 : at + 8]
        content: bytes | None = data[at + 8 : at + size]
        if name in contents:
            content = contents[name]
        elif name in _CONTAINERS:
            content = _with_boxes(content, contents)
        boxes += [] if content is None else [_box(name, content)]
        at += size
    return b"".join(boxes)


def gif(number: int = 0, *, frames: int = MOST_FRAMES) -> bytes:
    """A GIF of 25 bytes a frame, of which all but the first change one pixel or none."""
    data, control = make("gif", frames=3, still=True), b"\x21\xf9\x04"
    first, last = data.index(control), data.rindex(control)
    comment = b"%d" % number
    head = data[:first] + b"!\xfe" + bytes((len(comment),)) + comment + b"\0"
    return head + data[first:last] + data[last:-1] * (frames - 2) + b";"


def ivf(number: int = 0, *, frames: int = MOST_FRAMES) -> bytes:
    """An IVF file of VP8: a keyframe, and frames of a byte that no decoder takes for one."""
    with av.open(io.BytesIO(make("vp8", frames=1)), "r") as container:
        key = next(bytes(packet) for packet in container.demux(video=0) if packet.size)
    head = struct.pack("<4sHH4sHHIIII", b"DKIF", 0, 32, b"VP80", 64, 48, 96, 1, frames, number)
    small = (struct.pack("<IQ", 1, index) + b"\x11" for index in range(1, frames))
    return head + struct.pack("<IQ", len(key), 0) + key + b"".join(small)
