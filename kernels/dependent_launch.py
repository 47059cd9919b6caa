"""Device code of programmatic dependent launch, which Hopper and later have."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Waits for the end of the kernel before, unless it was launched without, and then lets the
    next one on the stream start. What no earlier kernel writes can be read before.

    A kernel that let the next one start while it waits itself would let that one do the same: two
    or three kernels ahead then hold the SMs beside the one that works.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
