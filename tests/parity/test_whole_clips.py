"""Videos that are one run of tokens: frames, sizes, prompts and positions are those of
transformers' processors for Qwen2-VL and Qwen2.5-VL, except where `rope_index` says otherwise.
"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from services.common.errors import InvalidVideo
from services.common.families import read_spec
from services.common.families.clip_processor import DEFAULTS, with_clips
from services.common.families.image_processor import normalization
from services.common.families.qwen2_vl import PlainTower
from services.common.frame_pairs import Clip, PixelLimits, Sampling
from services.common.geometry import Geometry, Run, Unit
from services.common.model_spec import VisionSpec
from services.common.whole_clips import WholeClips
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.parity.oracle import CONFIGS, IMAGE_ID, VIDEO_ID, Oracle, make_oracle
from tests.parity.rope_index import trained_rope_index
from tests.tiny_tokenizer import added_ids, write_model_directory

TOWER = PlainTower(1, 8, 8, 1, 3, 14, 2, 2, 8)
IDS = {"video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}
PUBLISHED = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
FRAMES = (*range(2, 40), 58, 59, 89, 299, 300, 301, 749, 1499, 1536, 1537, 3600)
RATES = (23.976023976023978, 24.0, 25.0, 29.97002997002997, 30.0, 60.0, 7.5, 1.0, 0.1, 14.99)
WANTED: tuple[dict[str, Any], ...] = (
    {"fps": 0.1}, {"fps": 0.5}, {"fps": 1}, {"fps": 1.5}, {"fps": 2}, {"fps": 3}, {"fps": 29.97},
    {"fps": 60}, *({"num_frames": n} for n in (2, 3, 4, 5, 7, 16, 33, 768)),
)  # fmt: skip


def clips(**options: Any) -> WholeClips:
    given: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 12845056} | options
    return WholeClips(
        video_token_id=1, start_token_id=2, end_token_id=3, patch_size=14, merge_size=2, **given
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [(4, 768), (2, 6)])
def test_the_frames_that_are_sampled(limits: tuple[int, int]) -> None:
    processor = Qwen2VLVideoProcessor(min_frames=limits[0], max_frames=limits[1])
    ours = clips(min_frames=limits[0], max_frames=limits[1])
    num_behind = 0
    for total, rate, wanted in itertools.product(FRAMES, RATES, WANTED):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        try:
            theirs = processor.sample_frames(metadata, **wanted).tolist()
        except ValueError:
            with pytest.raises(InvalidVideo):
                ours.indices(total, rate, Sampling(**wanted))
            continue
        if theirs[-1] >= total:  # their step is too small by a rounding
            num_behind += 1
            theirs.pop()
        assert ours.indices(total, rate, Sampling(**wanted)) == tuple(theirs), (total, rate, wanted)
    assert num_behind < 0.01 * len(FRAMES) * len(RATES) * len(WANTED)


def test_all_frames_and_too_few() -> None:
    assert clips().indices(7, 30.0, Sampling(all_frames=True)) == tuple(range(7))
    assert len(clips().indices(90, 0.0, Sampling())) == 6  # 24 frames per second are assumed
    for count, wanted in ((1, Sampling()), (5, Sampling(num_frames=8))):
        with pytest.raises(InvalidVideo):
            clips().indices(count, 30.0, wanted)


@pytest.mark.parametrize("cap", [False, True])
def test_sizes_are_the_processors(cap: bool) -> None:
    rng = random.Random(0)
    for _ in range(30):
        count, height, width = rng.randint(2, 9), rng.randint(20, 400), rng.randint(20, 400)
        low, high = rng.choice((3136, 20_000)), rng.choice((60_000, 200_000))
        tokens = rng.choice((60, 128_000))
        processor = Qwen2VLVideoProcessor(
            size={"shortest_edge": low, "longest_edge": high}, max_video_tokens=tokens
        )
        video = torch.zeros((count, 3, height, width), dtype=torch.uint8)
        out = processor([video], cap_pixels_per_frame=cap, return_tensors="pt")["video_grid_thw"]
        ours = clips(
            min_pixels=low, max_pixels=high, max_video_tokens=tokens, cap_pixels_per_frame=cap
        )
        units = ours.units(range(count), (height, width))
        assert [len(units), *units[0].grid[1:]] == out[0].tolist()
        asked = clips(max_video_tokens=tokens, cap_pixels_per_frame=not cap).units(
            range(count), (height, width),
            PixelLimits(min_per_frame=low, max_per_frame=high, cap_per_frame=cap),
        )  # fmt: skip
        assert asked == units
    with pytest.raises(InvalidVideo, match="200 times"):
        clips().units(range(2), (20, 5000))


def vision_of(directory: Path, **files: dict[str, object]) -> VisionSpec:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    mean, std = normalization(DEFAULTS | PUBLISHED, 3)
    tower = replace(TOWER, pixel_mean=mean, pixel_std=std)
    return with_clips(VisionSpec(tower=tower, geometry=Geometry(0, 14, 2, 1, 9)), directory, IDS)


def test_the_image_processors_file_stands_in_for_the_videos(tmp_path: Path) -> None:
    found = vision_of(tmp_path, preprocessor_config=PUBLISHED).video
    assert isinstance(found, WholeClips)
    assert (found.min_pixels, found.max_pixels, found.fps) == (3136, 12845056, 2.0)
    assert found.cap_pixels_per_frame
    own = PUBLISHED | {"max_pixels": 50_000, "fps": 1.0, "cap_pixels_per_frame": False}
    found = vision_of(tmp_path, video_preprocessor_config=own).video
    assert isinstance(found, WholeClips)
    assert (found.max_pixels, found.fps, found.cap_pixels_per_frame) == (50_000, 1.0, False)
    for option, value in {"do_resize": False, "patch_size": 16, "image_std": [1, 2, 3]}.items():
        refused = vision_of(tmp_path, video_preprocessor_config=PUBLISHED | {option: value})
        assert refused.video is None
        assert {"image_std": "normalized"}.get(option, option) in refused.no_video


def test_limits_of_a_published_file_are_the_processors() -> None:
    """smart_resize with tokens of 28 pixels and the file's `min_pixels` and `max_pixels`."""
    options = {k: v for k, v in PUBLISHED.items() if not k.endswith(("type", "class"))}
    processor = Qwen2VLImageProcessor(**options)  # type: ignore[arg-type]
    geometry = Geometry(0, 14, 2, 3136, 12845056)
    for size in ((1, 30), (28, 28), (43, 57), (1080, 1920), (4000, 5000), (42, 70), (700, 9)):
        patches = processor.get_number_of_image_patches(*size, {})
        assert geometry.units(size)[0].num_patches == patches


@pytest.mark.parametrize("fps", [0.5, 1.0, 1.7, 2.0, 3.0, 8.0])
def test_a_prompts_ids_and_seconds_are_the_processors(fps: float, tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    tokenizer, ids = ModelTokenizer.from_directory(directory), added_ids()
    theirs: Any = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(),
        PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
        Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": 50_000}),
    )
    ours = replace(
        clips(max_pixels=50_000, tokens_per_second=2), video_token_id=ids["<|video_pad|>"]
    )
    prompt = "Look: <|vision_start|><|video_pad|><|vision_end|> well"
    for total, rate in itertools.product((5, 31, 90), (24.0, 29.97)):
        metadata = VideoMetadata(total, rate)
        out = theirs(
            text=[prompt], videos=[torch.zeros((total, 3, 64, 96), dtype=torch.uint8)],
            video_metadata=[metadata], fps=fps, do_sample_frames=True, return_tensors="pt",
        )  # fmt: skip
        indices = ours.indices(total, rate, Sampling(fps=fps))
        units = ours.units(indices, (64, 96))
        placed, offsets = ours.placeholders(units, [[]] * len(units))
        before = [*tokenizer.encode_text("Look: "), ids["<|vision_start|>"]]
        after = [ids["<|vision_end|>"], *tokenizer.encode_text(" well")]
        assert [*before, *placed.tolist(), *after] == out["input_ids"][0].tolist()
        assert offsets == [i * ours.num_tokens(units[0]) for i in range(len(units))]
        seconds = torch.as_tensor(out["second_per_grid_ts"], dtype=torch.float32)[0]
        expected = (torch.arange(len(units)) * (seconds * 2)).long().tolist()
        clip = Clip(total, rate, (64, 96))
        assert list(ours.steps(len(units), ours.rate_of(indices, clip))) == expected


def mixture(rng: random.Random, ours: WholeClips, most_units: int) -> tuple[list, list, dict]:
    """Token ids, runs and what `get_rope_index` takes of some images and videos among text."""
    ids: list[int] = []
    runs: list[Run] = []
    grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
    seconds: list[float] = []
    for index in range(rng.randint(1, 4)):
        ids += [7] * rng.randint(1, 5)
        kind, count = rng.choice(((1, 1), (2, rng.randint(1, most_units))))
        height, width = 2 * rng.randint(1, 7), 2 * rng.randint(1, 7)
        grids[kind].append((count, height, width))
        rate = rng.choice((0.5, 1.0, 2.0)) if most_units < 8 else rng.uniform(0.3, 9)
        steps = [0]
        if kind == 2:
            seconds.append(2 / rate)
            steps = list(ours.steps(count, rate))
        for step in steps:
            number = height * width // 4
            runs.append(Run(len(ids), number, Unit((1, height, width)), index, step))
            ids += [VIDEO_ID if kind == 2 else IMAGE_ID] * number
    ids += [8] * rng.randint(1, 9)
    tokens = torch.tensor([ids])
    given = {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE_ID).int() + 2 * (tokens == VIDEO_ID).int(),
        "attention_mask": torch.ones_like(tokens),
    }
    for kind, name in ((1, "image_grid_thw"), (2, "video_grid_thw")):
        if grids[kind]:
            given[name] = torch.tensor(grids[kind])
    if seconds and ours.tokens_per_second:
        given["second_per_grid_ts"] = torch.tensor(seconds)
    return ids, runs, given


@pytest.fixture(scope="module", params=["qwen2-gqa3-hd32", "qwen2.5-gqa2-hd16"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


def test_positions_are_get_rope_indexs(oracle: Oracle) -> None:
    """Those of transformers 5.17 where a video is not longer than it is wide, so that its text
    does not begin within it, and where the seconds are whole; all others are the trained ones.
    """
    vision = read_spec(oracle.directory).vision_part
    per_second = getattr(oracle.model.config.vision_config, "tokens_per_second", None)
    ours = clips(tokens_per_second=per_second)
    rng, num_same = random.Random(3), 0
    for index in range(60):
        ids, runs, given = mixture(rng, ours, 4 if index % 2 else 40)
        found, delta = vision.geometry.positions(len(ids), runs)
        assert found is not None
        trained, trained_delta = trained_rope_index(oracle.model.config, **given)
        assert np.array_equal(found, trained[:, 0].numpy()) and delta == int(trained_delta)
        sides = [max(run.unit.grid) // 2 for run in runs]
        is_short = all(run.time < side for run, side in zip(runs, sides, strict=True))
        whole = all(float(s).is_integer() for s in given.get("second_per_grid_ts", ()))
        if is_short and whole:
            num_same += 1
            theirs, their_delta = oracle.model.model.get_rope_index(**given)
            assert np.array_equal(found, theirs[:, 0].numpy()) and delta == int(their_delta)
    assert num_same >= 15


def test_control_transformers_begins_text_within_a_long_video(oracle: Oracle) -> None:
    """If this fails, transformers has mended it, and the condition above can go."""
    tokens = torch.tensor([[7, *[VIDEO_ID] * 6, 8, 8]])
    kinds = 2 * (tokens == VIDEO_ID).int()
    given = {"video_grid_thw": torch.tensor([[6, 2, 2]]), "second_per_grid_ts": torch.tensor([1.0])}
    theirs, _ = oracle.model.model.get_rope_index(
        input_ids=tokens, mm_token_type_ids=kinds, attention_mask=torch.ones_like(tokens), **given
    )
    trained, _ = trained_rope_index(oracle.model.config, tokens, kinds, **given)
    assert int(theirs[0, 0, 7]) == 2 and int(theirs[0, 0, 6]) > 2
    assert int(trained[0, 0, 7]) == int(trained[0, 0, 6]) + 1
