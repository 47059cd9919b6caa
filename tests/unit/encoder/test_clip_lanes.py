"""The engine decodes a clip in several real processes, with the pixels of one process."""

from bisect import bisect

import numpy as np
import pytest
import torch

from services.common.geometry import Geometry, Unit
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Source, Video
from services.encoder.engine.messages import EncodeImage, PlaceImage
from tests.encoder_harness import FakePreprocessor, Running, wait_until
from tests.in_process_decoder import InProcessDecoders
from tests.unit.encoder.test_clip_pool import Held
from tests.videos import make

pytestmark = pytest.mark.nightly
SIZE = (96, 128)
GRID = (1, 4, 6)


class Recording(FakePreprocessor):
    """Keeps the pixels that the real preprocessor makes of each pair, and the lanes."""

    def __init__(self, pool: ClipPool) -> None:
        super().__init__()
        geometry, decoders = Geometry(0, 16, 2, 1024, 1 << 24), InProcessDecoders()
        self.real = Preprocessor(geometry, decoders, pinned=False, video_decoders=pool)  # type: ignore[arg-type]
        self.pixels: dict[tuple[int, int], torch.Tensor] = {}

    def decode_video(self, video: Video, unit: Unit, lane: int = 0) -> list[torch.Tensor]:
        super().decode_video(video, unit, lane)
        return self.real.decode_video(video, unit, lane)

    def resize_frames(self, frames: list[torch.Tensor], unit: Unit) -> torch.Tensor:
        assert unit.frames is not None
        self.pixels[unit.frames] = self.real.resize_frames(frames, unit)
        return self.pixels[unit.frames]


def encoded(data: bytes, workers: int) -> tuple[dict[tuple[int, int], torch.Tensor], set[int]]:
    """Encodes pairs of a clip. Returns their pixels and the lanes."""
    held, pool = Held(), ClipPool(workers, memory_bytes=8 << 30)
    file = held.put(data)
    keys = np.frombuffer(pool.probe(file).key_frames, "<i4").tolist()
    made = Recording(pool)
    running = Running(workers, made)
    try:
        wait_until(lambda: running.engine.num_free == workers)
        firsts = range(0, 92, 4)
        for job_id, first in enumerate(firsts):
            at = bisect(keys, first)
            video = Video(file, SIZE, keys[at - 1] if at else 0)
            unit = Unit(GRID, (first, first + 2))
            running.front.send(EncodeImage(job_id, Source(video=video), unit))
            running.front.send(PlaceImage(job_id, 0))
        assert running.front.codes(*range(len(firsts))) == [""] * len(firsts)
    finally:
        running.stop()
        pool.close()
        held.close()
    return made.pixels, set(made.lanes.values())


def test_pixels_of_several_lanes_are_those_of_one() -> None:
    data = make(frames=96, size=SIZE, options={"g": "12", "keyint_min": "12"})
    (one, first), (several, lanes) = encoded(data, 2), encoded(data, 13)
    assert first == {0} and len(lanes) >= 2 and lanes <= set(range(6))
    assert one.keys() == several.keys() and len(one) == 23
    assert all(torch.equal(pixels, several[pair]) for pair, pixels in one.items())
