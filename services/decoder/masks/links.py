"""The engine's side of the processes that fill masks."""

import mmap
import os
import socket

import numpy as np

from services.common.process.channel import ChannelClosed, EngineChannel
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import MaskLink, StepDone, TokenMasks
from services.decoder.engine.step import Int32Array
from services.decoder.masks.rows import ROWS_OFFSET


def send_tokens(
    engine: Engine, links: dict[int, EngineChannel[TokenMasks]], done: StepDone
) -> None:
    """Tells the processes that fill masks. One that has ended, or reads nothing, is left: the front
    starts another one.
    """
    tokens = engine.new_tokens(done.events)
    if not tokens.sequence_ids:
        return
    for number, link in list(links.items()):
        try:
            link.send_nowait(tokens)
        except ChannelClosed:
            link.shutdown()
            del links[number], engine.gate.rows[number]


def open_link(
    link: socket.socket, message: MaskLink
) -> tuple[EngineChannel[TokenMasks], Int32Array]:
    """A channel to a process that fills masks, and its rows, read-only."""
    _, descriptors, _, _ = socket.recv_fds(link, 1, 2)
    end, memory = descriptors
    count, size = message.num_rows * message.num_words, os.fstat(memory).st_size
    mapped = mmap.mmap(memory, size, prot=mmap.PROT_READ)
    words = np.frombuffer(mapped, np.int32, count, ROWS_OFFSET)
    os.close(memory)
    rows = words.reshape(message.num_rows, message.num_words)
    return EngineChannel[TokenMasks](socket.socket(fileno=end), TokenMasks), rows
