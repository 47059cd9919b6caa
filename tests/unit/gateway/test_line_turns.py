"""The number of lines of batches that a gateway runs at a time."""

import asyncio

from services.gateway.batches.line_turns import FIRST, BatchTurns, LineTurn, LineTurns


async def take(turns: LineTurns, count: int) -> None:
    batch = turns.of_batch()
    for _ in range(count):
        await batch.take()


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


async def test_batches_take_turns_one_after_the_other() -> None:
    """A batch of which many lines wait delays a line of another batch by one line."""
    turns, order = LineTurns(1), list[str]()
    busy, other = turns.of_batch(), turns.of_batch()

    async def run(batch: BatchTurns, name: str) -> None:
        await batch.take()
        order.append(name)
        await asyncio.sleep(0)
        batch.release()

    lines = [asyncio.create_task(run(busy, "busy")) for _ in range(10)]
    await asyncio.sleep(0)
    lines += [asyncio.create_task(run(other, "other")) for _ in range(3)]
    await asyncio.gather(*lines)
    first = order.index("other")
    assert first < 5 and order[first : first + 5] == ["other", "busy", "other", "busy", "other"]
    assert len(order) == 13 and turns.num_running == 0


async def test_a_refused_batch_runs_fewer_lines_and_others_get_its_turns() -> None:
    turns = LineTurns(8)
    turns.limit = 8
    refused, other = turns.of_batch(), turns.of_batch()
    held = [LineTurn(refused) for _ in range(8)]
    for line in held:
        await line.take()
    for line in held:
        refused.note_refusal()
        line.release()
        line.release()  # A second release ends no turn of another line.
    assert (refused.limit, turns.num_running) == (1, 0)
    waiting = [asyncio.create_task(refused.take()) for _ in range(8)]
    await take(turns, 7)
    await asyncio.sleep(0)
    assert [line.done() for line in waiting] == [True] + 7 * [False]
    refused.note_result()
    refused.release()
    await asyncio.sleep(0)
    assert refused.num_running == 1 and refused.limit == 2  # All other turns are taken.
    for line in waiting:
        line.cancel()
    await asyncio.wait(waiting)
    refused.release()
    await other.take()
    assert turns.num_running == 8 and refused.num_running == 0


async def test_a_turn_that_comes_as_its_line_is_cancelled_is_given_back() -> None:
    turns = LineTurns(1)
    batch = turns.of_batch()
    await batch.take()
    line = asyncio.create_task(batch.take())
    await asyncio.sleep(0)
    batch.release()
    line.cancel()
    await asyncio.wait({line})
    assert turns.num_running == batch.num_running == 0
