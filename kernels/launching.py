"""Fast launches of Triton's kernels between two steps, where the device waits for the host.

The sampling kernels use it. Triton's errors of compilation and launch pass through.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_compiled: dict[tuple[object, ...], Any] = {}


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
        grid: CTAs along each axis.
        arguments: the first is a tensor; all others always have the same types, and tensors among
            them are aligned.
        num_warps: of a CTA.
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
