"""The engine process: `python -m services.decoder.engine_main`, started by the decoder's front.

The process owns the device. It exits with status 0 when the front has exited or sends `Shutdown`.
If the model cannot be loaded or the device fails, the process logs the reason and exits with status
1, and so does the front. Where several ranks share the model, the process is rank 0.
"""

import services.common.process.passive_threads
import services.common.process.rare_gc  # noqa: F401 - both before torch

# isort: split
import logging
import socket
import sys
import time
from typing import Any

import torch
from msgspec import structs

from services.common.adapter_config import AdapterError
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.device import gpu_uuid, resolve_device
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.device_turns import NO_TURNS, TURN_POLL_S, open_turns
from services.common.process.engine_process import EngineEnd, accept, leave
from services.common.process.heartbeat import Ping, Pong
from services.common.process.process_memory import freeze_gc
from services.common.process.progress import log_progress
from services.common.telemetry import setup_logging
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import (
    AdapterLoaded,
    FrontMessage,
    KernelCalls,
    LoadAdapter,
    MaskLink,
    Shutdown,
)
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import create_runner
from services.decoder.engine.runner import Runner
from services.decoder.engine_options import (
    AWAKE_S,
    log_failure,
    runner_options,
    set_threads,
    use_one_thread,
)
from services.decoder.masks.links import open_link, send_tokens
from services.decoder.ranks.joining import device_of, join
from services.decoder.ranks.processes import RankProcesses
from services.decoder.ranks.steps import LeadingRunner
from services.decoder.settings import DecoderSettings

log = logging.getLogger("services.decoder.engine")

_KERNEL_CALLS_PERIOD_S = 1.0
# Seconds that the calibration at the start may take.
_TIMING_S_GPU, _TIMING_S_CPU = 1.0, 0.4
# Seconds between two looks at the device while token masks are missing.
_MASK_POLL_S = 0.00002


def run(
    engine: Engine,
    channel: EngineChannel[FrontMessage],
    runner: ModelRunner | LeadingRunner,
    link: socket.socket | None = None,
    *,
    awake_s: float = 0.0,
) -> None:
    """Serves the front until it sends `Shutdown`.

    Args:
        engine: the engine that obeys the front's messages.
        channel: the channel to the front.
        runner: the owner of the device, whose kernel calls the front exports as metrics.
        link: socket to the front, over which the descriptors of each `MaskLink` come. None if
            there are no mask processes.
        awake_s: seconds of polling after the last work; see `EngineChannel.receive`.

    Raises:
        ChannelClosed: the front has exited.
    """
    reported_at = 0.0
    links: dict[int, EngineChannel[Any]] = {}
    engine.drafts.inbox = channel
    while True:
        if engine.waits:
            messages = channel.receive(0.0, awake_s=_MASK_POLL_S)
        elif engine.turns.is_waiting:
            messages = channel.receive(TURN_POLL_S)
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
                mask_channel: EngineChannel[Any]
                mask_channel, rows = open_link(link, message)
                engine.gate.rows[message.link] = rows
                links[message.link] = mask_channel
                channel.include(mask_channel)
                continue
            if isinstance(message, LoadAdapter):
                channel.send(_load_adapter(runner, message))
                continue
            engine.handle(message)
        if engine.waits:
            engine.plan()
            continue
        done = engine.step()
        if done is not None:
            if links:
                send_tokens(engine, links, done)  # first, because the next step waits for masks
            channel.send(done)
            if (now := time.monotonic()) - reported_at >= _KERNEL_CALLS_PERIOD_S:
                reported_at = now
                channel.send(KernelCalls(runner.kernel_calls))


def _load_adapter(runner: ModelRunner | LeadingRunner, message: LoadAdapter) -> AdapterLoaded:
    """Loads an adapter between two steps, and answers."""
    try:
        runner.load_adapter(message.slot, message.directory)
    except AdapterError as error:
        log.warning("the adapter %s cannot be served: %s", message.directory, error)
        return AdapterLoaded(str(error) or "the adapter cannot be loaded")
    return AdapterLoaded()


def main() -> int:
    """Runs the process; returns its exit status."""
    end = accept()
    settings = DecoderSettings.model_validate_json(end.settings_json)
    setup_logging("decoder-engine", settings.log_level)
    count = settings.tensor_parallel
    set_threads(count)
    processes = None
    try:
        device = device_of(settings.device, 0)
        ranks = ALONE
        if count > 1:
            resolve_device(device_of(settings.device, count - 1))  # raises if it does not exist
            processes = RankProcesses(count, end.settings_json, end.arena_fd)
            ranks = join(0, count, device, processes.store_fd)
        _serve(end, settings, device, ranks, processes)
    except ChannelClosed:
        log.info("the front has exited")
    except Exception as error:
        # After a device error nothing in device memory can be trusted, least of all the KV cache.
        return log_failure(error, log, "the engine failed")
    finally:
        if processes is not None:
            processes.stop()
    return 0


def _serve(
    end: EngineEnd,
    settings: DecoderSettings,
    device: str,
    ranks: Ranks,
    processes: RankProcesses | None,
) -> None:
    """Loads the model, and serves the front until the front sends `Shutdown`."""
    channel, on_gpu = EngineChannel[FrontMessage](end.end, FrontMessage), device != "cpu"
    model_runner = create_runner(runner_options(settings, device), end.arena, ranks)
    use_one_thread(device)
    runner: Runner = model_runner
    if processes is not None:
        processes.ready(on_gpu=on_gpu)
        runner = LeadingRunner(model_runner, processes)
    log_progress("timing steps")
    budget_s = _TIMING_S_GPU if on_gpu else _TIMING_S_CPU
    cost = measured_cost(runner, budget_s, settings.step_ms)
    step_ms = cost.default_step_ms if settings.step_ms is None else settings.step_ms
    size = {} if cost.efficient_tokens == sys.maxsize else {"step_tokens": cost.efficient_tokens}
    log.info("steps are timed", extra={"fields": {"step_ms": round(step_ms, 1), **size}})
    # Several ranks take no turns: they would have to wait for each other on several GPUs.
    turns = NO_TURNS
    if on_gpu and processes is None:
        turns = open_turns(gpu_uuid(torch.device(device)), exclusive=False)
    engine = Engine(
        runner,
        overlap=on_gpu,
        # With several ranks, the others would wait for the rest of a step that failed here.
        out_of_memory=(torch.OutOfMemoryError,) if processes is None else (),
        step_ms=step_ms,
        max_drafts=runner.info.max_drafts,
        step_cost=cost,
        turns=turns,
    )
    freeze_gc()
    channel.send(structs.replace(runner.info, max_drafts=engine.speculation.max_drafts))
    awake_s = AWAKE_S if on_gpu else 0.0
    leading = runner if isinstance(runner, LeadingRunner) else model_runner
    run(engine, channel, leading, end.links[0], awake_s=awake_s)


if __name__ == "__main__":
    leave(main())
