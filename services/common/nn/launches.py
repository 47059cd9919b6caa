"""Whether launches cost the host anything where they are made.

A step that is captured once and replayed pays for no launch; one that is launched kernel by kernel
may keep the device waiting for the host. Who chooses between kernels asks here. One thread of a
process launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# Of an H100 or H200, for which tiles are chosen: other devices get them, too, less well.
PROCESSORS = 132
# Steps of so many tokens keep the device busy for longer than their launches take.
_MANY_TOKENS = 2048

_captured = False


@contextmanager
def captured() -> Iterator[None]:
    """What is launched within is for a CUDA graph, or warms up for its capture."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


@contextmanager
def captured_graph(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:  # noqa: ANN401 - torch's
    """Captures the launches of the block on the current stream, which is not the default one; the
    graph can be replayed after the block. Other threads may allocate pinned memory meanwhile.

    Run the same launches once on that stream before: libraries allocate and choose kernels then.

    Args:
        pool: memory that graphs share, from `torch.cuda.graph_pool_handle`; None: its own.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        with captured():
            yield graph
    except BaseException:
        with suppress(Exception):
            graph.capture_end()
        raise
    graph.capture_end()


def share_in_use(tiles: int) -> float:
    """Of the processors, while so many tiles, one a processor, go through them in waves."""
    return tiles / (-(-tiles // PROCESSORS) * PROCESSORS)


def are_free(num_tokens: int) -> bool:
    """Whether a kernel that takes the host longer may serve a step of so many tokens."""
    return _captured or num_tokens >= _MANY_TOKENS
