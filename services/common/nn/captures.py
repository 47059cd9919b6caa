"""CUDA graphs in which the counters of matrix products are zeroed once.

Where tiles outnumber the processors, cuBLASLt's kernels for Hopper count in their workspace who
takes which, and the library zeroes it before each of them: in a graph that is a node between two
kernels, and some 2 µs. Here each product of a graph counts at a place of its own, one node before
the first zeroes them all, and the others are taken out.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from services.common.nn import launches
from services.common.nn.graph_nodes import Driver, DriverError

PLACE_BYTES = 256  # as memory for cuBLAS is aligned
_PLACES = 256


class Places:
    """Where products count, on the device: the first place for all that are in no graph, the others
    for those of the graph that runs, all of which one stream launches.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken: int | None = None  # by the graph that is captured

    def begin(self) -> None:
        """The capture of a graph begins."""
        self._taken = 0

    def end(self) -> range:
        """It ends.

        Returns:
            Addresses of the places that its products have taken.
        """
        taken, self._taken = self._taken or 0, None
        first = self._memory.data_ptr() + PLACE_BYTES
        return range(first, first + taken * PLACE_BYTES, PLACE_BYTES)

    def take(self) -> int:
        """Address of a place for one launch, in a graph a place of its own, as long as there are
        any.
        """
        if self._taken is None or self._taken == _PLACES - 1:
            return self._memory.data_ptr()
        if self._taken == 0:
            self._memory[PLACE_BYTES:].zero_()
        self._taken += 1
        return self._memory.data_ptr() + self._taken * PLACE_BYTES


@functools.cache
def places() -> Places:
    """Those of this process."""
    with torch.inference_mode(False):  # may be zeroed within that mode and outside
        return Places(torch.zeros(_PLACES * PLACE_BYTES, dtype=torch.uint8, device="cuda"))


@contextmanager
def captured_graph(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:  # noqa: ANN401 - torch's
    """Captures what is launched within on the current stream, which is not the default one; the
    graph can be replayed once the context has ended. Other threads may allocate pinned memory.
    """
    counters = places()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    counters.begin()
    try:
        with launches.captured():
            yield graph
    except BaseException:
        with suppress(Exception):
            graph.capture_end()
        raise
    finally:
        taken = counters.end()
    graph.capture_end()
    if taken:
        _zero_once(graph.raw_cuda_graph(), taken)
    graph.instantiate()


def _zero_once(graph: int, taken: range) -> None:
    """Takes out the nodes that zero one of the places taken and nothing else."""
    try:
        driver = Driver()
        for node, (address, size) in driver.zeroing_nodes(graph):
            if address in taken and size <= PLACE_BYTES:
                driver.take_out(graph, node)
    except (OSError, AttributeError, DriverError) as why:
        _say_once(f"graphs zero each product's counter: {why}")


@functools.cache
def _say_once(why: str) -> None:
    logging.warning(why)
