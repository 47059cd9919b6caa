"""Which masks are filled at once, which in a thread, and whose rows they are."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from services.common.errors import Overloaded, TriptychError
from services.decoder.engine.messages import MaskMemory, TokenMask, TokenMasks
from services.decoder.mask_rows import MaskRows, open_rows
from services.decoder.matcher import Matcher
from services.decoder.token_masks import SequenceMasks

WORDS = 3


class FakeGrammars:
    """Masks of ones, filled by whoever calls; each ends with a word of its own."""

    num_words = WORDS - 1

    def __init__(self) -> None:
        self.maskers = ThreadPoolExecutor(1)
        self.threads: list[str] = []
        self.may_fill = threading.Event()
        self.may_fill.set()

    async def matcher(self, demands):
        return Matcher()

    async def first_mask(self, matcher, generated, rows, row):
        rows[row] = 1
        return True

    def fill(self, work, rows):
        self.threads.append(threading.current_thread().name)
        self.may_fill.wait()
        for matcher, token_ids, row in work:
            matcher.consume(token_ids)
            rows[row] = matcher.num_generated
        return [True] * len(work)

    def release(self, matcher):
        pass

    def close(self) -> None:
        self.maskers.shutdown()


class FakeEngine:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, *messages) -> None:
        self.sent += messages


class Front:
    """Masks of some sequences, of which each has its first."""

    def __init__(self, num_rows: int = 8) -> None:
        self.grammars, self.engine = FakeGrammars(), FakeEngine()
        self.rows = MaskRows(num_rows, WORDS)
        self.failures: list[TriptychError] = []
        self.masks = SequenceMasks(
            self.grammars, self.rows, self.engine, lambda seconds: None, self.fail,  # type: ignore[arg-type]
        )  # fmt: skip

    def fail(self, number: int, error: TriptychError) -> None:
        self.failures.append(error)

    async def start(self, count: int = 4) -> None:
        for number in range(count):
            self.masks.add(number, None, [])  # type: ignore[arg-type]
        while self.masks._tasks:
            await asyncio.gather(*self.masks._tasks)
        self.engine.sent.clear()

    async def step(self, *numbers: int) -> list[object]:
        self.masks.tokens_arrived([(number, [7]) for number in numbers])
        while self.masks._tasks:
            await asyncio.gather(*self.masks._tasks)
        sent, self.engine.sent = self.engine.sent, []
        return sent


async def test_quick_masks_are_sent_before_the_steps_other_events():
    front = Front()
    await front.start()
    sent = await front.step(0, 1, 2, 3)
    assert front.grammars.threads == [threading.current_thread().name]
    assert [(mask.sequence_id, mask.num_generated) for mask in sent] == [(n, 1) for n in range(4)]
    assert {mask.mask for mask in sent} == {np.ones(WORDS - 1, np.int32).tobytes()}
    await front.masks.close()


async def test_many_masks_are_sent_in_parts():
    front = Front(num_rows=40)
    front.masks.rows_opened()
    await front.start(40)
    sent = await front.step(*range(40))
    assert [len(masks.rows) for masks in sent] == [14, 13, 13]
    assert sorted(n for masks in sent for n in masks.sequence_ids) == list(range(40))
    await front.masks.close()


async def test_slow_masks_do_not_hold_the_front_up():
    front = Front()
    await front.start()
    front.masks._seconds_per_mask = 1.0
    sent = await front.step(0, 1, 2, 3)
    (thread,) = front.grammars.threads
    assert thread != threading.current_thread().name and len(sent) == 4
    await front.masks.close()


async def test_an_engine_that_reads_the_rows_gets_their_numbers():
    front = Front()
    (message,) = front.engine.sent
    assert isinstance(message, MaskMemory)
    opened = open_rows(message)
    front.masks.rows_opened()
    await front.start()
    (sent,) = await front.step(2, 0)
    assert isinstance(sent, TokenMasks)
    assert (sent.sequence_ids, sent.num_generated) == ([2, 0], [1, 1])
    assert len(set(sent.rows)) == 2 and (opened[sent.rows] == 1).all()
    (sent,) = await front.step(2)
    assert (opened[sent.rows] == 2).all() and not opened.flags.writeable
    await front.masks.close()


async def test_a_row_has_another_sequence_only_when_nobody_writes_to_it():
    front = Front(num_rows=2)
    await front.start(2)
    front.masks._seconds_per_mask = 1.0
    front.grammars.may_fill.clear()
    front.masks.tokens_arrived([(0, [7])])
    await asyncio.sleep(0)
    front.masks.remove(0)
    front.masks.add(5, None, [])  # type: ignore[arg-type]
    assert [type(error) for error in front.failures] == [Overloaded]
    front.grammars.may_fill.set()
    assert await front.step() == []  # of a sequence that has ended
    front.masks.add(6, None, [])  # type: ignore[arg-type]
    (sent,) = await front.step()
    assert isinstance(sent, TokenMask) and sent.sequence_id == 6 and len(front.failures) == 1
    front.masks.remove(1)
    front.masks.remove(6)
    assert front.rows.take() is not None and front.rows.take() is not None
    assert front.rows.take() is None
    await front.masks.close()
