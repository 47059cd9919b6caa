"""Reads the video processor's options.

Precedence and defaults are those of transformers' `Qwen3VLVideoProcessor`. If an option is not
implemented, the model is served without videos, and the answer to a video names the option.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.families.image_processor import (
    FILTERS,
    check_options,
    normalization,
    pixel_limits,
    read_processor,
)
from services.common.frame_pairs import FramePairs
from services.common.model_spec import ModelSpecError, TowerSpec, UnsupportedOption, VisionSpec

DEFAULTS: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "do_resize": True,
    "do_convert_rgb": True,
    "do_sample_frames": True,
    "resample": 3,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "fps": 2,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": None,
    "max_video_tokens": 768,
    "min_pixels": None,
    "max_pixels": None,
}
_TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


def with_video(vision: VisionSpec, directory: Path, config: Mapping[str, Any]) -> VisionSpec:
    """Adds the sampling of video frames, or the reason why videos are not served, to the spec."""
    try:
        found = read_processor(directory, "video_processor", "video_preprocessor_config.json")
        if found is None:
            return vision
        return replace(vision, video=_frame_pairs(vision, found[1], config))
    except ModelSpecError as error:
        return replace(vision, no_video=f"the checkpoint's video processor: {error}")


def _frame_pairs(
    vision: VisionSpec, given: Mapping[str, Any], config: Mapping[str, Any]
) -> FramePairs:
    options, tower = DEFAULTS | dict(given), vision.tower
    check_options(
        options,
        given,
        tower,
        video_processor_type=("Qwen3VLVideoProcessor",),
        do_sample_frames=(True,),
        cap_pixels_per_frame=(None, True, False),
        min_pixels=(None,),
        max_pixels=(None,),
    )
    check_frames(options, tower, config)
    limits = ("min_pixels", "max_pixels")  # transformers ignores them here and reads only `size`
    size = {key: value for key, value in options.items() if key not in limits}
    min_pixels, max_pixels = pixel_limits(size)
    fps, num_frames = read_rate(options)
    return FramePairs(
        video_token_id=config["video_token_id"],
        start_token_id=config["vision_start_token_id"],
        end_token_id=config["vision_end_token_id"],
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        fps=fps,
        num_frames=num_frames,
        min_frames=count("min_frames", options),
        max_frames=count("max_frames", options),
        max_frame_tokens=count("max_video_tokens", options),
        cap_pixels_per_frame=bool(options["cap_pixels_per_frame"]),
        resample=FILTERS[options["resample"]],
    )


def check_frames(options: Mapping[str, Any], tower: TowerSpec, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedOption if the tower or config.json does not fit pairs of frames."""
    if tower.temporal_patch_size != 2:
        raise UnsupportedOption("temporal_patch_size is not 2")
    if normalization(options, tower.in_channels) != (tower.pixel_mean, tower.pixel_std):
        raise UnsupportedOption("frames are normalized differently from images")
    if missing := [name for name in _TOKENS if not isinstance(config.get(name), int)]:
        raise UnsupportedOption(f"config.json has no {missing[0]}")


def read_rate(options: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Reads the number of frames to sample, per second (`fps`) or of each video (`num_frames`)."""
    fps = options["fps"]
    if fps is not None and not (type(fps) in (int, float) and 0 < fps < math.inf):
        raise UnsupportedOption(f"fps {fps!r} is not a positive number")
    num_frames = None if options["num_frames"] is None else count("num_frames", options)
    if fps is not None and num_frames is not None:
        raise UnsupportedOption("fps and num_frames exclude each other")
    return fps, num_frames


def count(option: str, options: Mapping[str, Any]) -> int:
    """Reads an option that is a positive integer."""
    value = options[option]
    if type(value) is not int or value < 1:
        raise UnsupportedOption(f"{option} {value!r} is not a positive integer")
    return value
