"""Units of videos equal Hugging Face's: pixel values of the same decoded frames bit for bit, and
the tower's embeddings.

Tolerance of embeddings: 2e-4 of the largest value, float32, CPU.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from services.common.families.qwen3_vl import DeepStackTower
from services.common.frame_pairs import FramePairs
from services.common.geometry import Geometry, Unit
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weights import load_weights
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Source, Video
from services.encoder.models import qwen3_vl
from tests.in_process_clips import InProcessClips, frame_pixels
from tests.in_process_decoder import InProcessDecoders
from tests.tower import cpu_ops
from tests.videos import make

TOLERANCE = 2e-4
LIMITS = {"shortest_edge": 4096, "longest_edge": 200_000}
PAIRS = FramePairs(
    video_token_id=0, start_token_id=1, end_token_id=2, patch_size=16, merge_size=2,
    min_pixels=LIMITS["shortest_edge"], max_pixels=LIMITS["longest_edge"],
)  # fmt: skip
TOWER = DeepStackTower(3, 64, 96, 4, 3, 16, 2, 2, 48, 64, (0, 1))
TOWERS = {
    "Qwen3-VL": (TOWER, Qwen3VLVisionConfig, Qwen3VLVisionModel),
    "Qwen3.5": (replace(TOWER, deepstack_indexes=()), Qwen3_5VisionConfig, Qwen3_5VisionModel),
}
OPS = cpu_ops(TOWER)


def preprocessor(max_copied_bytes: int = 16 << 20, **files: bytes) -> Preprocessor:
    return Preprocessor(
        Geometry(0, 16, 2, 1024, 1 << 24),
        InProcessDecoders(),  # type: ignore[arg-type]
        pinned=False,
        video_decoders=InProcessClips(**files),  # type: ignore[arg-type]
        max_copied_bytes=max_copied_bytes,
    )


def prepared(made: Preprocessor, source: Source, unit: Unit) -> torch.Tensor:
    """Returns a unit's pixels, as the engine makes them."""
    if source.video is None:
        return made.prepare(source, unit)
    return made.resize_frames(made.decode_video(source.video, unit), unit)


def theirs(frames: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """HF's pixel values `[N, 3 * 2 * 16 * 16]` and its grid."""
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    out = Qwen3VLVideoProcessor(size=LIMITS)([video], do_sample_frames=False, return_tensors="pt")
    return out["pixel_values_videos"], out["video_grid_thw"]


def ours(made: Preprocessor, source: Source, units: list[Unit]) -> torch.Tensor:
    pixels = torch.cat([prepared(made, source, unit).reshape(-1) for unit in units])
    return OPS.pack_pairs(pixels, [unit.grid for unit in units], 16, 2, torch.float32)


@pytest.mark.parametrize("size", [(48, 64), (180, 320), (100, 30), (333, 257)], ids=str)
@pytest.mark.parametrize("indices", [(0, 3, 4, 9), (1, 5, 11), (2, 2, 7, 8)], ids=str)
def test_pixel_values_of_a_video_are_equal(size, indices) -> None:
    data = make(frames=12, size=(size[0] // 2 * 2, size[1] // 2 * 2))
    frames = frame_pixels(data, indices)
    expected, grid = theirs(frames)
    upright = frames[0].shape[:2]
    units = PAIRS.units(indices, upright)
    assert [(len(units), *units[0].grid[1:])] == [tuple(row) for row in grid.tolist()]
    source = Source(video=Video(InProcessClips.address("clip"), upright))
    assert torch.equal(ours(preprocessor(clip=data), source, units), expected)


@pytest.mark.parametrize("kind", ["hevc 10 bits", "apng", "gif", "webm"])
def test_formats_that_are_converted(kind: str) -> None:
    data = make(kind, frames=4, size=(96, 64))
    frames = frame_pixels(data, (0, 1, 2, 3))
    source = Source(video=Video(InProcessClips.address("clip"), (96, 64)))
    units = PAIRS.units(range(4), (96, 64))
    assert torch.equal(ours(preprocessor(clip=data), source, units), theirs(frames)[0])


def test_a_rotated_video_is_upright() -> None:
    data = make(frames=4, size=(64, 96), rotation=90)
    frames = frame_pixels(data, (0, 1, 2, 3))
    assert frames[0].shape == (96, 64, 3)
    units = PAIRS.units(range(4), (96, 64))
    source = Source(video=Video(InProcessClips.address("clip"), (96, 64)))
    assert torch.equal(ours(preprocessor(clip=data), source, units), theirs(frames)[0])


@pytest.mark.parametrize("size", [(96, 64), (180, 320)], ids=str)
def test_large_frames_are_resized_in_their_decoder_s_memory(size: tuple[int, int]) -> None:
    video = Video(InProcessClips.address("clip"), size)
    (unit,) = PAIRS.units(range(2), size)
    data = make(frames=2, size=size)
    copies, resizes = preprocessor(clip=data), preprocessor(clip=data, max_copied_bytes=0)
    copied, resized = copies.decode_video(video, unit), resizes.decode_video(video, unit)
    assert [frame.shape for frame in copied] == [(*size, 3)] * 2
    assert [frame.shape for frame in resized] == [(*PAIRS.size_of(unit), 3)] * 2
    expected = copies.resize_frames(copied, unit)
    assert torch.equal(resizes.resize_frames(resized, unit), expected)


def test_frames_that_are_images() -> None:
    """Three of them: the last is its own pair."""
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (70, 90, 3), dtype=np.uint8) for _ in range(3)]
    files = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        files.append(file.getvalue())
    expected, _ = theirs(frames)
    first, last = PAIRS.units(range(3), (70, 90))
    found = [
        ours(preprocessor(), Source(files[0], files[1]), [first]),
        ours(preprocessor(), Source(files[2]), [last]),
    ]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("name", TOWERS)
def test_units_are_the_towers(name: str, tmp_path) -> None:
    """Each pair of frames alone equals its part of the whole video."""
    spec, config, model = TOWERS[name]
    taps = {"deepstack_visual_indexes": list(spec.deepstack_indexes)}
    hf = model(config(
        depth=spec.depth, hidden_size=spec.hidden_size, num_heads=spec.num_heads,
        intermediate_size=spec.intermediate_size, in_channels=3, patch_size=16,
        temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=spec.out_hidden_size,
        num_position_embeddings=spec.num_position_embeddings,
        **(taps if spec.deepstack_indexes else {}),
    )).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in hf.parameters():
        wide = 0.5 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5
        parameter.data.normal_(0.0, wide, generator=generator)
    tower = our_tower(hf, spec, tmp_path)
    data = make(frames=9, size=(80, 112))
    indices = (0, 2, 3, 6, 8)
    values, grid = theirs(frame_pixels(data, indices))
    with torch.no_grad():
        out = hf(values, grid_thw=grid)
    whole = torch.stack([out.pooler_output, *getattr(out, "deepstack_features", ())])
    units = PAIRS.units(indices, (80, 112))
    source = Source(video=Video(InProcessClips.address("clip"), (80, 112)))
    with torch.inference_mode():
        found = torch.cat([
            tower(ours(preprocessor(clip=data), source, [unit]), tower.layout([unit.grid]))
            for unit in units
        ], dim=1)  # fmt: skip
    assert found.shape == whole.shape
    scale = whole.abs().amax(dim=(1, 2), keepdim=True)
    assert float(((found - whole).abs() / scale).max()) < TOLERANCE
    changed = torch.cat([found[:, :-1], found[:, :1]], dim=1)  # the check can fail
    assert float(((changed - whole).abs() / scale).max()) > 10 * TOLERANCE


def our_tower(hf: torch.nn.Module, spec: DeepStackTower, directory) -> qwen3_vl.VisionTower:
    from safetensors.torch import save_file

    tensors = {f"model.visual.{k}": v.contiguous() for k, v in hf.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    with torch.device("meta"):
        tower = qwen3_vl.VisionTower(spec, cpu_ops(spec), "model.visual.")
    checkpoint = Checkpoint.open(directory)
    load_weights(tower, checkpoint, tower.weight_map, device="cpu", dtype=torch.float32)
    return tower
