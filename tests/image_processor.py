"""The image processor's file of a checkpoint made for a test."""

import json
from pathlib import Path

CENTRED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_image_processor(directory: Path, min_pixels: int, max_pixels: int) -> None:
    """Fits the tower of the directory's config.json."""
    config = json.loads((directory / "config.json").read_text())
    tower = config["vision_config"]
    options: dict[str, object] = {
        **CENTRED,
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "temporal_patch_size": tower.get("temporal_patch_size", 1),
    }
    if config.get("model_type") == "paddleocr_vl":
        options["image_processor_type"] = "PaddleOCRVLImageProcessor"
    (directory / "preprocessor_config.json").write_text(json.dumps(options))


def write_video_processor(
    directory: Path, min_pixels: int, max_pixels: int, **further: object
) -> None:
    """Likewise the video processor's; pixels are those of all frames."""
    tower = json.loads((directory / "config.json").read_text())["vision_config"]
    options = CENTRED | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        **further,
    }
    (directory / "video_preprocessor_config.json").write_text(json.dumps(options))
