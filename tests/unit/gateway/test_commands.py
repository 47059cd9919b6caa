"""In which order commands go to a decoder."""

import asyncio

import pytest

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.commands import Commands
from tests.noise import PATIENCE_S


def submit(sequence_id: int, tenant: str, num_tokens: int = 4, weight: float = 0.0) -> pb.Submit:
    return pb.Submit(
        sequence_id=sequence_id, tenant=tenant, tenant_weight=weight,
        prompt_token_ids=bytes(4 * num_tokens),
    )  # fmt: skip


async def take(commands: Commands, count: int) -> list[tuple[str, int]]:
    found = []
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(count):
            command = await commands.next()
            kind = command.WhichOneof("command")
            assert kind is not None
            found.append((kind, getattr(command, kind).sequence_id))
    return found


async def test_a_flood_of_one_tenant_goes_before_one_submit_of_anothers_at_most() -> None:
    commands = Commands()
    for sequence_id in range(1, 201):
        commands.submit(submit(sequence_id, "a"))
    await take(commands, 20)
    commands.submit(submit(201, "b"))
    assert 201 in [sequence_id for _, sequence_id in await take(commands, 2)]


@pytest.mark.parametrize("tenant", ["", "a"])
async def test_submits_of_one_tenant_keep_their_order(tenant: str) -> None:
    commands = Commands()
    for sequence_id in range(1, 51):
        commands.submit(submit(sequence_id, tenant, num_tokens=sequence_id % 7 * 500))
    assert await take(commands, 50) == [("submit", number) for number in range(1, 51)]


async def test_long_prompts_and_small_weights_wait_longer() -> None:
    commands = Commands()
    for number in range(8):
        commands.submit(submit(100 + number, "long", num_tokens=20_000))
        commands.submit(submit(200 + number, "light", weight=0.05))
        commands.submit(submit(300 + number, "short"))
    order = [sequence_id for _, sequence_id in await take(commands, 24)]
    assert max(map(order.index, range(300, 308))) < min(map(order.index, (101, 201)))


async def test_a_cancel_goes_before_submits_and_takes_one_that_waits_away() -> None:
    commands = Commands()
    commands.submit(submit(1, "a"))
    assert await take(commands, 1) == [("submit", 1)]
    for sequence_id in (2, 3, 4):
        commands.submit(submit(sequence_id, "a"))
    commands.cancel(1)
    commands.cancel(3)
    assert await take(commands, 3) == [("cancel", 1), ("submit", 2), ("submit", 4)]


async def test_submits_that_were_cancelled_do_not_delay_a_tenants_next() -> None:
    commands = Commands()
    for sequence_id in range(1, 101):
        commands.submit(submit(sequence_id, "a"))
    for sequence_id in range(101, 201):
        commands.submit(submit(sequence_id, "b"))
    for sequence_id in range(1, 101):
        commands.cancel(sequence_id)
    commands.submit(submit(201, "a"))
    assert ("submit", 201) in await take(commands, 2)


async def test_a_waiting_consumer_gets_what_comes_even_after_it_was_cancelled_once() -> None:
    commands = Commands()
    waiting = asyncio.create_task(commands.next())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    waiting = asyncio.create_task(take(commands, 2))
    await asyncio.sleep(0)
    commands.submit(submit(1, "a"))
    commands.submit(submit(2, "b"))
    assert await waiting == [("submit", 1), ("submit", 2)]


async def test_a_message_that_its_caller_changes_is_sent_as_it_was() -> None:
    commands, message = Commands(), submit(1, "a")
    commands.submit(message)
    message.sequence_id = 2
    commands.submit(message)
    assert await take(commands, 2) == [("submit", 1), ("submit", 2)]


async def test_commands_that_wait_are_a_batch() -> None:
    commands = Commands(batches=True)
    for sequence_id in range(1, 21):
        commands.submit(submit(sequence_id, "a"))
    commands.cancel(3)  # dropped
    commands.cancel(50)
    batch = (await commands.next()).batch.commands
    assert batch[0].cancel.sequence_id == 50
    assert [each.submit.sequence_id for each in batch[1:]] == [1, 2, *range(4, 17)]
    batch = (await commands.next()).batch.commands
    assert [each.submit.sequence_id for each in batch] == [17, 18, 19, 20]
    commands.submit(submit(21, "a"))
    assert (await commands.next()).submit.sequence_id == 21


async def test_a_batch_ends_with_the_command_that_makes_it_large() -> None:
    commands = Commands(batches=True)
    for sequence_id in range(1, 5):
        commands.submit(submit(sequence_id, "a", num_tokens=150_000))
    batch = (await commands.next()).batch.commands
    assert [each.submit.sequence_id for each in batch] == [1, 2]
