"""The process of a rank: `python -m services.decoder.ranks.main`, started by the engine process.

The process loads its part of the model and computes the steps that rank 0 samples, until rank 0
ends. Its exit statuses are those of an engine process.
"""

import services.common.process.passive_threads
import services.common.process.rare_gc  # noqa: F401 - both before torch

# isort: split
import logging
import mmap
import select
import socket
import time
from contextlib import suppress

from services.common.model_spec import ModelSpecError
from services.common.process import children
from services.common.process.engine_process import REFUSED, leave
from services.common.process.parent_death import end_with_parent
from services.common.process.process_memory import freeze_gc
from services.common.telemetry import setup_logging
from services.decoder.engine.run.runner_factory import create_runner
from services.decoder.engine_options import (
    AWAKE_S,
    log_failure,
    runner_options,
    set_threads,
    use_one_thread,
)
from services.decoder.ranks.joining import device_of, join
from services.decoder.ranks.steps import Follower
from services.decoder.settings import DecoderSettings

log = logging.getLogger("services.decoder.rank")

_BEAT_S = 0.5
# Time to wait for rank 0, which refuses the same model or setting and logs the reason.
_REFUSAL_S = 5.0


def follow(follower: Follower, link: socket.socket, awake_s: float) -> None:
    """Runs steps until the other end of the link is closed.

    Sends a byte every half second, which shows that this process is alive.

    Args:
        follower: runs the steps.
        link: socket to rank 0.
        awake_s: seconds of polling before the thread blocks, see ADR 0014.
    """
    awake_until = beat_at = 0.0
    while True:
        now = time.monotonic()
        if now >= beat_at:
            link.send(b"\0")
            beat_at = now + _BEAT_S
        if select.select([link], [], [], 0.0 if now < awake_until else _BEAT_S)[0]:
            if not follower.take(link):
                return
            awake_until = time.monotonic() + awake_s


def main() -> int:
    """Runs the process; returns its exit status."""
    data, (rank, count, parent, arena_fd, store_fd, link_fd) = children.begin()
    end_with_parent(parent)
    settings = DecoderSettings.model_validate_json(data)
    setup_logging(f"decoder-rank-{rank}", settings.log_level)
    logging.getLogger("services.common.process.progress").setLevel(logging.WARNING)
    link = socket.socket(fileno=link_fd)
    try:
        device = device_of(settings.device, rank)
        set_threads(count)
        ranks = join(rank, count, device, store_fd)
        arena = mmap.mmap(arena_fd, 0)
        # The whole runner, although this rank does not sample, so that all ranks need the same
        # memory.
        runner = create_runner(runner_options(settings, device), arena, ranks)
        use_one_thread(device)
        freeze_gc()
        awake_s = AWAKE_S if device != "cpu" else 0.0
        with suppress(ConnectionError):  # the other end has just been closed
            follow(Follower(runner), link, awake_s)
    except Exception as error:
        is_refusal = isinstance(error, ModelSpecError | ValueError)
        if is_refusal and select.select([link], [], [], _REFUSAL_S)[0]:
            return REFUSED
        return log_failure(error, log, "the rank failed")
    return 0


if __name__ == "__main__":
    leave(main())
