"""Device code for programmatic dependent launch (PDL), which needs Hopper or later."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Waits for the previous kernel on the stream, and lets the next kernel start.

    A kernel may read memory before the wait that no earlier kernel writes.

    Args:
        PDL: 0 if the kernel was launched without PDL, so that there is nothing to wait for. 1 to
            let the next kernel start after the wait, 2 before the wait. With 2, two or three
            waiting kernels occupy SMs beside the one that computes. With 1, a short kernel may end
            before the next one has started. `KernelFacts.pdl` chooses by the size of the weights.
    """
    if PDL == 2:
        gdc_launch_dependents()
        gdc_wait()
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()
