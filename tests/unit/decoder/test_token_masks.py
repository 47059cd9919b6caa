"""Which masks are filled at once, and which in a thread."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from services.common.errors import TriptychError
from services.decoder.engine.messages import SequenceEvent, TokenMask
from services.decoder.matcher import Matcher
from services.decoder.token_masks import SequenceMasks


class FakeGrammars:
    """Masks of one byte, filled by whoever calls."""

    def __init__(self) -> None:
        self.maskers = ThreadPoolExecutor(1)
        self.threads: list[str] = []

    async def matcher(self, demands):
        return Matcher()

    async def first_mask(self, matcher, generated):
        return b"\1"

    def fill(self, work):
        self.threads.append(threading.current_thread().name)
        for matcher, token_ids in work:
            matcher.consume(token_ids)
        return [b"\1"] * len(work)

    def close(self) -> None:
        self.maskers.shutdown()


class FakeEngine:
    def __init__(self) -> None:
        self.sent: list[TokenMask] = []

    def send(self, *messages) -> None:
        self.sent += messages


async def run(seconds_per_mask: float) -> tuple[list[str], list[TokenMask]]:
    grammars, engine = FakeGrammars(), FakeEngine()

    def fail(number: int, error: TriptychError) -> None:
        raise error

    masks = SequenceMasks(grammars, engine, lambda seconds: None, fail)  # type: ignore[arg-type]
    for number in range(4):
        masks.add(number, None, [])  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    masks._seconds_per_mask = seconds_per_mask
    engine.sent.clear()
    masks.tokens_arrived([SequenceEvent(number, [7]) for number in range(4)])
    await asyncio.gather(*masks._tasks)
    await masks.close()
    return grammars.threads, engine.sent


def test_quick_masks_are_sent_before_the_steps_other_events():
    threads, sent = asyncio.run(run(1e-4))
    assert threads == [threading.current_thread().name]
    assert [(mask.sequence_id, mask.num_generated) for mask in sent] == [(n, 1) for n in range(4)]


def test_slow_masks_do_not_hold_the_front_up():
    threads, sent = asyncio.run(run(1.0))
    assert len(threads) == 1 and threads[0] != threading.current_thread().name
    assert len(sent) == 4
