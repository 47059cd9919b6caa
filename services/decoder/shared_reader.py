"""An embedding out of an encoder's memory on the same machine: copied and checked in one pass."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from services.common.embedding import (
    BLOCK_BYTES,
    all_finite,
    block_digests,
    join_digests,
    split_blocks,
)
from services.decoder.embedding_receiver import WrongContent

# More threads would only wait for memory, and for the interpreter lock between their steps.
_MAX_THREADS = 4


def num_threads() -> int:
    """Threads that copy at once on this machine."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


async def copy_embedding(
    source: memoryview, into: memoryview, dtype: str, threads: ThreadPoolExecutor
) -> bytes:
    """Copies `source` and returns the copy's digest. Must not be cancelled: threads write `into`.

    Raises:
        WrongContent: a value is infinite or not a number.
    """
    loop, parts = asyncio.get_running_loop(), num_threads()
    jobs = [
        loop.run_in_executor(threads, _copy, part, place, dtype)
        for part, place in zip(split_blocks(source, parts), split_blocks(into, parts), strict=True)
    ]
    await asyncio.wait(jobs)
    return join_digests(chain.from_iterable([job.result() for job in jobs]))


def _copy(source: memoryview, into: memoryview, dtype: str) -> list[bytes]:
    """Block by block, while the block is in the core's own cache. Checked is the copy, because the
    source may change at any time.
    """
    digests: list[bytes] = []
    for start in range(0, len(into), BLOCK_BYTES):
        block = into[start : start + BLOCK_BYTES]
        # A memoryview's own assignment would hold the interpreter lock.
        np.copyto(
            np.frombuffer(block, np.uint8),
            np.frombuffer(source[start : start + BLOCK_BYTES], np.uint8),
        )
        if not all_finite(block, dtype):
            raise WrongContent("it has values that are not finite")
        digests += block_digests(block)
    return digests


__all__ = ["copy_embedding", "num_threads"]
