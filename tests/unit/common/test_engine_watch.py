"""An engine that hangs is noticed; one that computes for long, or has nothing to do, is not."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from services.common.process.channel import FrontChannel
from services.common.process.engine_process import EngineProcess
from services.common.process.engine_watch import EngineWatch
from services.common.process.front_process import FrontProcess
from services.common.process.heartbeat import Ping
from tests.noise import PATIENCE_S

SPIN, SLEEP = "print(flush=True)\nwhile True: pass", "print(flush=True); input()"


class Channel:
    def __init__(self) -> None:
        self.received_at = time.monotonic()
        self.answers = False
        self.num_answers = 0

    def send(self, message: object) -> None:
        assert isinstance(message, Ping)
        if self.answers:
            self.received_at = time.monotonic()
            self.num_answers += 1


@dataclass
class Front:
    is_busy: bool
    is_loading: bool = False


BUSY, IDLE = Front(is_busy=True), Front(is_busy=False)


@pytest.fixture
async def engine(request: pytest.FixtureRequest):
    """An engine that computes, or runs the code that the test asks for."""
    does = getattr(request, "param", SPIN)
    async with running(does) as process:
        yield EngineProcess(process, cast("FrontChannel[Any]", Channel()), [])


def watch_of(engine: EngineProcess, front: Front, *, on_gpu: bool, **times: float) -> EngineWatch:
    """A watch whose limits are so short that tests can wait for them."""
    times = {"max_silence_s": 1.0, "period_s": 0.2, **times}
    return EngineWatch(engine, cast("FrontProcess[Any]", front), on_gpu=on_gpu, **times)


@asynccontextmanager
async def running(does: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process that has begun with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", does, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield process
    finally:
        process.kill()
        await process.wait()


SLEEPING = pytest.mark.parametrize("engine", [SLEEP], ids=["sleeping"], indirect=True)


async def hangs_within(watch: EngineWatch, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await watch.wait_until_hanging()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("on_gpu", [True, False])
async def test_an_engine_that_stands_still_hangs(engine, on_gpu):
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert await hangs_within(watch_of(engine, BUSY, on_gpu=on_gpu), PATIENCE_S)


async def test_a_gpu_engine_that_waits_for_its_device_hangs(engine):
    assert await hangs_within(watch_of(engine, BUSY, on_gpu=True), PATIENCE_S)


async def test_a_cpu_engine_that_computes_does_not_hang(engine):
    assert not await hangs_within(watch_of(engine, BUSY, on_gpu=False), 2)


async def test_a_cpu_engine_that_waits_for_a_cpu_does_not_hang(engine):
    async with running(SPIN) as other:
        for process in (engine.process, other):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        os.sched_setscheduler(engine.process.pid, os.SCHED_IDLE, os.sched_param(0))
        assert not await hangs_within(watch_of(engine, BUSY, on_gpu=False), 2)


async def test_an_engine_without_work_does_not_hang(engine):
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert not await hangs_within(watch_of(engine, IDLE, on_gpu=True), 2)


async def test_an_engine_that_answers_does_not_hang(engine):
    engine.channel.answers = True
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert not await hangs_within(watch_of(engine, BUSY, on_gpu=True), 2)


@SLEEPING
async def test_an_engine_that_loads_files_may_be_silent_for_longer(engine):
    """From a slow disk, for instance, and not without end. After it, the usual limit holds."""
    front = Front(is_busy=True, is_loading=True)
    watch = watch_of(engine, front, on_gpu=True, max_silence_s=0.5, max_loading_s=3.0)
    assert not await hangs_within(watch, 1.5)
    assert await hangs_within(watch, PATIENCE_S)
    engine.computed_at = time.monotonic()
    front.is_loading = False
    assert await hangs_within(watch_of(engine, front, on_gpu=True, max_silence_s=0.5), 2.5)


@SLEEPING
async def test_an_engine_without_work_is_asked_now_and_then(engine):
    engine.channel.answers = True
    watch = watch_of(engine, IDLE, on_gpu=True, idle_period_s=0.5)
    watching = asyncio.create_task(watch.wait_until_hanging())
    async with asyncio.timeout(PATIENCE_S):
        while engine.channel.num_answers < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    watching.cancel()
    engine.channel.answers = False
    assert not await hangs_within(watch, 2)
    assert engine.silence_s > 1.5


@SLEEPING
async def test_silence_without_work_does_not_count_against_the_work_that_follows(engine):
    front = Front(is_busy=False)
    watch = watch_of(engine, front, on_gpu=True)
    assert not await hangs_within(watch, 2)  # longer than an engine with work may be silent
    front.is_busy = True
    assert not await hangs_within(watch, 0.5)
