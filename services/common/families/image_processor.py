"""Reads the image processor's options.

Precedence and defaults are those of transformers' `Qwen2VLImageProcessor`. An option that is not
implemented raises `UnsupportedOption` with the option's name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from services.common.geometry import Geometry
from services.common.model_spec import (
    ModelSpecError,
    TowerSpec,
    UnsupportedOption,
    VisionSpec,
    read_json,
)

_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
DEFAULTS: dict[str, Any] = {
    "image_processor_type": _TYPES[0],
    "do_resize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_NULL_IS_ABSENT = ("size", "min_pixels", "max_pixels", "image_processor_type")
FILTERS: dict[object, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
# Mean and standard deviation, for pixel values from 0 to 255, of nearly all checkpoints. Values
# that differ from it by rounding only are replaced by it.
_CENTRE = 127.5


def read_vision_spec(
    directory: Path,
    tower: TowerSpec,
    image_token_id: int,
    *,
    types: tuple[str, ...] = _TYPES,
    defaults: Mapping[str, Any] = DEFAULTS,
    geometry: type[Geometry] = Geometry,
) -> VisionSpec:
    """Reads the vision part of a model: image geometry and pixel normalization.

    Args:
        directory: the checkpoint.
        tower: spec of the vision tower, without pixel normalization.
        image_token_id: id of the token that stands for an image in the prompt.
        types: names of the family's image processor.
        defaults: options that are absent from the file.
        geometry: the processor's division of images into units.

    Raises:
        ModelSpecError: the image processor's file is missing or malformed.
        UnsupportedOption: the value of an option is not implemented or does not fit the tower.
    """
    found = read_processor(directory, "image_processor", "preprocessor_config.json")
    if found is None:
        raise ModelSpecError(f"{directory / 'preprocessor_config.json'} is missing")
    name, given = found
    present = {k: v for k, v in given.items() if v is not None or k not in _NULL_IS_ABSENT}
    options = {**defaults, **present}
    try:
        check_options(options, present, tower, image_processor_type=types)
        mean, std = normalization(options, tower.in_channels)
        min_pixels, max_pixels = pixel_limits(options)
    except UnsupportedOption as error:
        raise UnsupportedOption(str(error), name) from None
    found_geometry = geometry(
        image_token_id=image_token_id,
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        resample=FILTERS[options["resample"]],
    )
    return VisionSpec(tower=replace(tower, pixel_mean=mean, pixel_std=std), geometry=found_geometry)


def read_processor(
    directory: Path, section: str, file: str
) -> tuple[str, Mapping[str, Any]] | None:
    """Finds the options of an image or video processor.

    The section of processor_config.json takes precedence over the processor's own file.

    Args:
        directory: the checkpoint.
        section: name of the section in processor_config.json.
        file: name of the processor's own file.

    Returns:
        Name of the file that has the options, and the options. None if the checkpoint has neither
        the section nor the file.
    """
    path = directory / "processor_config.json"
    nested = read_json(path).get(section) if path.exists() else None
    if nested is not None:
        if not isinstance(nested, dict):
            raise UnsupportedOption(f"{section} is not an object", path.name)
        return path.name, cast("dict[str, Any]", nested)
    path = directory / file
    return (path.name, read_json(path)) if path.exists() else None


def check_options(
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    tower: TowerSpec,
    **others: tuple[object, ...],
) -> None:
    """Raises UnsupportedOption if the value of an option is not supported.

    Args:
        options: all options, with defaults for those that the file does not have.
        given: the options that the file has.
        tower: spec of the vision tower.
        others: supported values of the options that image and video processors do not share.
    """
    for option, served in {
        **others,
        "do_resize": (True,),
        "do_convert_rgb": (True,),
        "resample": tuple(FILTERS),
        "patch_size": (tower.patch_size,),
        "merge_size": (tower.spatial_merge_size,),
        "temporal_patch_size": (tower.temporal_patch_size,),
        "do_rescale": (True, False),
        "do_normalize": (True, False),
    }.items():
        value = options[option]
        if not any(value == each and type(value) is type(each) for each in served):
            default = "" if option in given else " (the default of an absent field)"
            raise UnsupportedOption(
                f"{option} {value!r}{default} is not supported; "
                f"supported: {' or '.join(repr(each) for each in served)}"
            )


def normalization(
    options: Mapping[str, Any], num_channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixel values from 0 to 255.

    Each has one value per channel, or a single value for all channels.
    """
    (factor,) = _positive("rescale_factor", options, 1) if options["do_rescale"] else (1.0,)
    if not options["do_normalize"]:
        return (0.0,), (1 / factor,)
    mean = _numbers("image_mean", options, num_channels)
    std = _positive("image_std", options, num_channels)
    return _levels(mean, factor), _levels(std, factor)


def _levels(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    levels = tuple(value / factor for value in values)
    return (_CENTRE,) if all(abs(level - _CENTRE) < 1e-4 for level in levels) else levels


def _positive(option: str, options: Mapping[str, Any], count: int) -> tuple[float, ...]:
    values = _numbers(option, options, count)
    if min(values) <= 0:
        raise UnsupportedOption(f"{option} {options[option]!r} is not positive")
    return values


def _numbers(option: str, options: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """Reads an option that is a number or a list with a number per channel."""
    given = options[option]
    values = tuple(given) if isinstance(given, list) else (given,)
    if len(values) not in (1, count) or not all(type(value) in (int, float) for value in values):
        raise UnsupportedOption(
            f"{option} {given!r} is neither a number nor a list with a number per channel"
        )
    return values


def pixel_limits(options: Mapping[str, Any]) -> tuple[int, int]:
    """Smallest and largest area of a resized image, in pixels.

    `min_pixels` and `max_pixels` take precedence over the edges in `size`.
    """
    size = options["size"]
    if not isinstance(size, dict):
        raise UnsupportedOption(f"size {size!r} is not supported; supported: an object")
    edges = cast("dict[str, Any]", size)
    edges = {key: value for key, value in edges.items() if value is not None}
    for edge, pixels in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if pixels in options:
            edges.pop(pixels, None)
            edges[edge] = options[pixels]
    if unknown := sorted(edges.keys() - {"shortest_edge", "longest_edge"}):
        raise UnsupportedOption(f"size.{unknown[0]} is not supported")
    found: list[int] = []
    for edge in ("shortest_edge", "longest_edge"):
        value = edges.get(edge)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedOption(f"size.{edge} {value!r} is not a positive number of pixels")
        found.append(value)
    return found[0], found[1]
