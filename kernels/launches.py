"""Capture of CUDA graphs, fast launches, and where the host's time for a launch counts.

A captured step pays for its launches once; a short step that is launched kernel by kernel may keep
the device waiting for the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

# Steps of at least this many tokens keep the device busy for longer than the host needs to launch
# them kernel by kernel, so that kernels whose launch takes longer may serve.
LAUNCH_HIDING_TOKENS = 2048

_compiled: dict[tuple[object, ...], Any] = {}


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


def launch(
    kernel: Any,  # noqa: ANN401 - Triton's, or its interpreter's
    grid: tuple[int, int, int],
    arguments: Sequence[Tensor | int],
    *,
    num_warps: int,
    enable_fp_fusion: bool = True,
    **constants: int,
) -> None:
    """Does what `kernel[grid](*arguments, **constants, ...)` does in a sixth of the host's time.

    Triton's own lookup of the compiled kernel would be a quarter of the time between two steps of a
    single sequence.

    Args:
        kernel: its constants follow its arguments, and it is specialized for no integer.
        arguments: the first is a tensor; all others always have the same types, and tensors among
            them are aligned.
        enable_fp_fusion: whether a multiplication and an addition may become one FMA.
        **constants: all of the kernel's.
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
    if aligned and first.is_cuda:  # else it may be the interpreter's
        _compiled[key] = made
