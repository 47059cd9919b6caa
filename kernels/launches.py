"""Capture of CUDA graphs, and where the host's time for a launch counts.

A captured step pays for its launches once; a short step that is launched kernel by kernel may keep
the device waiting for the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# Steps of at least this many tokens keep the device busy for longer than the host needs to launch
# them kernel by kernel, so that kernels whose launch takes longer may serve.
LAUNCH_HIDING_TOKENS = 2048


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
        yield graph
    except BaseException:
        with suppress(Exception):
            graph.capture_end()
        raise
    graph.capture_end()
