"""Decoding in processes: the same pixels, limits for each image; a bad image ends no other."""

import io
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from services.common.errors import InvalidImage
from services.common.images.image_header import Format, ImageHeader, read_header
from services.encoder.decoding import child
from services.encoder.decoding.child import Child, ChildLost
from services.encoder.decoding.decode import worst_case_bytes
from services.encoder.decoding.decode_pool import DecodePool, MemoryBudget, cpu_limit_s, decode_in
from services.encoder.decoding.decode_worker import Task
from tests.cases import first
from tests.descriptors import num_memories
from tests.in_process_decoder import InProcessDecoders
from tests.noise import PATIENCE_S, wait_until
from tests.worker_pids import worker_pids

MAX_PIXELS = 52_000_000
Pair = tuple[socket.socket, socket.socket]


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def read(data: bytes) -> ImageHeader:
    return read_header(data, max_source_pixels=MAX_PIXELS)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(2, memory_bytes=4 << 30)
    yield pool
    pool.close()


def shape_of(pool: DecodePool, data: bytes) -> tuple[int, ...]:
    with pool.decoded(data, read(data)) as pixels:
        return pixels.shape


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_pixels_are_the_twins(pool: DecodePool, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if kind == "GIF" else {"exif": exif.tobytes()}
    for size in ((1, 1), (40, 30), (700, 300)):
        data = encoded(noise(*size), kind, **options)
        header = read(data)
        with pool.decoded(data, header) as ours, InProcessDecoders().decoded(data, header) as twins:
            assert np.array_equal(ours, twins)


def test_threads_get_their_own_images(pool: DecodePool) -> None:
    colors = [(red, 10, 200) for red in range(0, 250, 10)]
    files = [encoded(Image.new("RGB", (300, 200), color)) for color in colors]

    def first_pixel(data: bytes) -> tuple[int, ...]:
        with pool.decoded(data, read(data)) as pixels:
            assert (pixels == pixels[0, 0]).all()
            return tuple(int(value) for value in pixels[0, 0])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(first_pixel, files)) == colors


def test_an_image_over_its_time_is_invalid_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The large image takes ten times its CPU time, the small one a hundredth."""
    monkeypatch.setattr(child, "_WALL_FACTOR", PATIENCE_S / 0.05)
    pool = DecodePool(1, memory_bytes=4 << 30, cpu_s=0.05)
    try:
        slow, quick = encoded(Image.new("RGB", (6000, 6000))), encoded(noise(8, 8))
        for _ in range(2):
            before = worker_pids(pool)
            with pytest.raises(InvalidImage, match="more time"):
                shape_of(pool, slow)
            assert worker_pids(pool) != before
            assert shape_of(pool, quick) == (8, 8, 3)
    finally:
        pool.close()


def test_an_image_over_its_memory_is_invalid_and_its_decoder_lives(pool: DecodePool) -> None:
    before = worker_pids(pool)
    data = encoded(Image.new("RGB", (6000, 6000)))
    with pytest.raises(InvalidImage, match="memory"):
        decode_in(pool.workers[0], data, Task(read(data), memory_bytes=1, cpu_s=10.0))
    assert worker_pids(pool) == before
    small = encoded(noise(8, 8))
    task = Task(read(small), memory_bytes=1 << 20, cpu_s=10.0)
    assert decode_in(pool.workers[0], small, task).shape == (8, 8, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("num_kills", first(1, [2, 1]))
def test_an_image_whose_decoder_is_killed_is_tried_once_more(num_kills: int) -> None:
    """The kernel kills decoders first where a pod's memory is short, whatever took it."""
    pool = DecodePool(1, memory_bytes=4 << 30)
    (worker,) = pool.workers
    slow, quick = encoded(Image.new("RGB", (6000, 6000))), encoded(noise(8, 8))
    try:
        with ThreadPoolExecutor(1) as threads:
            decoding = threads.submit(shape_of, pool, slow)
            killed: set[int] = set()
            while len(killed) < num_kills:
                pid = worker.pid
                if worker.is_ready and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            if num_kills == 1:
                assert decoding.result(PATIENCE_S) == (6000, 6000, 3)
            else:
                with pytest.raises(InvalidImage, match="more time or memory"):
                    decoding.result(PATIENCE_S)
        for _ in range(2):  # while it starts, and perhaps while it is idle
            os.kill(worker.pid, signal.SIGKILL)
            assert shape_of(pool, quick) == (8, 8, 3)
    finally:
        pool.close()


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The sockets of all children that are started from now on."""
    made: list[Pair] = []

    def socketpair() -> Pair:
        made.append(original())
        return made[-1]

    original = socket.socketpair
    monkeypatch.setattr(child.socket, "socketpair", socketpair)
    return made


def test_a_child_that_cannot_be_started_leaves_no_descriptor(
    tmp_path: Path, pairs: list[Pair]
) -> None:
    """A pool tries again with each of its files."""
    before = num_memories()
    for _ in range(5):
        with pytest.raises(FileNotFoundError):
            Child("services.encoder.decoding.decode_worker", 4096, str(tmp_path / "python"))
    assert num_memories() == before
    assert len(pairs) == 5 and all(end.fileno() < 0 for pair in pairs for end in pair)


@pytest.mark.parametrize("error", ["cut", "bits"])
def test_bad_files_are_invalid(pool: DecodePool, error: str) -> None:
    data = encoded(noise(300, 200))
    bad = data[: len(data) // 2] if error == "cut" else data[:-40] + bytes(40)
    before = worker_pids(pool)
    with pytest.raises(InvalidImage, match="truncated or corrupt"):
        shape_of(pool, bad)
    assert worker_pids(pool) == before


LARGE = {
    "png": ("RGB", "PNG", {}), "png rgba": ("RGBA", "PNG", {}), "png palette": ("P", "PNG", {}),
    "png 1 bit": ("1", "PNG", {}), "gif": ("P", "GIF", {}), "webp": ("RGB", "WEBP", {}),
    "webp lossless": ("RGBA", "WEBP", {"lossless": True}), "jpeg": ("RGB", "JPEG", {}),
    "jpeg grey": ("L", "JPEG", {}), "jpeg cmyk": ("CMYK", "JPEG", {}),
    "progressive": ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
    "progressive cmyk": ("CMYK", "JPEG", {"progressive": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_no_format_needs_more_than_its_worst_case(pool: DecodePool, name: str) -> None:
    """Else the limit of the process would refuse it."""
    mode, kind, options = LARGE[name]
    exif = Image.Exif()
    exif[0x0112] = 6
    if kind != "GIF":
        options = {**options, "exif": exif.tobytes()}
    data = encoded(Image.new(mode, (4000, 2500)), kind, **options)
    before = worker_pids(pool)
    assert shape_of(pool, data)[2] == 3
    assert worker_pids(pool) == before


def test_an_image_that_never_fits_is_refused_and_others_wait_in_order() -> None:
    budget, order = MemoryBudget(100), []
    with pytest.raises(InvalidImage, match="at most 100"), budget.reserved(101):
        pass

    def take(name: str, size: int) -> None:
        with budget.reserved(size):
            order.append(name)

    with ThreadPoolExecutor(3) as threads, budget.reserved(60):
        for count, (name, size) in enumerate((("large", 90), ("small", 10)), 1):
            threads.submit(take, name, size)
            wait_until(lambda count=count: budget.num_waiting == count, f"{name} waits")
        assert order == []  # the small one is behind the large one
    assert order == ["large", "small"]
    with budget.reserved(100):
        pass


PHONE = (8192, 6144)  # a photo of 50 million pixels


def test_a_photo_of_a_phone_is_decoded_within_a_quarter_of_eight_gibibytes() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", PHONE, (10, 200, 30)), "JPEG", exif=exif.tobytes())
    pool = DecodePool(1, memory_bytes=2 << 30)
    try:
        before = worker_pids(pool)
        with pool.decoded(data, read(data)) as pixels:
            assert pixels.shape == (*PHONE, 3)
            assert np.ptp(pixels[::512, ::512], axis=(0, 1)).max() == 0
        assert worker_pids(pool) == before
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("buffered", [False, True])
def test_the_worst_case_of_a_photo_fits_the_encoder(kind: Format, buffered: bool) -> None:
    header = ImageHeader(kind, *PHONE, orientation=6, buffered=buffered)
    assert worst_case_bytes(header, 32 << 20) < 2 << 30


@pytest.mark.parametrize(
    ("size", "seconds"), [((1, 1), 10), ((8000, 5000), 10), ((10_000, 8000), 20), (PHONE, 12.58)]
)
def test_a_larger_image_may_take_longer(size: tuple[int, int], seconds: float) -> None:
    assert cpu_limit_s(ImageHeader("PNG", *size)) == pytest.approx(seconds, abs=0.01)


def test_the_worst_case_is_bytes_a_pixel() -> None:
    header = ImageHeader("WEBP", 5000, 8000)
    assert 0.9e9 < worst_case_bytes(header, 0) < 1e9
    assert worst_case_bytes(ImageHeader("JPEG", 4000, 3000), 3 << 20) < 130e6


def test_a_process_that_may_not_be_started_leaves_no_file_open(
    tmp_path: Path, pairs: list[Pair]
) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch(0o644)
    before = num_memories()
    for _ in range(3):
        with pytest.raises(PermissionError):
            Child("services.encoder.decoding.decode_worker", 1 << 20, str(interpreter))
    assert num_memories() == before
    assert len(pairs) == 3 and all(end.fileno() < 0 for pair in pairs for end in pair)


# Reports that it is ready, takes a question, closes its socket, and ends later by a signal.
ENDS_LATE = """#!{python}
import os, signal, sys, time
from multiprocessing.connection import Connection

channel = Connection(int(sys.argv[3]))
channel.send_bytes(b"")
channel.recv_bytes()
channel.close()
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGPROF)
"""


def test_a_child_that_ends_a_moment_after_its_socket_has_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, processes get no CPU between the two for a while."""
    monkeypatch.setattr(child, "_STOP_S", PATIENCE_S)
    interpreter = tmp_path / "python"
    interpreter.write_text(ENDS_LATE.format(python=sys.executable))
    interpreter.chmod(0o755)
    late = Child("any", 4096, str(interpreter))
    try:
        with pytest.raises(ChildLost, match="SIGPROF") as lost:
            late.ask(b"question", cpu_s=PATIENCE_S)
        assert lost.value.is_caused_by_work
    finally:
        late.close()
