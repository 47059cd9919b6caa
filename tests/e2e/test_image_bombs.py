"""Images that cost more than they weigh: each is answered, no process takes more memory than its
worst case, and others are served meanwhile.
"""

import asyncio
import io
import struct
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from PIL import Image

from services.common.images.image_header import read_header
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import outgoing_metadata
from services.encoder.decoding.decode import worst_case_bytes
from tests.e2e.test_encoder_process import (
    Encoder,
    error_from_rpc,
    grpc,
    make_image,
    model_dir,  # noqa: F401 - a fixture
    run_encoder,
)
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(400)]

SIDE = 7200  # 51.8 million pixels, nearly the most that a gateway allows by default
WEBP_SIDE = 5800  # 33.6 million: decoding takes most of what one image may have


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def empty_scans(num_scans: int, side: int) -> bytes:
    whole = encoded(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    first = whole.index(b"\xff\xda")
    head = whole[first : first + 2 + int.from_bytes(whole[first + 2 : first + 4], "big")]
    return whole[:first] + head * num_scans + whole[first:]


def text_chunks() -> bytes:
    """A PNG with 32 texts of 1 MiB each, in 32 KiB."""
    whole = encoded(Image.new("RGB", (64, 64)), "PNG")
    text = chunk(b"zTXt", b"key\0\0" + zlib.compress(b"x" * ((1 << 20) - 1), 9))
    return whole[:33] + text * 32 + whole[33:]


def request(encoder: Encoder, data: bytes) -> pb.EncodeRequest:
    header = read_header(data, max_source_pixels=1 << 30)
    (unit,) = encoder.config.vision_part.geometry.units(header.upright_size)
    key = image_key(encoder.prefix, data, unit=unit, salt=b"")
    return pb.EncodeRequest(
        image_key=key, image=data, grid=pb.Grid(t=1, h=unit.grid[1], w=unit.grid[2])
    )


async def outcome(encoder: Encoder, data: bytes) -> str:
    try:
        message = request(encoder, data)
        await encoder.stub.Encode(
            message, timeout=3 * PATIENCE_S, metadata=outgoing_metadata(message.ByteSize())
        )
    except grpc.aio.AioRpcError as failure:
        return error_from_rpc(failure, "encoder").code
    return "ok"


class Watch:
    """The most memory that a service's processes had at once, and their CPU time."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_bytes = 0

    def sample(self) -> int:
        """Anonymous and file pages once, shared ones as the process that has most of them."""
        private, shared = 0, 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                continue
            private += memory.rss - memory.shared
            shared += memory.shared
        self.peak_bytes = max(self.peak_bytes, private + shared)
        return private + shared

    def cpu_s(self) -> float:
        times = [p.cpu_times() for p in (self._root, *self._root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Watch"]:
        async def watch() -> None:
            while True:
                self.sample()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(watch())
        try:
            yield self
        finally:
            task.cancel()


async def test_bombs_end_no_encoder_and_delay_no_other_image(
    model_dir: Path,  # noqa: F811
) -> None:
    webp = encoded(Image.new("RGB", (WEBP_SIDE, WEBP_SIDE)), "WEBP", lossless=True, method=0)
    assert len(webp) < 10_000
    png = encoded(Image.new("P", (SIDE, SIDE)), "PNG")
    large = png[:16] + struct.pack(">II", 16_100, 16_100) + png[24:]  # 259 million pixels
    async with run_encoder(model_dir) as encoder:
        watch = Watch(encoder.process.pid)
        assert await outcome(encoder, make_image(64, 64)) == "ok"
        quiet = watch.sample()
        engine = watch._root.children()[0].pid

        async def honest(until: asyncio.Task[object]) -> list[float]:
            taken: list[float] = []
            while not until.done():
                start = time.monotonic()
                assert await outcome(encoder, make_image(64, 64, len(taken) + 1)) == "ok"
                taken.append(time.monotonic() - start)
                await asyncio.sleep(0.02)
            return taken

        async with watch.running():
            bombs = {
                "webp": (webp, "ok"), "webp again": (webp + b"\0", "ok"), "png": (png, "ok"),
                "over the cap": (large, "invalid_image"),
                "scans": (empty_scans(7000, 1024), "ok"),
                "texts": (text_chunks(), "ok"),
            }  # fmt: skip

            async def send_all() -> dict[str, str]:
                found = await asyncio.gather(
                    *[outcome(encoder, data) for data, _ in bombs.values()]
                )
                return dict(zip(bombs, found, strict=True))

            sending = asyncio.create_task(send_all())
            taken = await honest(sending)
            found = await sending
        assert found == {name: code for name, (_, code) in bombs.items()}
        print(
            f"peak {watch.peak_bytes >> 20} MiB, quiet {quiet >> 20} MiB, "
            f"{watch.cpu_s():.1f} s CPU; {len(taken)} other images, longest {max(taken):.3f} s"
        )
        most = max(
            worst_case_bytes(read_header(data, max_source_pixels=SIDE**2), len(data))
            for data in (webp, png)
        )
        assert watch.peak_bytes < quiet + 2 * most + (256 << 20)  # two are decoded at once
        assert len(taken) >= 5, "the others waited for the bombs"
        assert watch._root.children()[0].pid == engine
        assert await outcome(encoder, make_image(64, 64, 999)) == "ok"
