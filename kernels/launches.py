"""Captures CUDA graphs, and launches Triton kernels with little overhead on the host.

The host needs no time per kernel when it replays a captured step. In a short step that is launched
kernel by kernel, the device may have to wait for the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

# A step of at least this many tokens keeps the device busy for longer than the host needs to launch
# the step kernel by kernel, so that kernels with a slow launch can be used. Measured for the 2B
# model, each of whose layers multiplies a token with so many weights.
LAUNCH_HIDING_TOKENS = 2048
_MEASURED_WEIGHTS = 50_331_648

_compiled: dict[tuple[object, ...], Any] = {}


def launch_hiding_tokens(layer_weights: int) -> int:
    """Returns from which number of tokens on a step of a model hides its launches.

    A layer has about as many launches whatever its size, and the device's time for a token grows
    with the weights that the token is multiplied with: 535 tokens of an 8B model take as long as
    2,048 of the 2B. Smaller models have the measured number, because for them nothing was measured.

    Args:
        layer_weights: number of weights of a layer with which a token is multiplied.
    """
    return min(LAUNCH_HIDING_TOKENS, -(-LAUNCH_HIDING_TOKENS * _MEASURED_WEIGHTS // layer_weights))


@contextmanager
def captured_graph(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:  # noqa: ANN401 - torch has no type
    """Captures the launches in its block on the current stream into a CUDA graph.

    The current stream must not be the default stream. The graph can be replayed after the block.
    Other threads may allocate pinned memory during the capture. Run the same launches once on the
    stream before, because libraries allocate memory and choose kernels at the first launch.

    Args:
        pool: memory pool of the graph, from `torch.cuda.graph_pool_handle`. None for a pool of its
            own.
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


def launch(
    kernel: Any,  # noqa: ANN401 - a function of Triton or of its interpreter
    grid: tuple[int, int, int],
    arguments: Sequence[Tensor | int],
    *,
    num_warps: int,
    enable_fp_fusion: bool = True,
    **constants: int,
) -> None:
    """Launches `kernel[grid](*arguments, **constants, ...)` in a sixth of the host's time.

    Triton's own lookup of the compiled kernel would take a quarter of the time between two steps of
    a single sequence.

    Args:
        kernel: Triton function whose constants follow its arguments, and which is not specialized
            for the values of integers.
        grid: numbers of CTAs.
        arguments: arguments of the kernel. The first is a tensor. The types of all others are the
            same in each call, and tensors among them are aligned to 16 bytes.
        num_warps: warps per CTA.
        enable_fp_fusion: True if a multiplication and an addition may become one FMA.
        **constants: all constants of the kernel.
    """
    first, values = arguments[0], [constants[name] for name in kernel.arg_names[len(arguments) :]]
    assert isinstance(first, Tensor)
    key = kernel, first.dtype, num_warps, enable_fp_fusion, *values
    aligned = first.data_ptr() % 16 == 0
    if aligned and (found := _compiled.get(key)) is not None:
        found[grid](*arguments, *values)
        return
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    made = kernel[grid](*arguments, **constants, **options)
    if aligned and first.is_cuda:  # on a CPU, `made` may be a result of the interpreter
        _compiled[key] = made
