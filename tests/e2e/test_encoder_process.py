"""The encoder as real processes on the CPU, with a tiny checkpoint: images in, embeddings out."""

import asyncio
import io
import json
import os
import resource
import signal
import struct
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save_file

from services.common import errors
from services.common.families import read_spec
from services.common.images.image_key import FRAME_DIGEST_BYTES, frames_key, image_key
from services.common.model_spec import ModelSpec
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import create_channel, error_from_rpc, outgoing_metadata
from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server  # noqa: F401
from tests.stubs import EncoderStub

pytestmark = pytest.mark.e2e
_NIGHTLY = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.e2e.tiny_tower import write_model

    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return directory


@dataclass
class Encoder:
    """A running encoder and a client of it."""

    process: asyncio.subprocess.Process
    stub: EncoderStub
    config: ModelSpec
    prefix: bytes
    metrics_port: int

    def request(self, data: bytes) -> pb.EncodeRequest:
        with Image.open(io.BytesIO(data)) as image:
            (unit,) = self.config.vision_part.geometry.units((image.height, image.width))
        key = image_key(self.prefix, data, unit=unit, salt=b"")
        return pb.EncodeRequest(
            image_key=key, image=data, grid=pb.Grid(t=1, h=unit.grid[1], w=unit.grid[2])
        )

    async def embedding(self, data: bytes) -> np.ndarray:
        """Asks for both at once, as gateway and decoder do."""
        request = self.request(data)
        encoding = self.stub.Encode(
            request, timeout=PATIENCE_S, metadata=outgoing_metadata(request.ByteSize())
        )
        found = await self.fetched(request.image_key)
        await encoding
        return found

    async def fetched(self, key: bytes) -> np.ndarray:
        call = self.stub.Fetch(pb.FetchRequest(image_key=key), timeout=PATIENCE_S)
        parts = [part async for part in call]
        header = parts[0].header
        body = b"".join(part.chunk.data for part in parts)
        values = np.frombuffer(body, np.float32)
        return values.reshape(header.num_features, header.num_tokens, header.hidden)

    async def probe(self, data: bytes) -> pb.ProbeResponse:
        request = pb.ProbeRequest(video=data)
        return await self.stub.Probe(
            request, timeout=PATIENCE_S, metadata=outgoing_metadata(request.ByteSize())
        )

    def pair_requests(
        self, video: pb.ProbeResponse, pairs: Sequence[tuple[int, int]]
    ) -> list[pb.EncodeRequest]:
        """Of a grid of 6 x 8 patches."""

        def digest(index: int) -> bytes:
            return video.frame_digests[FRAME_DIGEST_BYTES * index :][:FRAME_DIGEST_BYTES]

        return [
            pb.EncodeRequest(
                image_key=frames_key(
                    self.prefix, digest(first), digest(second), grid=(1, 6, 8), salt=b""
                ),
                grid=pb.Grid(t=1, h=6, w=8), video_digest=video.video_digest,
                frames=pb.FramePair(first=first, second=second),
            )
            for first, second in pairs
        ]  # fmt: skip

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        return await self.stub.Encode(
            request, timeout=PATIENCE_S, metadata=outgoing_metadata(request.ByteSize())
        )

    async def num_encoded(self) -> float:
        return await asyncio.to_thread(self.metric, "triptych_encoder_images_encoded_total")

    async def num_batches(self) -> float:
        return await asyncio.to_thread(self.metric, "triptych_encoder_batch_images_count")

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def environment(model_dir: Path, **settings: object) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ENCODER_MODEL": str(model_dir),
        "ENCODER_DEVICE": "cpu",
        "ENCODER_CACHE_BYTES": str(64 << 20),
        **{f"ENCODER_{name.upper()}": str(value) for name, value in settings.items()},
    }


@asynccontextmanager
async def run_encoder(model_dir: Path, **settings: object) -> AsyncIterator[Encoder]:
    port, metrics_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.encoder", cwd=ROOT,
        env=environment(
            model_dir, address=f"127.0.0.1:{port}", metrics_port=metrics_port, **settings
        ),
    )  # fmt: skip
    channel = create_channel(f"127.0.0.1:{port}")
    try:
        stub = EncoderStub(channel)
        known = await stub.Describe(
            pb.DescribeEncoderRequest(), wait_for_ready=True, timeout=PATIENCE_S
        )
        config = read_spec(model_dir)
        yield Encoder(process, stub, config, known.key_prefix, metrics_port)
    finally:
        await channel.close()
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), PATIENCE_S)


def make_image(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


@_NIGHTLY
async def test_images_of_many_sizes_at_once(model_dir: Path) -> None:
    from tests.e2e.tiny_tower import expected

    sizes = [(64, 96), (33, 200), (300, 300), (64, 96), (512, 40), (100, 101)] * 3
    kinds = ["PNG", "JPEG", "WEBP"]
    images = [make_image(*size, n, kinds[n % 3]) for n, size in enumerate(sizes)]
    damaged = images[1][: len(images[1]) // 2]  # a JPEG whose header is whole
    async with run_encoder(model_dir) as encoder:
        answers = await asyncio.gather(*map(encoder.embedding, images), failure(encoder, damaged))
        assert isinstance(answers.pop(), errors.InvalidImage)
        for data, found in zip(images, answers, strict=True):
            truth = expected(encoder.config, data)
            assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()
        assert await encoder.num_encoded() == len(images)
        assert await encoder.num_batches() == len(images)  # on a CPU each runs alone
        encoder.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(encoder.process.wait(), PATIENCE_S) == 0


@_NIGHTLY
async def test_a_video_is_encoded_by_pairs_of_frames_until_the_engine_dies(model_dir: Path) -> None:
    """The file travels once; a unit that is known is not encoded again, whatever file it is of."""
    from tests.e2e.tiny_tower import expected_pair
    from tests.in_process_clips import frame_pixels
    from tests.videos import make

    options = {"lag-in-frames": "0", "auto-alt-ref": "0"}
    clip, longer = (make("webm", frames=count, options=options) for count in (12, 20))
    async with run_encoder(model_dir) as encoder:
        video = await encoder.probe(clip)
        assert (video.num_frames, video.rate, video.height, video.width) == (12, 12.0, 48, 64)
        pairs = [(0, 3), (4, 7), (8, 11), (11, 11)]
        units = encoder.pair_requests(video, pairs)
        await asyncio.gather(*map(encoder.encode, units))
        assert await encoder.num_encoded() == 4
        for pair, unit in zip(pairs, units, strict=True):
            truth = expected_pair(encoder.config, frame_pixels(clip, pair), (96, 128))
            found = await encoder.fetched(unit.image_key)
            assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()
        again = await encoder.stub.Probe(
            request := pb.ProbeRequest(video_digest=video.video_digest),
            metadata=outgoing_metadata(request.ByteSize()),
        )
        assert again == video
        answers = [await encoder.encode(unit) for unit in units]
        assert {answer.source for answer in answers} == {pb.EncodeResponse.SOURCE_MEMORY}
        video = await encoder.probe(longer)
        await asyncio.gather(
            *map(encoder.encode, encoder.pair_requests(video, [*pairs, (12, 15), (16, 19)]))
        )
        assert await encoder.num_encoded() == 6
        units[0].video_digest = bytes(32)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encoder.encode(units[0])
        assert isinstance(error_from_rpc(caught.value, "encoder"), errors.VideoNotHeld)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encoder.probe(clip[:100])
        assert isinstance(error_from_rpc(caught.value, "encoder"), errors.InvalidVideo)
        await its_engines_death_ends_it(encoder)


@_NIGHTLY
async def test_more_videos_are_held_than_descriptors_at_first(model_dir: Path) -> None:
    """Each takes one for two minutes: beyond the soft limit they were a 500."""
    from tests.videos import make

    clip = make("mp4", frames=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/dev/fd")) + 64  # this process' own stay open
    async with AsyncExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            encoder = await stack.enter_async_context(run_encoder(model_dir))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(few):
            video = await encoder.probe(clip + struct.pack(">I4sI", 12, b"free", number))
            assert video.num_frames == 4


def engine_of(encoder: Encoder) -> psutil.Process:
    (engine,) = (
        child for child in psutil.Process(encoder.process.pid).children()
        if "services.encoder.engine_main" in child.cmdline()
    )  # fmt: skip
    return engine


async def its_engines_death_ends_it(encoder: Encoder) -> None:
    engine_of(encoder).kill()
    assert await asyncio.wait_for(encoder.process.wait(), PATIENCE_S) == 1


async def failure(encoder: Encoder, data: bytes) -> errors.TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await encoder.stub.Encode(encoder.request(data), timeout=PATIENCE_S)
    return error_from_rpc(caught.value, "encoder")


async def test_a_restart_encodes_nothing_again_and_a_killed_front_leaves_no_engine(
    model_dir: Path,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    # A Redis that is late on a busy machine would be skipped.
    url, data = f"{redis_server.url}?socket_timeout={PATIENCE_S}", make_image(100, 100)
    async with run_encoder(model_dir, redis_url=url) as encoder:
        before = await encoder.embedding(data)
    assert len(redis_server.keys()) == 1  # SIGTERM waited for the write behind
    async with run_encoder(model_dir, redis_url=url) as encoder:
        answer = await encoder.stub.Encode(encoder.request(data), timeout=PATIENCE_S)
        assert answer.source == pb.EncodeResponse.SOURCE_REDIS
        assert np.array_equal(await encoder.embedding(data), before)
        assert await encoder.num_encoded() == 0
        await its_death_ends_its_engine(encoder)


async def its_death_ends_its_engine(encoder: Encoder) -> None:
    engine = engine_of(encoder)
    encoder.process.kill()
    await encoder.process.wait()
    await asyncio.to_thread(engine.wait, PATIENCE_S)
    assert not engine.is_running()


@pytest.mark.parametrize(
    ("settings", "status", "text"),
    [
        ({"prot": 1}, 2, "ENCODER_PROT"),
        ({"model": "/nowhere"}, 2, "no model at /nowhere: it has no config.json"),
        pytest.param({"kernels": "ragged_attention=hopper"}, 2, "it runs on CUDA", marks=_NIGHTLY),
        pytest.param(
            {"kernels": "rotary=magic"}, 2, "there is no such implementation", marks=_NIGHTLY
        ),
    ],
)
async def test_a_start_that_fails_says_why(
    model_dir: Path, settings: dict[str, object], status: int, text: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.encoder", cwd=ROOT, stderr=asyncio.subprocess.PIPE,
        env=environment(model_dir, **settings),
    )  # fmt: skip
    _, log = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == status and text in log.decode()


@_NIGHTLY
async def test_a_checkpoint_that_lacks_a_tensor_names_it(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    save_file(
        {"model.visual.merger.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.encoder", cwd=ROOT, stderr=asyncio.subprocess.PIPE,
        env=environment(tmp_path),
    )  # fmt: skip
    _, log = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert "missing tensors: model.visual.blocks.0.attn.proj.bias" in log.decode()


async def test_a_text_model_is_refused_at_start(model_dir: Path, tmp_path: Path) -> None:
    found = json.loads((model_dir / "config.json").read_text())
    text = found["text_config"] | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "eos_token_id": 1, "rope_scaling": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(text))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.encoder", cwd=ROOT, stderr=asyncio.subprocess.PIPE,
        env=environment(tmp_path),
    )  # fmt: skip
    _, log = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert "(Qwen3ForCausalLM) is a text model: it has no vision tower" in log.decode()
