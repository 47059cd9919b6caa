"""The number of lines of batches that a gateway runs at a time."""

import asyncio

from services.gateway.batches.line_turns import FIRST, LineTurns


async def take(turns: LineTurns, count: int) -> None:
    for _ in range(count):
        await turns.take()


def test_the_number_grows_while_all_turns_are_taken_and_few_sequences_wait() -> None:
    turns = LineTurns(6 * FIRST)
    turns.adapt(0, 0)
    assert turns.limit == FIRST  # no line has asked for a turn
    asyncio.run(take(turns, FIRST))
    turns.adapt(0, FIRST)
    assert turns.limit == 2 * FIRST
    asyncio.run(take(turns, FIRST))
    turns.adapt(FIRST, FIRST)
    assert turns.limit == 2 * FIRST
    turns.adapt(1, FIRST)
    asyncio.run(take(turns, 2 * FIRST))
    turns.adapt(0, 4 * FIRST)
    assert turns.limit == 6 * FIRST


def test_the_number_is_halved_when_twice_as_many_sequences_wait_as_run() -> None:
    turns = LineTurns(16)
    asyncio.run(take(turns, FIRST))
    turns.adapt(0, FIRST)
    turns.adapt(4, 2)
    assert turns.limit == 2 * FIRST
    for limit in (FIRST, FIRST // 2, 1, 1):
        turns.adapt(5, 2)
        assert turns.limit == limit
