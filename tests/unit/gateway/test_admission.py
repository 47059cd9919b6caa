"""Slots and bytes are bounded and returned, also after errors."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from services.common.errors import Overloaded, PayloadTooLarge, Unavailable
from services.gateway.bounds import MEMORY_PER_BODY_BYTE, BodyLimits
from services.gateway.endpoints.endpoint import Admitted
from services.gateway.tenancy.admission import _CONNECTION_BYTES, Admission, largest_body
from tests.fakes import once
from tests.gateway_fixtures import asking, image_url
from tests.noise import PATIENCE_S


@asynccontextmanager
async def slot_of(admission):
    with admission.request_memory() as memory:
        async with admission.slot(memory) as slot:
            yield slot


async def take(admission):
    async with slot_of(admission):
        pass


async def test_full_refuses_at_once_and_recovers():
    admission = Admission(2)
    async with slot_of(admission):
        async with slot_of(admission):
            with pytest.raises(Overloaded) as refused:
                await take(admission)
            assert refused.value.retry_after_s == 1
        async with slot_of(admission):
            assert admission.num_running == 2
    assert admission.num_running == 0


async def test_slot_is_returned_after_an_error():
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="x"):
            async with slot_of(admission) as slot:
                slot.memory.add(5)
                raise ValueError("x")
    assert admission.num_running == 0
    assert admission.held_bytes == 0


async def test_bytes_are_bounded_over_all_requests():
    admission = Admission(10, max_held_bytes=2 * _CONNECTION_BYTES + 100)
    async with slot_of(admission) as first, slot_of(admission) as second:
        first.memory.add(60)
        with pytest.raises(Overloaded):
            second.memory.add(41)
        second.memory.add(40)
    async with slot_of(admission) as third:
        third.memory.add(_CONNECTION_BYTES + 100)


async def test_drain_refuses_new_and_waits_for_running():
    admission = Admission(10)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def request():
        async with slot_of(admission):
            entered.set()
            await leave.wait()

    task = asyncio.create_task(request())
    await entered.wait()
    assert not await admission.drain(0.01)
    with pytest.raises(Overloaded):
        await take(admission)
    leave.set()
    assert await admission.drain(PATIENCE_S)
    await task


def test_full_gateway_refuses_before_image_work(stack):
    leave = threading.Event()
    stack.decoder.before = once(leave.is_set)
    admission = stack.gateway.admission
    admission._running._most = 2
    try:
        threads = [threading.Thread(target=stack.chat) for _ in range(2)]
        for thread in threads:
            thread.start()
        stack.wait(lambda: len(stack.decoder.submits) == 2)
        response = stack.chat(messages=asking(image_url()))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        assert not stack.encoder.requests
        leave.set()
        for thread in threads:
            thread.join()
        assert stack.chat(messages=asking(image_url())).status_code == 200
    finally:
        leave.set()
        admission._running._most = 512


@pytest.mark.parametrize("max_held_bytes", [64 << 20, 640 << 20, 4 << 30])
def test_the_largest_body_is_held_and_no_larger_one(max_held_bytes):
    most = largest_body(max_held_bytes)
    admission = Admission(10, max_held_bytes)
    with admission.request_memory() as memory:
        memory.add(most * MEMORY_PER_BODY_BYTE)
    with admission.request_memory() as memory, pytest.raises(Overloaded):
        memory.add((most + 1) * MEMORY_PER_BODY_BYTE)


async def test_a_body_that_no_memory_can_hold_is_too_large_and_not_a_matter_of_time():
    admission = Admission(1, body_limits=BodyLimits(largest_body(1 << 20)))
    pieces = [b" " * (1 << 17)] * 8

    async def receive():
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    with pytest.raises(PayloadTooLarge, match="GATEWAY_MAX_BODY_BYTES"):
        async with Admitted(admission, {"type": "http", "headers": []}, receive):
            pass
    assert admission.held_bytes == 0


def test_large_requests_leave_memory_to_small_ones():
    admission = Admission(10, max_held_bytes=64 << 20)
    with admission.request_memory() as large, admission.request_memory() as small:
        with pytest.raises(Overloaded):
            large.add(61 << 20)
        large.add(59 << 20)
        with pytest.raises(Overloaded):
            large.add(1 << 20)
        small.add(1 << 20)


async def test_a_block_that_is_ended_cannot_be_extended():
    admission = Admission(1)
    with pytest.raises(Unavailable):
        async with admission.until_ended(PATIENCE_S) as block:
            admission.end_all()
            block.extend(asyncio.get_running_loop().time() + 10 * PATIENCE_S)
            await asyncio.sleep(5 * PATIENCE_S)
