"""An embedding out of an encoder's memory on the same machine: copied and checked in one pass."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from services.common.embedding import TensorDigest, all_finite, share_out, split_blocks
from services.common.threads import num_threads
from services.decoder.embedding_receiver import WrongContent


def copy_range(
    source: memoryview,
    into: memoryview,
    start: int,
    stop: int,
    dtype: str,
    digest: TensorDigest,
    threads: ThreadPoolExecutor,
) -> list[asyncio.Future[None]]:
    """Starts to copy these bytes of a tensor from `source` to `into`, and to digest the copy.

    Returns:
        Jobs to wait for, cancelled or not, for threads write `into`. Each may end in
        `WrongContent`: a value is infinite or not a number.
    """
    loop = asyncio.get_running_loop()
    return [
        loop.run_in_executor(threads, _copy, source, into, share, dtype, digest)
        for share in share_out(split_blocks(start, stop), num_threads())
    ]


def _copy(
    source: memoryview,
    into: memoryview,
    ranges: list[tuple[int, int]],
    dtype: str,
    digest: TensorDigest,
) -> None:
    """Block by block, while the block is in the core's own cache. Checked is the copy, because the
    source may change at any time.
    """
    for start, stop in ranges:
        # A memoryview's own assignment would hold the interpreter lock.
        np.copyto(
            np.frombuffer(into[start:stop], np.uint8), np.frombuffer(source[start:stop], np.uint8)
        )
        if not all_finite(into[start:stop], dtype):
            raise WrongContent("it has values that are not finite")
        digest.add(start, stop)


__all__ = ["copy_range"]
