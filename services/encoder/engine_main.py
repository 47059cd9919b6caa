"""The encoder's engine process: `python -m services.encoder.engine_main`, started by the front."""

import functools
import io
import json
import logging
import os
import time

import torch
from PIL import Image

from services.common.collector import settle_collector
from services.common.engine_process import EngineEnd, accept
from services.common.families import read_spec
from services.common.image_geometry import ImageLimits, image_grid
from services.common.image_key import key_prefix
from services.common.model_spec import ModelSpec, ModelSpecError
from services.common.nn.weights import (
    DUMMY_FINGERPRINT,
    Checkpoint,
    fingerprint,
    load_dummy,
    load_weights,
)
from services.common.telemetry import setup_logging
from services.encoder.attention import create, resolve
from services.encoder.engine.engine import Engine, Prepare
from services.encoder.engine.messages import EngineReady, FrontMessage
from services.encoder.engine.runner import Runner
from services.encoder.kernels.ops import create_ops
from services.encoder.models import model_class
from services.encoder.models.base import VisionModel, dtype_named
from services.encoder.preprocess import preprocess
from services.encoder.settings import EncoderSettings

# With a smaller share of the memory, a process is not alone on its card.
_MOST_OF_THE_CARD = 0.5


def main() -> None:
    """Loads the model, warms up, says so, and runs until the front goes away."""
    end = accept()
    settings = EncoderSettings.model_validate_json(end.settings_json)
    setup_logging("encoder-engine", settings.log_level)
    start = time.monotonic()
    channel = end.channel(FrontMessage)
    config = read_spec(settings.model)
    device, dtype_name = resolve_device(settings.device, settings.dtype)
    prepare_device(device, settings)
    model, weights = load_model(config, settings, device, dtype_name)
    alone = settings.memory_fraction >= _MOST_OF_THE_CARD
    runner = Runner(model, device, dtype_named(dtype_name), end.arena, alone=alone)
    prepare = functools.partial(
        preprocess,
        limits=config.vision_part.limits,
        max_source_pixels=settings.max_source_pixels,
        pinned=device.type == "cuda",
    )
    warm_up(runner, prepare, config.vision_part.limits, settings.max_batch_patches)
    channel.send(
        EngineReady(
            model_name=config.name,
            dtype=dtype_name,
            num_features=config.vision_part.tower.num_features,
            hidden=config.vision_part.tower.out_hidden_size,
            merge_size=config.vision_part.tower.spatial_merge_size,
            key_prefix=key_prefix(
                model=config.name,
                weights=weights,
                vision_config=canonical_config(config),
                dtype=dtype_name,
            ),
        )
    )
    settle_collector()
    logging.info("ready on %s in %.1f s", device, time.monotonic() - start)
    Engine(
        channel,
        runner,
        prepare,
        max_batch_patches=settings.max_batch_patches,
        workers=settings.preprocess_workers or os.cpu_count() or 1,
    ).run()
    # Not through the interpreter's finalizers: pool threads may still decode, the arena is mapped.
    logging.shutdown()
    os._exit(0)


def resolve_device(device: str, dtype: str) -> tuple[torch.device, str]:
    """The device and dtype that "auto" stands for here.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, and torch finds no CUDA device")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", 0)
    if dtype == "auto":
        dtype = "bfloat16" if found.type == "cuda" else "float32"
    return found, dtype


def prepare_device(device: torch.device, settings: EncoderSettings) -> None:
    """Settings of torch that hold for the whole process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction)
        # The pool's threads resize side by side; each with a team of its own would be too many.
        torch.set_num_threads(1)
    elif settings.num_threads:
        torch.set_num_threads(settings.num_threads)


def load_model(
    config: ModelSpec, settings: EncoderSettings, device: torch.device, dtype_name: str
) -> tuple[VisionModel, bytes]:
    """The vision tower with its weights, and the weights' fingerprint."""
    dtype = dtype_named(dtype_name)
    vision = config.vision_part.tower
    head_dim = vision.hidden_size // vision.num_heads
    backend = resolve(settings.attention_backend, device, head_dim, dtype)
    attention = create(backend, num_heads=vision.num_heads, head_dim=head_dim, dtype=dtype)
    with torch.device("meta"):
        model = model_class(config.architecture)(vision, attention, create_ops(device))
    assert isinstance(model, torch.nn.Module)
    if settings.load_format == "dummy":
        load_dummy(
            model, device=device, dtype=dtype,
            weight_map=model.weight_map, quantization=config.checkpoint.quantization,
        )  # fmt: skip
        weights = DUMMY_FINGERPRINT.encode()
    else:
        checkpoint = Checkpoint.open(config.directory)
        load_weights(
            model, checkpoint, model.weight_map, device=device, dtype=dtype, spec=config.checkpoint
        )
        weights = fingerprint(checkpoint, "model.visual.").encode()
    logging.info("vision tower loaded; attention: %s, dtype: %s", backend, dtype_name)
    return model.eval(), weights


def canonical_config(config: ModelSpec) -> bytes:
    """Canonical JSON of what decides an embedding besides weights and pixels.

    Raises:
        ModelSpecError: the processor normalizes otherwise than the engine does.
    """
    vision = json.loads((config.directory / "config.json").read_text())["vision_config"]
    processor = json.loads((config.directory / "preprocessor_config.json").read_text())
    for name in ("image_mean", "image_std"):
        if processor.get(name, [0.5] * 3) != [0.5] * 3:
            raise ModelSpecError(f"preprocessor_config.json: {name} other than 0.5 is not served")
    both = {"vision": vision, "processor": processor}
    return json.dumps(both, sort_keys=True, separators=(",", ":")).encode()


def warm_up(runner: Runner, prepare: Prepare, limits: ImageLimits, max_batch_patches: int) -> None:
    """Runs each code path once, so that the first request is not slower than the tenth."""
    side = 4 * limits.patch_size * limits.merge_size
    image = Image.new("RGB", (side, side), (200, 30, 30))
    for kind in ("JPEG", "PNG", "WEBP"):
        file = io.BytesIO()
        image.save(file, kind)
        prepare(file.getvalue(), image_grid(side, side, limits))
    runner.warm_up(max_batch_patches)


__all__ = ["EngineEnd", "main"]

if __name__ == "__main__":
    main()
