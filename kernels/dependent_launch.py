"""Device code of programmatic dependent launch, which Hopper and later have."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Lets the next kernel on the stream start, and waits for the end of the one before, unless it
    was launched without. What no earlier kernel writes can be read before.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
