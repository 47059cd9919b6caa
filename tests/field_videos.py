"""H.264 videos of field pictures, which none of PyAV's encoders makes. Their macroblocks are stored
as plain samples (I_PCM), so that no coder is needed.
"""

import io
from fractions import Fraction

import av

_SLICE, _IDR, _SEQUENCE, _PICTURE = 1, 5, 7, 8  # types of NAL units


class _Bits:
    """The payload of a NAL unit, as text of zeros and ones."""

    def __init__(self) -> None:
        self._bits = ""

    def put(self, *fields: tuple[int, int]) -> "_Bits":
        """Appends numbers of fixed length: (value, number of bits)."""
        self._bits += "".join(f"{value:0{length}b}" for value, length in fields)
        return self

    def golomb(self, *values: int) -> "_Bits":
        """Appends unsigned Exp-Golomb codes."""
        for value in values:
            code = f"{value + 1:b}"
            self._bits += "0" * (len(code) - 1) + code
        return self

    def align(self) -> "_Bits":
        self._bits += "0" * (-len(self._bits) % 8)
        return self

    def unit(self, kind: int, *, is_reference: bool = True) -> bytes:
        """Returns the NAL unit, with its start code and emulation prevention."""
        self.put((1, 1)).align()
        unit, num_zeros = bytearray(), 0
        for byte in int(self._bits, 2).to_bytes(len(self._bits) // 8, "big"):
            if num_zeros == 2 and byte <= 3:
                unit.append(3)
                num_zeros = 0
            unit.append(byte)
            num_zeros = 0 if byte else num_zeros + 1
        return bytes((0, 0, 0, 1, 96 * is_reference | kind)) + unit


def _parameters() -> bytes:
    """Sets of parameters of frames of 16 x 32 pixels, one macroblock for each field."""
    sequence = _Bits().put((77, 8), (0, 8), (30, 8)).golomb(0, 4)  # frame_num has 8 bits
    sequence.golomb(0, 4, 2).put((0, 1)).golomb(0, 0)  # order count of 8 bits, 2 references
    sequence.put((0, 2), (1, 1), (0, 1))  # fields are allowed, and the picture is not cropped
    sequence.put((1, 1), (0, 8), (3, 2)).golomb(0, 0, 9, 9, 1, 2)  # at most 1 frame is reordered
    picture = _Bits().golomb(0, 0).put((0, 2)).golomb(0, 0, 0).put((0, 3)).golomb(0, 0, 0)
    return sequence.unit(_SEQUENCE) + picture.put((1, 1), (0, 2)).unit(_PICTURE)


def _field(frame: int, bottom: int) -> bytes:
    """A field of one colour. Frames with odd numbers are no references."""
    is_reference, is_idr = frame % 2 == 0, frame == bottom == 0
    frame_num = frame // 2 + 2 * (frame % 2)  # number of references that are decoded before
    field = _Bits().golomb(0, 7, 0).put((frame_num % 256, 8), (1, 1), (bottom, 1))
    if is_idr:
        field.golomb(0)
    field.put(((2 * frame + bottom) % 256, 8))
    if is_reference:
        field.put((0, 2 if is_idr else 1))
    field.golomb(0, 1, 25).align()  # the filter is off, and the macroblock is I_PCM
    luma = 20 + (8 * frame + 100 * bottom) % 220
    field.put(*[(luma, 8)] * 256, *[(128, 8)] * 128)
    return field.unit(_IDR if is_idr else _SLICE, is_reference=is_reference)


def fields(container: str, num_frames: int) -> bytes:
    """A video of 25 frames a second, with a packet and a time for each field. Every other frame is
    decoded after the frame behind it, and no frame refers to it.

    Args:
        container: FFmpeg's name of the muxer.
        num_frames: number of frames, an odd number.
    """
    order = [0] + [at for last in range(2, num_frames, 2) for at in (last, last - 1)]
    packets = [(2 * frame + bottom, _field(frame, bottom)) for frame in order for bottom in (0, 1)]
    packets[0] = 0, _parameters() + packets[0][1]
    file = io.BytesIO()
    raw = io.BytesIO(b"".join(data for _, data in packets))
    with av.open(raw, format="h264") as source, av.open(file, "w", format=container) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, (pts, data) in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 50)
            packet.pts, packet.dts, packet.is_keyframe = pts, number - 2, number == 0
            target.mux(packet)
    return file.getvalue()
