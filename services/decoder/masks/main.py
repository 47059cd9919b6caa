"""A mask process: `python -m services.decoder.masks.main`, started by the front.

The front sends sequences. The engine sends the tokens of these sequences and receives their next
masks. Tokens and masks do not pass through the front, whose streams would delay the masks. The
process exits when the front closes its channel.
"""

import asyncio
import socket
import sys
import threading
from pathlib import Path

import msgspec
import uvloop

from services.common.process import children
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.process.process_memory import freeze_gc
from services.common.process.work_limits import prefer_oom_kill
from services.common.telemetry import setup_logging
from services.decoder.engine.messages import NewTokens
from services.decoder.masks.grammar_memory import GrammarMemory, map_large_allocations
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.messages import (
    Follow,
    Forget,
    MaskSettings,
    MaskTimes,
    ToProcess,
)
from services.decoder.masks.rows import MaskRows, num_mask_words
from services.decoder.masks.sequences import SequenceMasks

TIMES_PERIOD_S = 1.0
# `compile_worker` has compiled every grammar with a smaller stack before.
_STACK_BYTES = 16 << 20
_OOM_SCORE = 900


async def serve(
    settings: MaskSettings, front_end: socket.socket, link: socket.socket, memory: int
) -> None:
    """Fills masks until the front closes its channel.

    Args:
        settings: settings of the process.
        front_end: socket to the front.
        link: socket to the engine.
        memory: descriptor of the memory of the rows.
    """
    front = await FrontChannel[ToProcess].open(front_end, ToProcess)
    engine = await FrontChannel[NewTokens].open(link, NewTokens)
    times = MaskTimes([])
    num_words, count = num_mask_words(settings.vocab_size), 1 + settings.max_drafts
    rows = MaskRows(memory, settings.num_rows, num_words, count)
    grammars = Grammars(
        Path(settings.directory),
        settings.vocab_size,
        settings.end_ids,
        rows.marks,
        GrammarMemory(settings.grammar_bytes),
    )
    masks = SequenceMasks(grammars, rows, settings.link, engine, front, times, settings.max_work_s)

    async def report() -> None:
        while True:
            front.send(times)
            times.seconds.clear()
            masks.check_threads()
            masks.check_memory()
            await asyncio.sleep(TIMES_PERIOD_S)

    async def answer() -> None:
        """Fills masks until the engine has ended or has dropped this process."""
        try:
            while True:
                masks.tokens_arrived(await engine.receive())
        except ChannelClosed:
            front.close()

    tasks = [asyncio.create_task(work) for work in (answer(), report())]
    freeze_gc()
    try:
        while True:
            match await front.receive():
                case Follow() as follow:
                    masks.add(follow)
                case Forget() as forget:
                    masks.remove(forget.sequence_id)
                case NewTokens() as tokens:
                    masks.tokens_arrived(tokens)
    except ChannelClosed:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await masks.close()
        engine.close()
        front.close()


def main() -> int:
    """Runs the process. Returns its exit status."""
    data, (front, link, memory) = children.begin()
    settings = msgspec.json.decode(data, type=MaskSettings)
    setup_logging("decoder-masks", settings.log_level)
    threading.stack_size(_STACK_BYTES)
    # The kernel should kill a fork that compiles before this process, and this process before the
    # decoder, because its sequences can continue in another mask process.
    prefer_oom_kill(_OOM_SCORE)
    map_large_allocations()
    uvloop.run(serve(settings, socket.socket(fileno=front), socket.socket(fileno=link), memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
