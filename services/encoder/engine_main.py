"""The encoder's engine process: `python -m services.encoder.engine_main`, started by the front.

It loads the vision tower, warms it up, says what it serves, and runs the engine's loop. It knows no
gRPC and no Redis. Settings or a checkpoint that cannot be served end it with exit status 2, any
other failure with 1; its log says why.
"""

import services.common.process.rare_gc  # noqa: F401 - before torch

# isort: split
import io
import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from PIL import Image

from kernels.device import DeviceFacts
from services.common.families import read_spec
from services.common.geometry import Geometry
from services.common.images.image_key import key_prefix
from services.common.model_spec import ModelSpec, ModelSpecError, TowerSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError, fingerprint
from services.common.nn.device import resolve_device, resolve_dtype
from services.common.nn.dispatch import UnknownOverride, parse_overrides
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.layer_formats import set_methods
from services.common.nn.weights import DUMMY_FINGERPRINT, load_weights
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.engine_process import REFUSED, EngineEnd, accept, leave
from services.common.process.pod_limits import memory_limit_bytes, num_cpus
from services.common.process.process_memory import freeze_gc
from services.common.process.progress import log_progress
from services.common.settings import SettingsError, omp_num_threads
from services.common.telemetry import setup_logging
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.decode_pool import DecodePool
from services.encoder.decoding.prepare import Preparer
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.engine.engine import Engine, Prepare
from services.encoder.engine.messages import EngineReady, FrontMessage, Source
from services.encoder.engine.runner import Runner
from services.encoder.models import model_class
from services.encoder.operations.ops import Ops
from services.encoder.operations.table import TowerFacts, resolve
from services.encoder.settings import EncoderSettings

if TYPE_CHECKING:
    from services.encoder.models import VisionTower

# Budget of one batch, in patches before merging (4 per image token). A larger one keeps a device no
# busier, and images wait longer for each other.
MAX_BATCH_PATCHES = 12_288
# More keep no GPU busier; without a CPU limit a pod would have as many as the machine has cores.
_MAX_DECODERS = 16
# With a smaller share of its memory, other processes are taken to use the GPU, too.
_MEMORY_FRACTION_OF_SOLE_USER = 0.5

log = logging.getLogger("services.encoder.engine")


def main() -> int:
    """Runs the engine until the front closes the channel; the exit status."""
    end = accept()
    settings = EncoderSettings.model_validate_json(end.settings_json)
    setup_logging("encoder-engine", settings.log_level)
    try:
        _run(end, settings)
    except (CheckpointError, ModelSpecError, SettingsError, UnknownOverride) as error:
        log.critical("%s", error)
        return REFUSED
    except ChannelClosed:
        log.info("the front has exited")
    except torch.OutOfMemoryError as error:
        log.critical(
            "the device is out of memory (%s): raise ENCODER_MEMORY_FRACTION, or give the encoder "
            "a card of its own", str(error).partition(". ")[0],
        )  # fmt: skip
        return 1
    except Exception:
        log.critical("the engine failed", exc_info=True)
        return 1
    return 0


def _run(end: EngineEnd, settings: EncoderSettings) -> None:
    start = time.monotonic()
    channel = EngineChannel[FrontMessage](end.end, FrontMessage)
    spec = read_spec(settings.model)
    vision = spec.vision_part
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    dtype_name = str(dtype).removeprefix("torch.")
    prepare_device(device, settings)
    model, weights = load_model(spec, settings, device, dtype)
    shares_device = settings.memory_fraction < _MEMORY_FRACTION_OF_SOLE_USER
    runner = Runner(model, device, dtype, end.arena, shares_device=shares_device)
    decoders = create_decoders()
    num_threads = decoders.num_workers + 1  # one is never taken by a single tenant's videos
    of_images = vision.geometry, decoders.decoded, device.type == "cuda"
    prepare = Preprocessor(*of_images)
    if vision.video is not None:
        clips = ClipPool(num_threads, memory_bytes=memory_limit_bytes() // 4)
        prepare = Preparer(*of_images, vision.video.resample, clips)
    log_progress("kernels")
    warm_up(prepare, vision.geometry)
    runner.warm_up(MAX_BATCH_PATCHES, takes_videos=vision.video is not None)
    model.ops.table.log_rows()  # after the warm-up, which may have rejected some
    channel.send(
        EngineReady(
            model_name=spec.name,
            dtype=dtype_name,
            num_features=vision.tower.num_features,
            hidden=vision.tower.out_hidden_size,
            key_prefix=key_prefix(
                model=spec.name,
                weights=weights,
                vision_config=canonical_config(spec),
                dtype=dtype_name,
            ),
            on_gpu=device.type == "cuda",
        )
    )
    freeze_gc()
    log.info("ready on %s in %.1f s", device, time.monotonic() - start)
    Engine(
        channel,
        runner,
        prepare,
        max_batch_patches=batch_budget(device),
        workers=num_threads,
    ).run()


def batch_budget(device: torch.device) -> int:
    """Patches of a batch. On a CPU each image runs alone: a batch wins nothing there, and GEMMs of
    other sizes round otherwise (7e-6 of an embedding), which a sampled answer may show when its
    image is encoded again.
    """
    return MAX_BATCH_PATCHES if device.type == "cuda" else 1


def prepare_device(device: torch.device, settings: EncoderSettings) -> None:
    """Settings that hold for the whole process, and for those that it starts from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction)
        # The pool's threads resize in parallel; intra-op threads for each would oversubscribe.
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), num_cpus()))


def create_decoders() -> DecodePool:
    """The processes that decode, one for each CPU that the pod may use. At least two, so that no
    image has to wait until a large one is decoded. They have a quarter of the pod's memory, and
    those that decode videos another one.
    """
    num_workers = max(2, min(omp_num_threads() or num_cpus(), _MAX_DECODERS))
    return DecodePool(num_workers, memory_bytes=memory_limit_bytes() // 4)


def create_ops(
    tower: TowerSpec, settings: EncoderSettings, device: torch.device, dtype: torch.dtype
) -> Ops:
    """The tower's operations by the kernels that run on the device.

    Raises:
        UnknownOverride: `settings.kernels` names a kernel that cannot run here.
    """
    facts = TowerFacts.of(tower, DeviceFacts.of(device), dtype)
    return Ops(resolve(facts, parse_overrides(settings.kernels)))


def load_model(
    spec: ModelSpec, settings: EncoderSettings, device: torch.device, dtype: torch.dtype
) -> "tuple[VisionTower, bytes]":
    """The vision tower with its weights, and the weights' fingerprint.

    Raises:
        UnknownOverride: `settings.kernels` names a kernel that cannot run here.
    """
    tower, prefix = spec.vision_part.tower, spec.checkpoint.vision_prefix
    with torch.device("meta"):
        ops = create_ops(tower, settings, device, dtype)
        model = model_class(tower)(tower, ops, prefix)
    assert isinstance(model, torch.nn.Module)
    if settings.load_format == "dummy":
        load_dummy(
            model, device=device, dtype=dtype,
            weight_map=model.weight_map, quantization=spec.checkpoint.quantization,
        )  # fmt: skip
        weights = DUMMY_FINGERPRINT.encode()
    else:
        checkpoint = Checkpoint.open(spec.directory)
        set_methods(model, checkpoint, model.weight_map, spec.checkpoint.quantization)
        load_weights(
            model, checkpoint, model.weight_map, device=device, dtype=dtype, spec=spec.checkpoint
        )
        weights = fingerprint(checkpoint, prefix).encode()
    log.info("vision tower loaded in %s", dtype)
    return model.eval(), weights


def canonical_config(spec: ModelSpec) -> bytes:
    """Canonical JSON of what decides an embedding besides weights and pixels."""
    vision = json.loads((spec.directory / "config.json").read_text())["vision_config"]
    both = {"config": vision, "spec": asdict(spec.vision_part)}
    return json.dumps(both, sort_keys=True, separators=(",", ":")).encode()


def warm_up(prepare: Prepare, geometry: Geometry) -> None:
    """Decodes an image of each kind, so that the first request is not slower than the tenth."""
    image = Image.new("RGB", (128, 128), (200, 30, 30))
    for kind in ("JPEG", "PNG", "WEBP"):
        file = io.BytesIO()
        image.save(file, kind)
        prepare(Source(file.getvalue()), geometry.units((128, 128))[0], lambda: None)


if __name__ == "__main__":
    leave(main())
