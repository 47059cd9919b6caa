"""The encoder's engine process: `python -m services.encoder.engine_main`, started by the front.

The process loads the vision tower, warms up its kernels, reports to the front which model it
serves, and runs the engine's loop. It uses neither gRPC nor Redis. If the settings or the
checkpoint cannot be served, the exit status is 2. After any other failure it is 1. The log has the
reason.
"""

import services.common.process.passive_threads
import services.common.process.rare_gc  # noqa: F401 - both before torch

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
from services.common.adapter_config import AdapterConfig, adapts_tower, named_digest
from services.common.families import read_spec
from services.common.geometry import Geometry
from services.common.images.image_key import key_prefix
from services.common.model_spec import ModelSpec, ModelSpecError, TowerSpec, VisionSpec
from services.common.nn.adapter import Adapter
from services.common.nn.checkpoint import Checkpoint, CheckpointError, fingerprint
from services.common.nn.device import gpu_uuid, resolve_device, resolve_dtype
from services.common.nn.dispatch import UnknownOverride, parse_overrides
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.layer_formats import set_methods
from services.common.nn.merged_checkpoint import MergedCheckpoint, open_checkpoint
from services.common.nn.weights import DUMMY_FINGERPRINT, load_weights
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.device_turns import NO_TURNS, open_turns
from services.common.process.engine_process import REFUSED, EngineEnd, accept, leave
from services.common.process.pod_limits import memory_limit_bytes, num_cpus
from services.common.process.process_memory import freeze_gc
from services.common.process.progress import log_progress
from services.common.settings import SettingsError, omp_num_threads
from services.common.telemetry import setup_logging
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.decode_pool import DecodePool
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Source
from services.encoder.engine.engine import Engine
from services.encoder.engine.messages import EngineReady, FrontMessage
from services.encoder.engine.runner import Runner
from services.encoder.models import create_tower
from services.encoder.operations.ops import Ops
from services.encoder.operations.table import TowerFacts, resolve
from services.encoder.settings import EncoderSettings

if TYPE_CHECKING:
    from services.encoder.models import VisionTower

# Budget of one batch, in patches before merging (4 per image token). A larger batch does not use a
# GPU better, and its images wait longer for each other.
MAX_BATCH_PATCHES = 12_288
# More decoders do not use a GPU better. A pod without a CPU limit would start one per core.
_MAX_DECODERS = 16
# An encoder with a smaller share of the GPU's memory assumes that other processes use the GPU, too.
_MEMORY_FRACTION_OF_SOLE_USER = 0.5

log = logging.getLogger("services.encoder.engine")


def main() -> int:
    """Runs the engine until the front closes the channel. Returns the exit status."""
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
            "a card of its own",
            str(error).partition(". ")[0],
        )
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
    adapted = load_adapted(spec, model.ops, settings, device, dtype)
    shares_device = settings.memory_fraction < _MEMORY_FRACTION_OF_SOLE_USER
    runner = Runner(
        model,
        device,
        dtype,
        end.arena,
        adapted=list(adapted.values()),
        shares_device=shares_device,
    )
    decoders = create_decoders()
    # The videos of a single tenant leave one thread to other tenants and to images.
    num_threads = decoders.num_workers + 1
    preprocessor = create_preprocessor(vision, decoders, device, num_threads)
    log_progress("kernels")
    warm_up(preprocessor, vision.geometry)
    runner.warm_up(MAX_BATCH_PATCHES, takes_videos=vision.video is not None)
    model.ops.table.log_rows()  # after the warm-up, which may have dropped some implementations
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
            adapters=list(adapted),
        )
    )
    freeze_gc()
    log.info("ready on %s in %.1f s", device, time.monotonic() - start)
    turns = NO_TURNS
    if shares_device and device.type == "cuda":
        turns = open_turns(gpu_uuid(device), exclusive=True)
    Engine(
        channel,
        runner,
        preprocessor,
        max_batch_patches=batch_budget(device),
        workers=num_threads,
        turns=turns,
    ).run()


def batch_budget(device: torch.device) -> int:
    """Returns the most patches of a batch. On a CPU each image runs alone: a batch is not faster
    there, and GEMMs of other sizes round differently (7e-6 of an embedding's values), which may
    change a sampled answer when its image is encoded again.
    """
    return MAX_BATCH_PATCHES if device.type == "cuda" else 1


def prepare_device(device: torch.device, settings: EncoderSettings) -> None:
    """Selects the device, and limits its memory and the threads of torch for this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction)
        # The pool's threads resize in parallel. Threads of torch inside each of them would be more
        # than the CPU has cores.
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), num_cpus()))


def create_decoders() -> DecodePool:
    """Starts the processes that decode images: one for each CPU of the pod, and at least two,
    because small images would otherwise wait for a large image. The processes may use a quarter of
    the pod's memory.
    """
    num_workers = max(2, min(omp_num_threads() or num_cpus(), _MAX_DECODERS))
    return DecodePool(num_workers, memory_bytes=memory_limit_bytes() // 4)


def create_preprocessor(
    vision: VisionSpec, decoders: DecodePool, device: torch.device, max_video_decoders: int
) -> Preprocessor:
    """Creates the preprocessor of a model.

    Args:
        vision: the model's vision part.
        decoders: processes that decode images.
        device: device that the pixels are copied to.
        max_video_decoders: most processes that decode videos, if the model takes videos. They may
            use another quarter of the pod's memory.
    """
    pinned = device.type == "cuda"
    if vision.video is None:
        return Preprocessor(vision.geometry, decoders, pinned)
    clips = ClipPool(max_video_decoders, memory_bytes=memory_limit_bytes() // 4)
    return Preprocessor(vision.geometry, decoders, pinned, clips, vision.video.resample)


def create_ops(
    tower: TowerSpec, settings: EncoderSettings, device: torch.device, dtype: torch.dtype
) -> Ops:
    """Chooses the kernels of the tower's operations for the device.

    Raises:
        UnknownOverride: `settings.kernels` names a kernel that cannot run here.
    """
    facts = TowerFacts.of(tower, DeviceFacts.of(device), dtype)
    return Ops(resolve(facts, parse_overrides(settings.kernels)))


def load_model(
    spec: ModelSpec, settings: EncoderSettings, device: torch.device, dtype: torch.dtype
) -> "tuple[VisionTower, bytes]":
    """Loads the vision tower. Returns it with the fingerprint of its weights.

    Raises:
        UnknownOverride: `settings.kernels` names a kernel that cannot run here.
    """
    tower, prefix = spec.vision_part.tower, spec.checkpoint.vision_prefix
    with torch.device("meta"):
        ops = create_ops(tower, settings, device, dtype)
        model = create_tower(tower, ops, prefix)
    if settings.load_format == "dummy":
        load_dummy(
            model,
            device=device,
            dtype=dtype,
            weight_map=model.weight_map,
            quantization=spec.checkpoint.quantization,
        )
        weights = DUMMY_FINGERPRINT.encode()
    else:
        checkpoint = open_checkpoint(spec, settings.merge_adapter, dtype)
        _fill(model, checkpoint, spec, device, dtype)
        weights = fingerprint(checkpoint, spec.checkpoint.vision_prefixes).encode()
    log.info("vision tower loaded in %s", dtype)
    return model.eval(), weights


def _fill(
    model: "VisionTower",
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    set_methods(model, checkpoint, model.weight_map, spec.checkpoint.quantization)
    load_weights(
        model, checkpoint, model.weight_map, device=device, dtype=dtype, spec=spec.checkpoint
    )


def load_adapted(
    spec: ModelSpec, ops: Ops, settings: EncoderSettings, device: torch.device, dtype: torch.dtype
) -> "dict[bytes, VisionTower]":
    """Loads a tower for each adapter that changes the vision tower, with the adapter folded into
    its weights. Returns them by the adapters' digests.

    Raises:
        AdapterError: an adapter cannot be folded into the tower's weights.
        SettingsError: the towers' weights are not those of the checkpoint alone.
    """
    named = {name: path for name, path in settings.named_adapters.items() if adapts_tower(path)}
    if named and (settings.merge_adapter is not None or settings.load_format == "dummy"):
        raise SettingsError(
            "ENCODER_ADAPTERS: adapters that change the vision tower are supported neither beside "
            "ENCODER_MERGE_ADAPTER nor with random weights (ENCODER_LOAD_FORMAT=dummy)"
        )
    found: dict[bytes, VisionTower] = {}
    for name, directory in named.items():
        adapter = Adapter.read(AdapterConfig.read(directory)).of_tower()
        checkpoint = MergedCheckpoint(Checkpoint.open(spec.directory), adapter, spec, dtype)
        with torch.device("meta"):
            model = create_tower(spec.vision_part.tower, ops, spec.checkpoint.vision_prefix)
        _fill(model, checkpoint, spec, device, dtype)
        found[named_digest(name, directory)] = model.eval()
        log.info("vision tower of the adapter %s loaded", name)
    return found


def canonical_config(spec: ModelSpec) -> bytes:
    """Returns the configuration that decides an embedding, apart from weights and pixels, as
    canonical JSON.
    """
    vision = json.loads((spec.directory / "config.json").read_text())["vision_config"]
    both = {"config": vision, "spec": asdict(spec.vision_part)}
    return json.dumps(both, sort_keys=True, separators=(",", ":")).encode()


def warm_up(preprocessor: Preprocessor, geometry: Geometry) -> None:
    """Decodes an image of each format, so that the first request is as fast as later ones."""
    image = Image.new("RGB", (128, 128), (200, 30, 30))
    for kind in ("JPEG", "PNG", "WEBP"):
        file = io.BytesIO()
        image.save(file, kind)
        preprocessor.prepare(Source(file.getvalue()), geometry.units((128, 128))[0])


if __name__ == "__main__":
    leave(main())
