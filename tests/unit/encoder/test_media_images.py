"""Images are decoded in processes: the same pixels, limits for each; a bad image ends no other."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from services.common.errors import InvalidImage, Overloaded
from services.common.images.image_header import Format, ImageHeader, read_header
from services.encoder.decoding.child import Child
from services.encoder.decoding.decode import worst_case_bytes
from services.encoder.decoding.media_pool import DEFAULT_LIMITS, Limits, MediaPool
from services.encoder.decoding.memory_budget import MemoryBudget
from services.encoder.decoding.tasks import Result, StillTask
from tests.in_process_media import InProcessMedia
from tests.interpreter import Interpreter
from tests.noise import PATIENCE_S, wait_until
from tests.worker_pids import worker_pids

MAX_PIXELS = 52_000_000


def create_pool(
    limits: Limits = DEFAULT_LIMITS,
    *,
    image_bytes: int = 4 << 30,
    executable: str = sys.executable,
) -> MediaPool:
    return MediaPool(
        1, image_bytes=image_bytes, video_bytes=0, limits=limits, executable=executable
    )


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def read(data: bytes) -> ImageHeader:
    return read_header(data, max_source_pixels=MAX_PIXELS)


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


@pytest.fixture(scope="module")
def pool() -> Iterator[MediaPool]:
    """A pool that has a worker."""
    pool = create_pool()
    shape_of(pool, encoded(noise(8, 8)))
    yield pool
    pool.close()


def shape_of(pool: MediaPool, data: bytes) -> tuple[int, ...]:
    with pool.still(data, read(data)) as pixels:
        return pixels.shape


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_pixels_are_the_twins(pool: MediaPool, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if kind == "GIF" else {"exif": exif.tobytes()}
    for size in ((1, 1), (40, 30), (700, 300)):
        data = encoded(noise(*size), kind, **options)
        header = read(data)
        with pool.still(data, header) as ours, InProcessMedia().still(data, header) as twins:
            assert np.array_equal(ours, twins)


def test_threads_get_their_own_images(pool: MediaPool) -> None:
    colors = [(red, 10, 200) for red in range(0, 250, 10)]
    files = [encoded(Image.new("RGB", (300, 200), color)) for color in colors]

    def first_pixel(data: bytes) -> tuple[int, ...]:
        with pool.still(data, read(data)) as pixels:
            assert (pixels == pixels[0, 0]).all()
            return tuple(int(value) for value in pixels[0, 0])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(first_pixel, files)) == colors


def test_an_image_over_its_time_is_invalid_and_the_next_one_is_served() -> None:
    pool = create_pool(Limits(image_cpu_s=0.02))
    try:
        slow, quick = encoded(Image.new("RGB", (6000, 6000))), encoded(noise(8, 8))
        for _ in range(2):
            assert shape_of(pool, quick) == (8, 8, 3)
            assert len(worker_pids(pool)) == 1
            with pytest.raises(InvalidImage, match="more time"):
                shape_of(pool, slow)
            assert worker_pids(pool) == []
    finally:
        pool.close()


def test_an_image_over_its_memory_is_invalid_and_its_decoder_lives(pool: MediaPool) -> None:
    worker = Child(pool.server, 3 * 6000 * 6000)

    def decode(data: bytes, memory_bytes: int) -> Result:
        task = StillTask(read(data), memory_bytes, cpu_s=10.0)
        answer = worker.ask(msgspec.msgpack.encode(task), data, cpu_s=10.0)
        return msgspec.msgpack.decode(answer, type=Result)

    try:
        refused = decode(encoded(Image.new("RGB", (6000, 6000))), 1)
        assert refused.error_code == "invalid_image" and "memory" in refused.message
        image = noise(8, 8)
        assert decode(encoded(image), 1 << 20) == Result()
        assert np.array_equal(worker.pixels(8, 8, 3), np.asarray(image))
    finally:
        worker.close()


@pytest.mark.parametrize("num_kills", [1, 2])
def test_an_image_whose_decoder_is_killed_is_tried_once_more(num_kills: int) -> None:
    """The kernel kills decoders first where a pod's memory is short, whatever took it."""
    pool = create_pool()
    slow, quick = encoded(Image.new("RGB", (6000, 6000))), encoded(noise(8, 8))
    try:
        with ThreadPoolExecutor(1) as threads:
            decoding = threads.submit(shape_of, pool, slow)
            killed: set[int] = set()
            while len(killed) < num_kills:
                for pid in set(worker_pids(pool)) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            if num_kills == 1:
                assert decoding.result(PATIENCE_S) == (6000, 6000, 3)
            else:
                with pytest.raises(InvalidImage, match="more time or memory"):
                    decoding.result(PATIENCE_S)
        for _ in range(2):
            assert shape_of(pool, quick) == (8, 8, 3)
            (pid,) = worker_pids(pool)
            os.kill(pid, signal.SIGKILL)  # while it is idle
        assert shape_of(pool, quick) == (8, 8, 3)
    finally:
        pool.close()


def test_an_image_is_decoded_when_the_fork_server_was_killed() -> None:
    """All workers end with it. Images that are being decoded are decoded again, once."""
    pool, data = create_pool(), encoded(noise(8, 8))
    try:
        assert shape_of(pool, data) == (8, 8, 3)
        (worker,) = pool.workers
        server = pool.server.pid
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: worker.has_ended, "the worker ends")
        assert shape_of(pool, data) == (8, 8, 3)
        assert pool.server.pid != server and pool.workers != [worker]
    finally:
        pool.close()


def test_an_image_whose_worker_cannot_be_started_is_for_another_encoder(
    interpreter: Interpreter,
) -> None:
    pool, data = create_pool(executable=str(interpreter.path)), encoded(noise(8, 8))
    try:
        assert shape_of(pool, data) == (8, 8, 3)
        before = len(os.listdir("/proc/self/fd"))
        interpreter.disable()
        for pid in (pool.server.pid, *worker_pids(pool)):
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(Overloaded):
                shape_of(pool, data)
        assert len(os.listdir("/proc/self/fd")) <= before
        interpreter.enable()
        assert shape_of(pool, data) == (8, 8, 3)
    finally:
        pool.close()


@pytest.mark.parametrize("error", ["cut", "bits"])
def test_bad_files_are_invalid(pool: MediaPool, error: str) -> None:
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
def test_no_format_needs_more_than_its_worst_case(pool: MediaPool, name: str) -> None:
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
    pool = create_pool(image_bytes=2 << 30)
    try:
        with pool.still(data, read(data)) as pixels:
            assert pixels.shape == (*PHONE, 3)
            assert np.ptp(pixels[::512, ::512], axis=(0, 1)).max() == 0
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
    assert DEFAULT_LIMITS.cpu_s_of(ImageHeader("PNG", *size)) == pytest.approx(seconds, abs=0.01)


def test_the_worst_case_is_bytes_a_pixel() -> None:
    header = ImageHeader("WEBP", 5000, 8000)
    assert 0.9e9 < worst_case_bytes(header, 0) < 1e9
    assert worst_case_bytes(ImageHeader("JPEG", 4000, 3000), 3 << 20) < 130e6
