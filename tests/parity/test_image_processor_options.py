"""Every option of the image processor gives transformers' pixels, or is refused by its name."""

import json
from pathlib import Path

import pytest
import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from services.common.families.image_processor import read_vision_spec
from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Geometry
from services.common.model_spec import ModelSpecError, UnsupportedOption
from tests.parity.test_preprocess import encoded, noise, ours

TOWER = DeepStackTower(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=1, in_channels=3, patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2, num_position_embeddings=4, out_hidden_size=8,
    deepstack_indexes=(),
)  # fmt: skip
SHIPPED = {
    "size": {"shortest_edge": 16384, "longest_edge": 262144}, "patch_size": 16, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
ABSENT = object()
OBEYED = {
    "as shipped": {},
    "both limits beside size": {"min_pixels": 16384, "max_pixels": 32768},
    "max_pixels beside size": {"max_pixels": 32768},
    "min_pixels beside size": {"min_pixels": 40000},
    "limits of null": {"min_pixels": None, "max_pixels": None},
    "limits that cross": {"min_pixels": 90000, "max_pixels": 40000},
    "limits alone": {"size": ABSENT, "min_pixels": 5000, "max_pixels": 50000},
    "no size": {"size": ABSENT},
    "size of null": {"size": None},
    "bilinear": {"resample": 2},
    "bicubic": {"resample": 3},
    "raw mean and std": {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
    "another factor": {"rescale_factor": 1 / 51, "image_mean": [2.5] * 3, "image_std": [2.5] * 3},
    "rounded factor": {"rescale_factor": 0.00392156862745098},
    "no merge_size": {"merge_size": ABSENT},
    "no temporal_patch_size": {"temporal_patch_size": ABSENT},
    "scalar mean": {"image_mean": 0.5, "image_std": 0.5},
    "no type": {"image_processor_type": ABSENT},
    "options of other processors": {
        "do_center_crop": True, "crop_size": {"height": 9, "width": 9}, "do_pad": True,
        "default_to_square": True, "device": None, "data_format": "channels_first",
    },
}  # fmt: skip
NORMALIZED = {
    "no normalization": {"do_normalize": False},
    "no rescaling": {"do_rescale": False},
    "neither": {"do_rescale": False, "do_normalize": False},
    "a larger factor": {"rescale_factor": 1 / 127.5},
    "the default mean": {"image_mean": ABSENT},
    "the default deviation": {"image_std": ABSENT},
    "another deviation of one channel": {"image_std": [0.5, 0.5, 0.4]},
    "one mean of all channels": {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4]},
}
REFUSED = {
    "do_resize": {"do_resize": False},
    "do_resize ": {"do_resize": None},
    "do_rescale ": {"do_rescale": None},
    "do_normalize ": {"do_normalize": None},
    "do_convert_rgb ": {"do_convert_rgb": None},
    "rescale_factor ": {"rescale_factor": None},
    "resample ": {"resample": None},
    "patch_size ": {"patch_size": None},
    "do_convert_rgb": {"do_convert_rgb": False},
    "do_normalize": {"do_normalize": 1},
    "do_rescale": {"do_rescale": "false"},
    "rescale_factor": {"rescale_factor": 0},
    "image_mean": {"image_mean": [0.5, 0.5]},
    "image_mean ": {"image_mean": None},
    "image_mean  ": {"image_mean": [0.5, 0.5, "0.5"]},
    "image_std": {"image_std": [0.5, 0.5, 0.0]},
    "image_std ": {"image_std": True},
    "resample": {"resample": 0},
    "resample 1 ": {"resample": 1},
    "patch_size": {"patch_size": 14},
    "patch_size 14": {"patch_size": ABSENT},
    "merge_size": {"merge_size": 4},
    "temporal_patch_size": {"temporal_patch_size": 1},
    "image_processor_type": {"image_processor_type": "CLIPImageProcessor"},
    "size.longest_edge": {"size": {"shortest_edge": 16384}},
    "size.shortest_edge": {"size": {"longest_edge": 16384}},
    "size.height": {"size": {"height": 64, "width": 64}},
    "size": {"size": 64},
}


def options(changes: dict) -> dict:
    return {key: value for key, value in (SHIPPED | changes).items() if value is not ABSENT}


def write(directory: Path, changes: dict, *, nested: bool) -> None:
    given = options(changes)
    if nested:
        name, value = "processor_config.json", {"image_processor": given}
    else:
        name, value = "preprocessor_config.json", given
    (directory / name).write_text(json.dumps(value))


def read_geometry(directory: Path) -> Geometry:
    vision = read_vision_spec(directory, TOWER, 0)
    assert (vision.tower.pixel_mean, vision.tower.pixel_std) == ((127.5,), (127.5,))
    assert isinstance(vision.geometry, Geometry)
    return vision.geometry


def check_pixels(directory: Path) -> Geometry:
    geometry = read_geometry(directory)
    processor = Qwen2VLImageProcessor.from_pretrained(directory)
    for size in ((224, 160), (480, 640), (64, 96), (15, 1000)):
        image = noise(*size)
        theirs = processor(images=[image], return_tensors="pt")
        assert tuple(theirs["image_grid_thw"][0].tolist()) == geometry.units(size)[0].grid
        assert torch.equal(ours(encoded(image), size, geometry), theirs["pixel_values"])
    return geometry


@pytest.mark.parametrize("nested", [False, True], ids=["preprocessor", "processor"])
@pytest.mark.parametrize("changes", OBEYED.values(), ids=OBEYED)
def test_an_option_is_obeyed(
    tmp_path: Path, changes: dict, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its constructor writes min_pixels into the class's own `size`.
    monkeypatch.setattr(Qwen2VLImageProcessor, "size", dict(Qwen2VLImageProcessor.size))
    write(tmp_path, changes, nested=nested)
    check_pixels(tmp_path)


@pytest.mark.parametrize("changes", NORMALIZED.values(), ids=NORMALIZED)
def test_what_pixels_are_normalized_by_is_read(tmp_path: Path, changes: dict) -> None:
    write(tmp_path, changes, nested=False)
    vision, size = read_vision_spec(tmp_path, TOWER, 0), (96, 64)
    levels = vision.tower.pixel_mean, vision.tower.pixel_std
    image = noise(*size)
    theirs = Qwen2VLImageProcessor.from_pretrained(tmp_path)(images=[image], return_tensors="pt")
    pixels = ours(encoded(image), size, vision.geometry).unflatten(1, (3, -1)) * 127.5 + 127.5
    mean, std = (torch.tensor(level)[:, None] for level in levels)
    found = ((pixels - mean) / std).flatten(1)
    torch.testing.assert_close(found, theirs["pixel_values"].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nested", [False, True], ids=["preprocessor", "processor"])
@pytest.mark.parametrize(("option", "changes"), REFUSED.items(), ids=REFUSED)
def test_an_option_is_refused_by_name(
    tmp_path: Path, option: str, changes: dict, nested: bool
) -> None:
    write(tmp_path, changes, nested=nested)
    with pytest.raises(UnsupportedOption, match=option.strip()) as error:
        read_vision_spec(tmp_path, TOWER, 0)
    assert error.value.file == ("processor_config.json" if nested else "preprocessor_config.json")


def test_the_newer_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path, {}, nested=False)
    write(tmp_path, {"max_pixels": 32768}, nested=True)
    assert check_pixels(tmp_path).max_pixels == 32768


@pytest.mark.parametrize("newer", [{}, {"image_processor": None}, {"processor_class": "X"}])
def test_a_newer_file_without_the_section_leaves_the_older(tmp_path: Path, newer: dict) -> None:
    write(tmp_path, {"max_pixels": 32768}, nested=False)
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert check_pixels(tmp_path).max_pixels == 32768


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"preprocessor_config\.json is missing"):
        read_vision_spec(tmp_path, TOWER, 0)
