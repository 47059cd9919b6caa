"""Frames, sizes, times, prompts and positions of videos are those of transformers' processors."""

import itertools
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

from services.common.errors import InvalidVideo
from services.common.families import read_spec
from services.common.families.qwen3_vl import DeepStackTower
from services.common.families.video_processor import with_video
from services.common.frame_pairs import FramePairs, PixelLimits, Sampling, time_text
from services.common.geometry import Geometry, Run, Unit
from services.common.model_spec import VisionSpec
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.parity.oracle import (
    CONFIGS,
    IMAGE_ID,
    VIDEO_ID,
    VISION_END_ID,
    VISION_START_ID,
    make_oracle,
)
from tests.parity.qwen3_5_oracle import CONFIGS as CONFIGS_3_5
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.tiny_tokenizer import added_ids, write_model_directory

SHIPPED = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "image_mean": [0.5] * 3}
TOWER = DeepStackTower(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=1, in_channels=3, patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2, num_position_embeddings=4, out_hidden_size=8,
    deepstack_indexes=(),
)  # fmt: skip
ABSENT = object()
IDS = {"video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}


def pairs(**options: object) -> FramePairs:
    given = {"min_pixels": 4096, "max_pixels": 25165824} | options
    return FramePairs(
        video_token_id=1, start_token_id=2, end_token_id=3, patch_size=16, merge_size=2, **given
    )  # type: ignore[arg-type]


FRAMES = (*range(1, 12), 30, 31, 99, 100, 299, 300, 301, 749, 1499, 1536, 1537, 3600, 107_892)
RATES = (23.976023976023978, 24.0, 25.0, 29.97002997002997, 30.0, 60.0, 7.5, 1.0, 0.1, 14.99)
WANTED = (
    None, {"fps": 0.1}, {"fps": 0.5}, {"fps": 1}, {"fps": 1.5}, {"fps": 2}, {"fps": 3},
    {"fps": 29.97}, {"fps": 60}, *({"num_frames": n} for n in (2, 3, 4, 5, 7, 16, 33, 768)),
)  # fmt: skip


@pytest.mark.parametrize("limits", [(4, 768), (2, 5), (8, 64)])
def test_the_frames_that_are_sampled(limits):
    processor = Qwen3VLVideoProcessor(min_frames=limits[0], max_frames=limits[1])
    ours = pairs(min_frames=limits[0], max_frames=limits[1])
    for total, rate, wanted in itertools.product(FRAMES, (*RATES, None), WANTED):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        theirs = processor.sample_frames(metadata, **(wanted or {}))
        found = ours.indices(total, rate or 0.0, Sampling(**(wanted or {})))
        assert found == tuple(theirs.tolist()), (total, rate, wanted)


def test_max_frames_of_a_request_is_the_processors():
    for total, most in itertools.product(FRAMES, (2, 3, 10, 100)):
        theirs = Qwen3VLVideoProcessor(max_frames=most).sample_frames(VideoMetadata(total, 30.0))
        assert pairs().indices(total, 30.0, Sampling(max_frames=most)) == tuple(theirs.tolist())


def test_without_a_rate_to_sample_at_all_frames_are_taken():
    for total, count in itertools.product(FRAMES, (None, 8)):
        processor = Qwen3VLVideoProcessor(fps=None)
        theirs = processor.sample_frames(VideoMetadata(total, 30.0), num_frames=count)
        ours = pairs(fps=None, num_frames=count).indices(total, 30.0, Sampling())
        assert ours == tuple(theirs.tolist())


def test_sizes_are_smart_resizes():
    rng = random.Random(0)
    refused = 0
    for _ in range(30_000):
        count, height, width = rng.randint(1, 40), rng.randint(1, 3000), rng.randint(1, 3000)
        if rng.random() < 0.2:
            height = rng.randint(1, 40)
        least, most = rng.choice((4096, 131072)), rng.choice((786_432, 25_165_824, 300_000))
        try:
            expected = smart_resize(count, height, width, 2, 32, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidVideo):
                pairs(min_pixels=least, max_pixels=most).resized(count, (height, width))
        else:
            found = pairs(min_pixels=least, max_pixels=most).resized(count, (height, width))
            assert found == expected, (count, height, width, least, most)
    assert 300 < refused < 3000


@pytest.mark.parametrize("most", [None, 5, 90, 1000])
def test_all_frames_are_those_of_a_processor_that_does_not_sample(most):
    for total, rate in itertools.product((2, 3, 4, 5, 89, 90, 91, 1000), (30.0, 0.0)):
        processor = Qwen3VLVideoProcessor(fps=None, min_frames=1, max_frames=most or total)
        theirs = processor.sample_frames(VideoMetadata(total, rate or None))
        ours = pairs().indices(total, rate, Sampling(all_frames=True, max_frames=most))
        assert ours == tuple(theirs.tolist())
        assert ours == tuple(range(total)) or most < total


# A request's limits, and the processor's `size` that they stand for with n frames.
LIMITS = {
    "nothing": (PixelLimits(), lambda n: (4096, 25165824)),
    "min_per_frame": (PixelLimits(min_per_frame=90_000), lambda n: (90_000 * n, 25165824)),
    "max_per_frame": (PixelLimits(max_per_frame=50_000), lambda n: (4096, 50_000 * n)),
    "both per frame": (
        PixelLimits(min_per_frame=4096, max_per_frame=262_144),
        lambda n: (4096 * n, min(262_144 * n, 25165824)),
    ),
    "total": (PixelLimits(total=300 * 1024), lambda n: (4096, 2 * 300 * 1024)),
    "more than the model's": (PixelLimits(total=20480 * 1024), lambda n: (4096, 2 * 20480 * 1024)),
    "as in the guide": (
        PixelLimits(min_per_frame=4096, max_per_frame=262_144, total=20480 * 1024),
        lambda n: (4096 * n, min(262_144 * n, 2 * 20480 * 1024)),
    ),
    "of all frames": (
        PixelLimits(min_of_all=70_000, max_of_all=2_000_000), lambda n: (70_000, 2_000_000),
    ),
    "max_of_all": (PixelLimits(max_of_all=400_000), lambda n: (4096, 400_000)),
    "a least above the most": (
        PixelLimits(min_per_frame=200_000, total=100_000), lambda n: (200_000, 200_000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_pixel_limits_of_a_request_are_the_processors_size(name):
    limits, size_of = LIMITS[name]
    rng = random.Random(4)
    for _ in range(300):
        count, height, width = rng.randint(2, 60), rng.randint(33, 2200), rng.randint(33, 2200)
        found = pairs().resized(count, (height, width), limits)
        assert found == smart_resize(count, height, width, 2, 32, *size_of(count))
    for count in (2, 5, 8):
        low, high = size_of(count)
        processor = Qwen3VLVideoProcessor(size={"shortest_edge": low, "longest_edge": high})
        video = torch.zeros((count, 3, 90, 160), dtype=torch.uint8)
        out = processor([video], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
        units = pairs().units(range(count), (90, 160), limits)
        assert [len(units), *units[0].grid[1:]] == out[0].tolist()


@pytest.mark.parametrize(
    ("limits", "per_frame"),
    [
        # max(min(768 * 1024, total / n * 2), int(min * 1.05)), as qwen-vl-utils has it
        (PixelLimits(total=20480 * 1024), lambda n: min(768 * 1024, 2 * 20480 * 1024 // n)),
        (PixelLimits(total=1024 * 1024), lambda n: min(768 * 1024, 2 * 1024 * 1024 // n)),
        (PixelLimits(min_per_frame=131_072, total=102_400), lambda n: int(131_072 * 1.05)),
        (PixelLimits(max_per_frame=262_144, total=20480 * 1024), lambda n: 262_144),
        (PixelLimits(max_per_frame=9_999_999), lambda n: 768 * 1024),
    ],
)
def test_capped_frames_have_the_pixels_of_qwens_tools(limits, per_frame):
    limits = replace(limits, cap_per_frame=True)
    for count in (2, 4, 10, 16):
        most = per_frame(count)
        least = limits.min_per_frame * count if limits.min_per_frame else 4096
        found = pairs().resized(count, (1080, 1920), limits)
        assert found == smart_resize(count, 1080, 1920, 2, 32, least, most * count)


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("in_config", [False, True])
def test_grids_and_pairs_are_the_processors(cap, in_config):
    rng = random.Random(1)
    for _ in range(40):
        count, height, width = rng.randint(2, 9), rng.randint(20, 700), rng.randint(20, 700)
        size = {"shortest_edge": 4096, "longest_edge": rng.choice((100_000, 1_000_000))}
        processor = Qwen3VLVideoProcessor(
            size=size, max_video_tokens=30, cap_pixels_per_frame=cap if in_config else None
        )
        video = torch.zeros((count, 3, height, width), dtype=torch.uint8)
        given = {} if in_config else {"cap_pixels_per_frame": cap}
        out = processor(
            [video], do_sample_frames=False, return_tensors="pt", **given
        )["video_grid_thw"]  # fmt: skip
        ours = pairs(
            max_pixels=size["longest_edge"], max_frame_tokens=30,
            cap_pixels_per_frame=cap and in_config,
        )  # fmt: skip
        limits = PixelLimits(cap_per_frame=None if in_config else cap)
        units = ours.units(range(count), (height, width), limits)
        time, *sides = out[0].tolist()
        assert [unit.grid for unit in units] == [(1, *sides)] * time
        last = count - 1
        assert units[-1].frames == ((last, last) if count % 2 else (last - 1, last))


def test_times_are_the_processors():
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    for total, rate, wanted in itertools.product(FRAMES[1:], RATES, WANTED):
        indices = pairs().indices(total, rate, Sampling(**(wanted or {})))
        assert pairs().times(indices, rate) == processor._calculate_timestamps(list(indices), rate)


def test_times_are_rounded_as_python_does():
    found = [time_text(seconds) for seconds in (0.0, 0.25, 0.75, 0.05, 12.349999, 3599.95)]
    assert found == [
        "<0.0 seconds>", "<0.2 seconds>", "<0.8 seconds>", "<0.1 seconds>", "<12.3 seconds>",
        "<3600.0 seconds>" if f"{3599.95:.1f}" == "3600.0" else f"<{3599.95:.1f} seconds>",
    ]  # fmt: skip


def vision_of(tmp_path, options: dict[str, object], **files: object) -> VisionSpec:
    for name, content in ({"video_preprocessor_config": options} | files).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return with_video(VisionSpec(tower=TOWER, geometry=Geometry(0, 16, 2, 1, 9)), tmp_path, IDS)


OBEYED = {
    "as shipped": {}, "no size": {"size": ABSENT}, "another rate": {"fps": 1.5},
    "a number of frames": {"fps": None, "num_frames": 7}, "all frames": {"fps": None},
    "limits": {"min_frames": 2, "max_frames": 9}, "capped": {"cap_pixels_per_frame": True},
    "a cap": {"cap_pixels_per_frame": True, "max_video_tokens": 20},
    "not capped": {"cap_pixels_per_frame": False},
}  # fmt: skip


@pytest.mark.parametrize("options", OBEYED.values(), ids=OBEYED)
def test_an_option_of_the_file_is_obeyed(options, tmp_path):
    given = SHIPPED | {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2} | options
    given = {key: value for key, value in given.items() if value is not ABSENT}
    ours = vision_of(tmp_path, given).video
    assert ours is not None
    processor = Qwen3VLVideoProcessor.from_pretrained(tmp_path)
    for total, height, width in ((90, 360, 640), (7, 40, 50), (2, 900, 700)):
        video = torch.zeros((total, 3, height, width), dtype=torch.uint8)
        out = processor(
            [video], video_metadata=[VideoMetadata(total, 30.0)], return_metadata=True,
            return_tensors="pt",
        )  # fmt: skip
        indices = ours.indices(total, 30.0, Sampling())
        assert list(indices) == list(out["video_metadata"][0].frames_indices)
        units = ours.units(indices, (height, width))
        assert [len(units), *units[0].grid[1:]] == out["video_grid_thw"][0].tolist()


REFUSED = {
    "do_sample_frames": {"do_sample_frames": False}, "do_resize": {"do_resize": False},
    "video_processor_type": {"video_processor_type": "Qwen2VLVideoProcessor"},
    "normalized": {"image_std": [0.5, 0.4, 0.5]}, "patch_size": {"patch_size": 14},
    "fps": {"fps": 0}, "fps and num_frames": {"num_frames": 4}, "max_frames": {"max_frames": None},
    "size.longest_edge": {"size": {"shortest_edge": 5}}, "min_pixels": {"min_pixels": 5},
    "resample": {"resample": 1}, "size": {"size": None},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_not_served_refuses_videos_by_its_name(name, tmp_path):
    vision = vision_of(tmp_path, SHIPPED | REFUSED[name])
    assert vision.video is None
    assert name in vision.no_video


def test_the_nested_processor_comes_first(tmp_path):
    nested = {"video_processor": SHIPPED | {"fps": 7}}
    vision = vision_of(tmp_path, SHIPPED, processor_config=nested)
    assert vision.video is not None and vision.video.fps == 7
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "video_preprocessor_config.json").unlink()
    bare = with_video(VisionSpec(tower=TOWER, geometry=vision.geometry), tmp_path, IDS)
    assert bare.video is None and bare.no_video == "the checkpoint has no video processor"


def test_a_prompts_ids_are_the_processors(tmp_path):
    directory = write_model_directory(tmp_path)
    tokenizer, ids = ModelTokenizer.from_directory(directory), added_ids()
    theirs = Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16),
        PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
        Qwen3VLVideoProcessor(size=SHIPPED["size"]),
    )
    video = FramePairs(
        video_token_id=ids["<|video_pad|>"], start_token_id=ids["<|vision_start|>"],
        end_token_id=ids["<|vision_end|>"], patch_size=16, merge_size=2, min_pixels=4096,
        max_pixels=25165824,
    )  # fmt: skip
    for total, rate, wanted in itertools.product((2, 5, 31), (24.0, 29.97, 0.4), WANTED):
        pixels = torch.zeros((total, 3, 64, 96), dtype=torch.uint8)
        given = {"fps": None} | (wanted or {"fps": 2})
        prompt = "Look: <|vision_start|><|video_pad|><|vision_end|> well"
        out = theirs(
            text=[prompt], videos=[pixels], video_metadata=[VideoMetadata(total, rate)], **given
        )
        indices = video.indices(total, rate, Sampling(**(wanted or {})))
        units = video.units(indices, (64, 96))
        texts = [tokenizer.encode_text(time_text(time)) for time in video.times(indices, rate)]
        placed, offsets = video.placeholders(units, texts)
        before = [*tokenizer.encode_text("Look: "), ids["<|vision_start|>"]]
        after = [ids["<|vision_end|>"], *tokenizer.encode_text(" well")]
        assert [*before, *placed.tolist(), *after] == out["input_ids"][0]
        for unit, offset in zip(units, offsets, strict=True):
            end = offset + video.num_tokens(unit)
            assert set(placed[offset:end].tolist()) == {video.video_token_id}


@pytest.mark.parametrize(
    ("indices", "rate"),
    [
        ([0, 10, 55, 95], 10.0),
        ([3, 4, 90], 29.97),
        ([7, 5], 24.0),
        ([0, 0, 1], 0.5),
        ([5, 9, 30], 2.0),
    ],
)
def test_frames_chosen_unevenly_have_the_times_of_the_processor(indices, rate, tmp_path):
    directory = write_model_directory(tmp_path)
    tokenizer = ModelTokenizer.from_directory(directory)
    theirs = Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16),
        PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
        Qwen3VLVideoProcessor(size=SHIPPED["size"]),
    )
    metadata = VideoMetadata(100, rate, frames_indices=list(indices))
    out = theirs(
        text=["<|vision_start|><|video_pad|><|vision_end|>"], do_sample_frames=False,
        videos=[torch.zeros((len(indices), 3, 64, 96), dtype=torch.uint8)],
        video_metadata=[metadata],
    )  # fmt: skip
    text = b"".join(map(tokenizer.token_bytes, out["input_ids"][0])).decode()
    times = [time_text(time) for time in pairs().times(indices, rate)]
    assert re.findall("<[0-9.]+ seconds>", text) == times


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_positions_are_get_rope_indexs(family, tmp_path):
    if family == "qwen3_vl":
        oracle = make_oracle(CONFIGS["gqa1-hd16-one-tap"], tmp_path)
    else:
        oracle = make_qwen3_5(next(iter(CONFIGS_3_5.values())), tmp_path)
    spec = read_spec(tmp_path)
    rng = random.Random(3)
    for _ in range(30):
        ids, runs, kinds = [], [], []
        grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
        for index in range(rng.randint(1, 4)):
            ids += [7] * rng.randint(0, 5)
            kind, num_units = rng.choice(((1, 1), (2, rng.randint(1, 5))))
            height, width = 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)
            grids[kind].append((num_units, height, width))
            ids.append(VISION_START_ID)
            for _ in range(num_units):
                if kind == 2:
                    ids += [*[9] * rng.randint(1, 6), VISION_START_ID]
                count = height * width // 4
                runs.append(Run(len(ids), count, Unit((1, height, width)), index))
                ids += [VIDEO_ID if kind == 2 else IMAGE_ID] * count
                ids.append(VISION_END_ID)
        ids += [8] * rng.randint(1, 9)
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE_ID).int() + 2 * (tokens == VIDEO_ID).int()
        given = {
            name: torch.tensor(grids[kind])
            for kind, name in ((1, "image_grid_thw"), (2, "video_grid_thw"))
            if grids[kind]
        }
        theirs, delta = oracle.model.model.get_rope_index(
            tokens, kinds, attention_mask=torch.ones_like(tokens), **given
        )
        ours, our_delta = spec.vision_part.geometry.positions(len(ids), runs)
        assert np.array_equal(ours, theirs[:, 0].numpy()) and our_delta == int(delta)
