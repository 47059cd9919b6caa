"""The engine process: `python -m services.decoder.engine_main`, started by the decoder's front.

It owns the device. It exits with status 0 when the front has exited or sends `Shutdown`. When the
model cannot be loaded or the device fails, it logs the reason and exits with status 1, and so does
the front.
"""

import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from services.common.model_spec import ModelSpecError
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.engine_process import REFUSED, accept
from services.common.process.heartbeat import Ping, Pong
from services.common.process.pod_limits import num_cpus
from services.common.process.process_memory import freeze_gc
from services.common.process.progress import log_progress
from services.common.telemetry import setup_logging
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.mask_gate import MaskGate
from services.decoder.engine.messages import (
    EngineInfo,
    FrontMessage,
    KernelCalls,
    MaskLink,
    Shutdown,
)
from services.decoder.engine.runner_factory import ModelRunner, RunnerOptions, create_runner
from services.decoder.engine.tenants import TenantAdmission
from services.decoder.masks.links import open_link, send_tokens
from services.decoder.settings import DecoderSettings

log = logging.getLogger("services.decoder.engine")

# An idle engine with a GPU polls this long before its thread blocks: somewhat longer than a client
# needs to send its next request, or an encoder to encode an image.
_AWAKE_S = 0.05
_KERNEL_CALLS_PERIOD_S = 1.0
# Tokens of the longest step, which a device has memory for; `DECODER_STEP_MS` is usually the limit.
_MAX_TOKENS_GPU, _MAX_TOKENS_CPU = 8192, 1024
_TIMING_S_GPU, _TIMING_S_CPU = 1.0, 0.4  # of the steps that are timed at the start
_OUT_OF_MEMORY = (
    "the device is out of memory (%s): lower DECODER_MAX_NUM_SEQUENCES, DECODER_MAX_MODEL_LEN or "
    "DECODER_MEMORY_FRACTION, or serve an FP8 checkpoint"
)
# Between two looks at the device while token masks are missing.
_MASK_POLL_S = 0.00002


def run(
    engine: Engine,
    gate: MaskGate,
    channel: EngineChannel[FrontMessage],
    kernel_calls: Callable[[], dict[str, int]],
    link: socket.socket | None = None,
    *,
    awake_s: float = 0.0,
) -> None:
    """Serves the front until it sends `Shutdown`.

    Args:
        engine: of the model.
        gate: the engine's.
        channel: to the front.
        kernel_calls: the runner's counts, for the front's metrics.
        link: to the front, over which the descriptors of each `MaskLink` come.
        awake_s: see `EngineChannel.receive`.

    Raises:
        ChannelClosed: the front has exited.
    """
    reported_at = 0.0
    links: dict[int, EngineChannel[Any]] = {}
    while True:
        if engine.waits:
            messages = channel.receive(0.0, awake_s=_MASK_POLL_S)
        elif engine.has_work:
            messages = channel.receive(0.0)
        else:
            messages = channel.receive(None, awake_s=awake_s)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Ping):
                channel.send(Pong())
                continue
            if isinstance(message, MaskLink):
                assert link is not None
                links[message.link], gate.rows[message.link] = open_link(link, message)
                channel.join(links[message.link])
                continue
            engine.handle(message)
        if engine.waits:
            engine.plan()
            continue
        done = engine.step()
        if done is not None:
            if links:
                send_tokens(gate, links, done)  # masks are waited for
            channel.send(done)
            if (now := time.monotonic()) - reported_at >= _KERNEL_CALLS_PERIOD_S:
                reported_at = now
                channel.send(KernelCalls(kernel_calls()))


def runner_options(settings: DecoderSettings, *, on_gpu: bool) -> RunnerOptions:
    """The settings that the runner depends on."""
    max_num_sequences = settings.max_num_sequences or (256 if on_gpu else 64)
    return RunnerOptions(
        model_directory=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantization=settings.quantization,
        max_num_sequences=max_num_sequences,
        max_batched_tokens=max(_MAX_TOKENS_GPU if on_gpu else _MAX_TOKENS_CPU, max_num_sequences),
        max_model_len=settings.max_model_len,
        memory_fraction=settings.memory_fraction,
        kv_cache_bytes=settings.kv_cache_bytes,
        kernels=settings.kernels,
    )


def ready_message(engine: Engine, runner: ModelRunner, *, on_gpu: bool) -> EngineInfo:
    """The engine's limits, which the front announces to gateways."""
    return structs.replace(runner.info, max_model_len=engine.max_model_len, on_gpu=on_gpu)


def main() -> int:
    """Runs the process; returns its exit status."""
    end = accept()
    settings = DecoderSettings.model_validate_json(end.settings_json)
    setup_logging("decoder-engine", settings.log_level)
    torch.set_num_threads(min(torch.get_num_threads(), num_cpus()))
    channel = end.channel(FrontMessage)
    try:
        on_gpu = settings.device.startswith("cuda") or (
            settings.device == "auto" and torch.cuda.is_available()
        )
        runner = create_runner(runner_options(settings, on_gpu=on_gpu), end.arena)
        log_progress("timing steps")
        gate = MaskGate(runner.info.vocab_size)
        engine = Engine(
            runner,
            overlap=on_gpu,
            admission=TenantAdmission(),
            gate=gate,
            out_of_memory=(torch.OutOfMemoryError,),
            step_ms=settings.step_ms,
            step_cost=measured_cost(runner, _TIMING_S_GPU if on_gpu else _TIMING_S_CPU),
        )
        freeze_gc()
        channel.send(ready_message(engine, runner, on_gpu=on_gpu))
        awake_s = _AWAKE_S if on_gpu else 0.0
        run(engine, gate, channel, lambda: runner.kernel_calls, end.links[0], awake_s=awake_s)
    except ChannelClosed:
        log.info("the front has exited")
    except (ModelSpecError, ValueError) as error:
        log.critical("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        return REFUSED
    except torch.OutOfMemoryError as error:
        log.critical(_OUT_OF_MEMORY, str(error).partition(". ")[0])
        return 1
    except Exception:
        # After a device error nothing in device memory can be trusted, least of all the KV cache.
        log.critical("the engine failed", exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
