"""Frames of videos by index: which there are, and that they are those which PyAV decodes."""

import io
import struct
import subprocess
import sys
from contextlib import closing, suppress
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from services.common.errors import InvalidVideo
from services.common.images.image_key import FRAME_DIGEST_BYTES
from services.encoder.decoding.clips.container import Index, to_rgb, upright_size
from services.encoder.decoding.clips.frames import Frames, probe
from services.encoder.decoding.clips.questions import Facts
from tests.field_videos import fields
from tests.noise import PATIENCE_S
from tests.videos import (
    KINDS,
    av1,
    box,
    cut,
    decoded,
    index_first,
    make,
    patched,
    picture,
    segments,
    sound,
)


def pixels(frames: Frames, index: int, following: int | None = None) -> np.ndarray:
    frame = frames.frame(index, following)
    out = np.empty((*upright_size(frame), 3), np.uint8)
    to_rgb(frame, out)
    return out


def facts_of(data: bytes) -> Facts:
    return probe(memoryview(data))


def digests(data: bytes) -> list[bytes]:
    found = facts_of(data).frame_digests
    return [found[at : at + FRAME_DIGEST_BYTES] for at in range(0, len(found), FRAME_DIGEST_BYTES)]


@pytest.mark.parametrize("kind", [*KINDS, "av1"])
def test_frames_by_index_are_those_of_a_player(kind: str) -> None:
    """In any order, whatever is between them, beyond keyframes and behind B-frames."""
    data = av1() if kind == "av1" else make(kind, options={"g": "6"})
    expected = decoded(data)
    facts = facts_of(data)
    assert facts.num_frames == 24
    # A GIF's times are hundredths of seconds.
    assert facts.rate == (12.0 if kind != "gif" else pytest.approx(12, rel=0.002))
    assert (facts.height, facts.width) == (48, 64)
    assert facts.duration_s == pytest.approx(2.0, abs=0.02)
    assert len(set(digests(data))) >= 8 and len(digests(data)) == 24
    with closing(Frames(memoryview(data))) as frames:
        for index in (0, 1, 1, 5, 13, 23, 2, 22, 23):
            assert np.array_equal(pixels(frames, index), expected[index]), index
        with pytest.raises(InvalidVideo, match="has 24 frames, and no frame 24"):
            frames.frame(24)


@pytest.mark.parametrize("kind", [*KINDS, "av1"])
def test_frames_from_a_key_frame_on_are_decoded_without_those_before(kind: str) -> None:
    """Each range has the pixels that one pass has, so that encoders may share a file."""
    data = av1() if kind == "av1" else make(kind, options={"g": "6"})
    expected = decoded(data)
    keys = np.frombuffer(facts_of(data).key_frames, "<i4").tolist()
    if kind in ("mp4", "mov", "matroska", "webm", "transport stream", "av1"):
        assert keys == [6, 12, 18]
    if kind in ("avi", "gif", "apng", "asf", "flv", "lossless"):
        assert not keys  # The order of frames, or the decoder, needs all frames before.
    for start in keys:
        with closing(Frames(memoryview(data))) as frames:
            for index in range(start, 24):
                assert np.array_equal(pixels(frames, index), expected[index]), index


@pytest.mark.parametrize(
    "params",
    [
        "bframes=2",
        "bframes=8:b-adapt=0:b-pyramid=none",
        "bframes=3:b-adapt=0:b-pyramid=normal:ref=4",
        "bframes=3:b-adapt=0:b-pyramid=strict:slices=3",
        "bframes=3:b-adapt=0:open-gop=1",
        "bframes=3:b-adapt=0:tff=1",
    ],
)
@pytest.mark.parametrize("kind", ["mp4", "matroska", "transport stream"])
def test_frames_to_which_no_frame_refers_are_not_decoded(kind: str, params: str) -> None:
    """Pairs of frames have the pixels of a player, with any distance and with steps back."""
    options = {"preset": "medium", "x264-params": f"log-level=-1:keyint=30:{params}"}
    data = make(kind, frames=72, options=options)
    expected, index = decoded(data), Index.decode(facts_of(data).index)
    for apart in (1, 2, 5, 12):
        with closing(Frames(memoryview(data), index)) as frames:
            for first in (*range(0, 72 - apart, 2 * apart), 31, 3):
                pair = first, first + apart
                for at in pair:
                    assert np.array_equal(pixels(frames, at, pair[1]), expected[at]), (apart, at)


@pytest.mark.parametrize("container", ["mpegts", "matroska", "mov"])
def test_both_fields_of_a_requested_frame_are_decoded(container: str) -> None:
    """The index has two frames for each pair of fields, if each field has a packet and a time."""
    data = fields(container, 25)
    with closing(Frames(memoryview(data))) as frames:
        frames._drops = False  # pyright: ignore[reportPrivateUsage]
        expected = [pixels(frames, index) for index in range(40)]
    assert not np.array_equal(expected[2][::2], expected[2][1::2])  # of two colours
    for apart in (1, 4, 5):
        for start in range(8):
            with closing(Frames(memoryview(data))) as frames:
                for first in range(start, 40 - apart, 2 * apart):
                    for index in (first, first + apart):
                        found = pixels(frames, index, first + apart)
                        assert np.array_equal(found, expected[index]), (apart, start, index)


def test_half_of_the_frames_need_not_be_decoded() -> None:
    params = "log-level=-1:bframes=3:b-adapt=0:b-pyramid=normal:keyint=240"
    data = make(frames=120, options={"preset": "medium", "x264-params": params})
    num_decoded = list[int]()
    for is_dropping in (False, True):
        with closing(Frames(memoryview(data))) as frames:
            frames._drops = is_dropping  # pyright: ignore[reportPrivateUsage]
            for first in range(0, 90, 30):
                frames.frame(first, first + 15)
                frames.frame(first + 15, first + 15)
            num_decoded.append(frames._num_decoded)  # pyright: ignore[reportPrivateUsage]
    assert num_decoded[1] < 0.75 * num_decoded[0], num_decoded


def test_a_damaged_frame_is_replaced_by_the_frame_before_even_if_no_frame_refers_to_it() -> None:
    params = "log-level=-1:bframes=1:b-adapt=0:keyint=240"
    data = bytearray(make(frames=24, options={"preset": "medium", "x264-params": params}))
    with av.open(io.BytesIO(bytes(data)), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    shown = sorted(packets, key=lambda packet: packet.pts or 0)
    for packet in shown[10:12]:  # one of them is a B-frame
        assert packet.pos is not None
        data[packet.pos : packet.pos + packet.size] = bytes(packet.size)
    with closing(Frames(memoryview(data))) as frames:
        frames._drops = False  # pyright: ignore[reportPrivateUsage]
        wanted = [pixels(frames, index) for index in (2, 11, 20)]
    with closing(Frames(memoryview(data))) as frames:
        for index, expected in zip((2, 11, 20), wanted, strict=True):
            assert np.array_equal(pixels(frames, index), expected), index
        assert not frames._drops  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("kind", ["mp4", "mov", "hevc 10 bits"])
@pytest.mark.parametrize("options", [{"g": "6", "bf": "2"}, {"g": "24", "bf": "0"}])
@pytest.mark.parametrize("frames_cut", [1, 2, 3, 8])
def test_a_video_may_be_cut_anywhere(kind: str, options: dict[str, str], frames_cut: int) -> None:
    """Its first frames need some that are not shown, the keyframe among them."""
    data = cut(make(kind, options=options), frames_cut)
    expected = decoded(data)
    facts = facts_of(data)
    assert facts.num_frames == len(expected) == 24 - frames_cut
    assert facts.rate == 12.0
    assert facts.duration_s == pytest.approx((24 - frames_cut) / 12, abs=0.02)
    with closing(Frames(memoryview(data))) as frames:
        for index in (0, 1, 5, 13, 2, facts.num_frames - 1, 0):
            assert np.array_equal(pixels(frames, index), expected[index]), index


@pytest.mark.parametrize("kind", ["mp4", "transport stream"])
@pytest.mark.parametrize("frames_apart", [1, 5, 19])
def test_keyframes_of_a_gradual_refresh_are_no_pictures(kind: str, frames_apart: int) -> None:
    """As live encoders and cameras make them: a decoder that starts there gives nothing until the
    picture is whole.
    """
    options = {"x264-params": "log-level=-1:intra-refresh=1:keyint=6:bframes=0"}
    data = make(kind, frames=60, options=options)
    expected = decoded(data)
    with closing(Frames(memoryview(data))) as frames:
        for index in (*range(0, 60, frames_apart), 2, 58, 31):
            assert np.array_equal(pixels(frames, index), expected[index]), index


def test_a_decoder_is_freed_while_its_threads_work() -> None:
    """In a process of its own: one of some hundreds hung, its threads and the interpreter waiting
    for each other.
    """
    rewind = (
        "from contextlib import closing\n"
        "from services.encoder.decoding.clips.frames import Frames; from tests.videos import av1\n"
        "with closing(Frames(memoryview(av1()))) as frames:\n"
        "    for index in (4, 0) * 1000: frames.frame(index)\n"
    )
    subprocess.run([sys.executable, "-c", rewind], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "edits", [((500, 6), (500, 0)), ((500, 0), (500, 6)), ((900, 0), (900, 5))]
)
def test_segments_of_an_edit_list_may_overlap(edits: tuple[tuple[int, int], ...]) -> None:
    """The first ones' join shows two frames at one time."""
    data = segments(make(options={"g": "6"}), *edits)
    shown = decoded(data)
    assert facts_of(data).num_frames == len(shown)
    with closing(Frames(memoryview(data))) as frames:
        for index in [*range(len(shown)), *reversed(range(len(shown)))]:
            assert np.array_equal(pixels(frames, index), shown[index])


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_rotation_is_applied(turn: int) -> None:
    data = make(rotation=turn)
    facts = facts_of(data)
    assert (facts.height, facts.width) == ((48, 64) if turn == 180 else (64, 48))
    with closing(Frames(memoryview(data))) as frames:
        assert np.array_equal(pixels(frames, 3), np.rot90(decoded(data)[3], turn // 90))


def test_a_mirrored_video_is_mirrored_back() -> None:
    data = make(rotation=180)
    at = data.index(struct.pack(">3i", -(1 << 16), 0, 0))
    mirrored = data[:at] + struct.pack(">i", 1 << 16) + data[at + 4 :]
    with closing(Frames(memoryview(mirrored))) as frames:
        assert np.array_equal(pixels(frames, 3), decoded(data)[3][::-1])


def test_alpha_is_composited_on_white() -> None:
    data = make("apng", frames=3)
    at = data.index(b"IHDR")
    assert data[at + 12 : at + 14] == b"\x08\x06"
    with closing(Frames(memoryview(data))) as frames:  # opaque
        assert np.array_equal(pixels(frames, 1), decoded(data)[1])


def test_an_apng_whose_first_frame_is_blended_over_nothing() -> None:
    """It has no keyframe."""
    pictures = [Image.fromarray(picture(index, (48, 64))).convert("RGBA") for index in range(4)]
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], blend=1)
    facts = facts_of(file.getvalue())
    assert facts.num_frames == 4
    with closing(Frames(memoryview(file.getvalue()))) as frames:
        assert np.array_equal(pixels(frames, 3), picture(3, (48, 64)))


@pytest.mark.parametrize("kind", ["transport stream", "program stream", "webm"])
def test_files_that_were_joined_are_shown_one_after_the_other(kind: str) -> None:
    """Each starts its clock anew."""
    data = make(kind, rate=25) + make(kind, rate=25, frames=30)
    shown, facts = decoded(data), facts_of(data)
    assert (facts.num_frames, facts.rate) == (54, 25.0)
    assert facts.duration_s == pytest.approx(54 / 25, abs=0.02)
    with closing(Frames(memoryview(data))) as frames:
        for index in (0, 1, 23, 24, 25, 53, 3):
            assert np.array_equal(pixels(frames, index), shown[index])


def test_times_vary_and_the_average_rate_is_that_of_the_frames() -> None:
    times = [0, 1, 2, 3, 12, 13, 30, 31, 40, 60]
    data = make(frames=10, times=times, options={"bf": "0"})
    facts = facts_of(data)
    assert facts.num_frames == 10
    assert facts.rate == pytest.approx(9 / (60 / 12), rel=0.12)
    expected = decoded(data)
    with closing(Frames(memoryview(data))) as frames:
        assert all(np.array_equal(pixels(frames, i), expected[i]) for i in (0, 4, 9, 5))


def test_a_rate_of_ntsc_is_exact() -> None:
    assert facts_of(make(rate=Fraction(30000, 1001))).rate == 30000 / 1001


def test_a_header_that_lies_about_its_rate_and_count_is_not_believed() -> None:
    data = make()
    at = box(data, b"stts")
    assert struct.unpack_from(">II", data, at + 4)[0] == 1  # one run of samples of one duration
    webm = make("webm")  # says no count at all
    assert facts_of(webm).num_frames == 24
    cut = webm[: len(webm) * 2 // 3]
    facts = facts_of(cut)
    assert 4 < facts.num_frames < 24 and facts.rate == pytest.approx(12, rel=0.02)


def test_a_truncated_file_has_the_frames_that_are_there() -> None:
    data = index_first(make(options={"bf": "0"}))
    cut = data[: len(data) * 2 // 3]
    facts = facts_of(cut)
    assert 4 < facts.num_frames < 24
    expected = decoded(data)
    with closing(Frames(memoryview(cut))) as frames:
        last = facts.num_frames - 1
        assert np.array_equal(pixels(frames, last), expected[last])


def test_an_index_at_the_end_that_is_missing_is_an_error() -> None:
    data = make()
    with pytest.raises(InvalidVideo, match="truncated or corrupt"):
        facts_of(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif"])
def test_one_frame(kind: str) -> None:
    data = make(kind, frames=1)
    facts = facts_of(data)
    assert facts.num_frames == 1
    with closing(Frames(memoryview(data))) as frames:
        assert np.array_equal(pixels(frames, 0), decoded(data)[0])


def test_a_longer_cut_shares_the_digests_of_the_frames_in_common() -> None:
    short = make("webm", frames=24, options={"lag-in-frames": "0", "auto-alt-ref": "0"})
    longer = make("webm", frames=36, options={"lag-in-frames": "0", "auto-alt-ref": "0"})
    other = make("webm", frames=24, options={"lag-in-frames": "0", "auto-alt-ref": "0", "g": "5"})
    assert digests(longer)[:24] == digests(short)
    assert digests(other)[12:] != digests(short)[12:]
    assert len(set(digests(longer))) == 36


def test_frames_that_cannot_be_decoded_are_the_ones_before() -> None:
    data = bytearray(make("lossless", options={"g": "1", "slicecrc": "1"}))
    whole = decoded(bytes(data))
    facts = facts_of(bytes(data))
    at = len(data) // 2  # within some frame
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert facts_of(bytes(data)).num_frames == facts.num_frames
    with closing(Frames(memoryview(bytes(data)))) as frames:
        found = [pixels(frames, index) for index in range(facts.num_frames)]
    wrong = [index for index, (a, b) in enumerate(zip(found, whole, strict=True)) if (a != b).any()]
    assert len(wrong) <= 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a video in a"),
        (b"\x89PNG", "is not a video in a"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + bytes(40), "is not a video in a"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is not a video in a"),
        (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\n", "is not a video in a"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not a video in a"),
        (b"<?xml version='1.0'?><MPD></MPD>", "is not a video in a"),
        (b"\x1aE\xdf\xa3" + bytes(100), "truncated or corrupt"),
        (b"\0\0\0\x18ftypisom" + bytes(100), "truncated or corrupt"),
        (b"FLV\x01\x05\0\0\0\x09" + bytes(20), "truncated or corrupt"),
        (b"OggS" + bytes(64), "truncated or corrupt"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidVideo, match=message):
        facts_of(data)


def test_sound_alone_is_refused() -> None:
    with pytest.raises(InvalidVideo, match="no video stream"):
        facts_of(sound())


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "apng", "avi"])
def test_a_declared_size_beyond_the_limit_is_refused(kind: str) -> None:
    """And a frame that small is not taken for one that large."""
    data = make(kind, frames=2, size=(48, 64))
    changes = {
        "mp4": [(struct.pack(">HH", 64, 48), struct.pack(">HH", 60000, 60000))],
        "webm": [(b"\xb0\x81\x40", b"\xb0\x81\xff")],
        "gif": [(struct.pack("<HH", 64, 48), struct.pack("<HH", 65000, 65000))],
        "apng": [(struct.pack(">II", 64, 48), struct.pack(">II", 60000, 60000))],
        "avi": [(struct.pack("<II", 64, 48), struct.pack("<II", 60000, 60000))],
    }[kind]
    odd = patched(data, *changes)
    try:
        facts = facts_of(odd)
    except InvalidVideo:
        return
    assert (facts.height, facts.width) == (48, 64)  # the packets say so


def test_other_files_are_not_opened(tmp_path, monkeypatch) -> None:
    """An MP4 may name another file for its data (`dref`)."""
    data = make()
    at = data.index(b"url \0\0\0\x01")
    # "in this file" is cleared, so that the box names a file: an empty one.
    odd = data[: at + 7] + b"\0" + data[at + 8 :]
    monkeypatch.chdir(tmp_path)
    with suppress(InvalidVideo):
        assert facts_of(odd).num_frames == 24


@pytest.mark.parametrize("kind", [*KINDS, "av1"])
def test_an_index_that_another_process_has_read_gives_the_same_frames(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packets before a frame's key frame are skipped, and no other packet is read."""
    data = av1() if kind == "av1" else make(kind, options={"g": "6"})
    expected, encoded = decoded(data), facts_of(data).index
    monkeypatch.setattr("services.encoder.decoding.clips.frames.read_index", None)
    for order in ((0, 1, 7, 23), (13, 22, 3), (23,)):
        with closing(Frames(memoryview(data), Index.decode(memoryview(encoded)))) as frames:
            for index in order:
                assert np.array_equal(pixels(frames, index), expected[index]), index
            with pytest.raises(InvalidVideo, match="has 24 frames, and no frame 24"):
                frames.frame(24)
