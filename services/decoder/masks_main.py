"""A process that fills token masks: `python -m services.decoder.masks_main`, started by the front.

The engine sends it the tokens of its sequences, and it answers with their next masks; the front,
whose streams would keep the masks waiting, says which sequences it has. It exits when the front has
closed its channel.
"""

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from services.common.channel import ChannelClosed, FrontChannel
from services.common.errors import TriptychError
from services.common.process_memory import freeze_gc
from services.common.telemetry import setup_logging
from services.decoder.engine.messages import MaskMemoryOpened, NewTokens
from services.decoder.grammar import Grammars
from services.decoder.mask_messages import (
    CannotFollow,
    Follow,
    Forget,
    FromEngine,
    MaskSettings,
    MaskTimes,
    ToProcess,
)
from services.decoder.mask_rows import MaskRows
from services.decoder.token_masks import SequenceMasks

_TIMES_PERIOD_S = 1.0


async def serve(settings: MaskSettings, front_end: socket.socket, link: socket.socket) -> None:
    """Fills masks until the front closes its channel."""
    front = await FrontChannel[ToProcess].open(front_end, ToProcess)
    engine = await FrontChannel[FromEngine].open(link, FromEngine)
    times = MaskTimes([], [])

    def failed(number: int, error: TriptychError) -> None:
        front.send(CannotFollow(number, error.code, error.message))

    grammars = Grammars(
        Path(settings.directory), settings.vocab_size, times.compilations.append,
        settings.num_threads,
    )  # fmt: skip
    grammars.preload(settings.end_ids)
    rows = MaskRows(settings.num_rows, grammars.num_mask_words, settings.link)
    masks = SequenceMasks(grammars, rows, engine, times.masks.append, failed, first=front)

    async def report() -> None:
        while True:
            await asyncio.sleep(_TIMES_PERIOD_S)
            if times.masks or times.compilations:
                front.send(times)
                times.masks.clear()
                times.compilations.clear()

    tasks = [asyncio.create_task(work) for work in (_answer(engine, masks), report())]
    freeze_gc()
    try:
        while True:
            match await front.receive():
                case Follow() as follow:
                    masks.add(follow.sequence_id, follow.demands, follow.generated)
                case Forget() as forget:
                    masks.remove(forget.sequence_id)
    except ChannelClosed:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await masks.close()
        engine.close()
        front.close()


async def _answer(engine: FrontChannel[FromEngine], masks: SequenceMasks) -> None:
    """Makes the masks that follow the engine's tokens, until the engine has ended."""
    while True:
        try:
            message = await engine.receive()
        except ChannelClosed:
            return
        match message:
            case NewTokens():
                masks.tokens_arrived(zip(message.sequence_ids, message.token_ids, strict=True))
            case MaskMemoryOpened():
                masks.rows_opened()


def main() -> int:
    """Runs the process; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front lets running work end first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--front-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=MaskSettings)
    setup_logging("decoder-masks", settings.log_level)
    ends = (socket.socket(fileno=fd) for fd in (arguments.front_fd, arguments.link_fd))
    uvloop.run(serve(settings, *ends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
