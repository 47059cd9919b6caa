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
    """Sends the tokens of a step to the mask processes. Drops a process that has ended or does not
    read, because the front starts another process.

    Args:
        engine: the engine.
        links: channels to the mask processes, by the number of the link.
        done: result of the step.
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
    """Opens the connection to a mask process.

    Args:
        link: socket over which the front sends the descriptors.
        message: message that announces the process.

    Returns:
        The channel to the process, and its rows `[num_rows, num_words]`, which are read-only.
    """
    _, descriptors, _, _ = socket.recv_fds(link, 1, 2)
    end, memory = descriptors
    count, size = message.num_rows * message.num_words, os.fstat(memory).st_size
    mapped = mmap.mmap(memory, size, prot=mmap.PROT_READ)
    words = np.frombuffer(mapped, np.int32, count, ROWS_OFFSET)
    os.close(memory)
    rows = words.reshape(message.num_rows, message.num_words)
    return EngineChannel[TokenMasks](socket.socket(fileno=end), TokenMasks), rows
