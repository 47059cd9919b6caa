"""Reads the options of transformers' `Qwen2VLVideoProcessor`.

Its defaults are those of the class, except for two, which follow Qwen's own tools: frames are
sampled (two per second unless the file says another number), although `do_sample_frames` is false,
because the caller samples them there; and the pixels of frames are capped unless the file says
false, which is the default of transformers 5.22. A checkpoint without a file for videos has the
options in its preprocessor_config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.families.image_processor import (
    DEFAULTS as IMAGE_DEFAULTS,
)
from services.common.families.image_processor import (
    FILTERS,
    check_options,
    pixel_limits,
    read_processor,
)
from services.common.families.video_processor import check_frames, count, read_rate
from services.common.model_spec import ModelSpecError, VisionSpec
from services.common.whole_clips import WholeClips

DEFAULTS: dict[str, Any] = {
    name: value for name, value in IMAGE_DEFAULTS.items() if name != "image_processor_type"
} | {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "do_sample_frames": False,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "fps": None,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": None,
    "max_video_tokens": 128_000,
}
_FRAMES_PER_SECOND = 2.0
_IMAGES = "preprocessor_config.json"
_NULL_IS_ABSENT = ("size", "min_pixels", "max_pixels", "video_processor_type")


def with_clips(
    vision: VisionSpec,
    directory: Path,
    config: Mapping[str, Any],
    tokens_per_second: float | None = None,
) -> VisionSpec:
    """Adds the sampling of video frames, or the reason why videos are not served, to the spec.

    Args:
        vision: the vision part without videos.
        directory: the checkpoint.
        config: parsed config.json.
        tokens_per_second: attribute of `WholeClips`.
    """
    try:
        found = read_processor(directory, "video_processor", "video_preprocessor_config.json")
        found = found or read_processor(directory, "image_processor", _IMAGES)
        if found is None:
            return vision
        clips = _whole_clips(vision, found[1], config, tokens_per_second)
    except ModelSpecError as error:
        return replace(vision, no_video=f"the checkpoint's video processor: {error}")
    return replace(vision, video=clips)


def _whole_clips(
    vision: VisionSpec,
    given: Mapping[str, Any],
    config: Mapping[str, Any],
    tokens_per_second: float | None,
) -> WholeClips:
    present = {k: v for k, v in given.items() if v is not None or k not in _NULL_IS_ABSENT}
    options, tower = DEFAULTS | present, vision.tower
    check_options(
        options,
        present,
        tower,
        video_processor_type=("Qwen2VLVideoProcessor",),
        do_sample_frames=(True, False),
        cap_pixels_per_frame=(None, True, False),
    )
    check_frames(options, tower, config)
    min_pixels, max_pixels = pixel_limits(options)
    fps, num_frames = read_rate(options)
    return WholeClips(
        video_token_id=config["video_token_id"],
        start_token_id=config["vision_start_token_id"],
        end_token_id=config["vision_end_token_id"],
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        fps=fps or (None if num_frames else _FRAMES_PER_SECOND),
        num_frames=num_frames,
        min_frames=count("min_frames", options),
        max_frames=count("max_frames", options),
        max_video_tokens=count("max_video_tokens", options),
        cap_pixels_per_frame=options["cap_pixels_per_frame"] is not False,
        resample=FILTERS[options["resample"]],
        tokens_per_second=tokens_per_second,
    )
