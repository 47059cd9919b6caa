"""Device code of programmatic dependent launch, which Hopper and later have."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Waits for the end of the kernel before, unless it was launched without (PDL is 0), and lets
    the next one on the stream start: after the wait (1), or before it (2). What no earlier kernel
    writes can be read before.

    Before it, and two or three kernels ahead hold the SMs beside the one that works, each waiting
    for the last; after it, and a short kernel has ended before the next one is there. Which is
    faster depends on the weights, see `KernelFacts.pdl`.
    """
    if PDL == 2:
        gdc_launch_dependents()
        gdc_wait()
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()
