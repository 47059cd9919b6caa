"""Copies of KV blocks between a GPU and the host, beside work that changes the blocks at once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.decoder.engine.run.host_cache import HostPool

pytestmark = pytest.mark.gpu

SIZES = (8, 600, 2, 16, 8, 128)


def content_of(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bytes of a pool of 600 blocks, in the memory of the host."""
    return torch.randint(0, 256, (*SIZES[:-1], 128 * dtype.itemsize), dtype=torch.uint8)


def raw(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_as_they_were(dtype: torch.dtype) -> None:
    """More blocks than the buffers have room for, each of which is changed once it is saved."""
    content = content_of(dtype)
    pool = content.cuda().view(dtype)
    cache = HostPool(pool, 600, 100, 60)
    order = np.random.default_rng(0).permutation(512)
    rounds = 2
    for number in range(rounds):
        half = order[number * 256 : (number + 1) * 256]
        cache.begin_step()
        cache.save(np.stack((half, 599 - half), 1))
        raw(pool)[:, torch.from_numpy(half).cuda()] = 0
    assert int(raw(pool)[:, :512].max()) == 0
    targets = np.random.default_rng(1).permutation(512)
    for number in range(rounds):
        half = slice(number * 256, (number + 1) * 256)
        cache.begin_step()
        cache.load(np.stack((targets[half], 599 - order[half]), 1))
    found = raw(pool).cpu()
    assert torch.equal(found[:, targets], content[:, order])
    assert torch.equal(found[:, 512:], content[:, 512:])


def test_steps_that_save_and_load_at_once_keep_their_order() -> None:
    """Each step saves 100 blocks, loads what the step before has saved into those very blocks, and
    makes 200 idle saves, whose blocks the next step changes at once. The main stream is busy, so
    that the host is some steps ahead of it.
    """
    content, steps = content_of(), 6
    pool = content.cuda().view(torch.bfloat16)
    cache = HostPool(pool, 600, 30, 30)
    work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first, second = np.arange(0, 100), np.arange(100, 300)
    known, slots = content.clone(), torch.zeros_like(content)
    for step in range(steps):
        at = step % 2 * 300
        for _ in range(4):
            work = torch.nn.functional.normalize(work @ work)
        cache.begin_step()
        if step:  # changes the blocks of the idle saves of the step before
            raw(pool)[:, 100:300] = step
            known[:, 100:300] = step
            cache.begin_step()
        cache.save(np.stack((first, at + first), 1))
        slots[:, at : at + 100] = known[:, :100]
        if step:
            before = (300 - at) + 100 + first  # slots of idle saves
            cache.load(np.stack((first, before), 1))
            known[:, :100] = slots[:, before]
        work = work @ work
        cache.save(np.stack((second, at + second), 1), idle=True)
        slots[:, at + 100 : at + 300] = known[:, 100:300]
        raw(pool)[:, 300:400] += 1
        known[:, 300:400] += 1
    assert torch.equal(raw(pool).cpu(), known)
    cache.begin_step()
    cache.load(np.stack((np.arange(600), np.arange(600)), 1))
    assert torch.equal(raw(pool).cpu(), slots)


def test_a_load_does_not_wait_for_saves_of_other_slots() -> None:
    """A load of 10 blocks is done while the 590 idle saves of the step before still run: each
    direction of the bus has a stream. Measured by events of the device, not by the host's time.
    """
    pool = torch.zeros(SIZES, dtype=torch.bfloat16, device="cuda")
    cache = HostPool(pool, 600, 590, 100)
    idle = np.stack((np.arange(10, 600),) * 2, 1)
    streams = cache._streams
    assert streams is not None
    for _ in range(2):  # the first time, kernels are loaded
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # some 0.1 s, in which the host launches the copies
        cache.begin_step()
        cache.save(idle, idle=True)
        saved = torch.cuda.Event(enable_timing=True)
        saved.record(streams._saves)
        cache.begin_step()
        cache.load(np.stack((np.arange(10),) * 2, 1))
        loaded = torch.cuda.Event(enable_timing=True)
        loaded.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert loaded.elapsed_time(saved) > 0, "the load came last"
