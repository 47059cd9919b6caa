"""Device code for programmatic dependent launch (PDL), which needs Hopper or later.

A kernel that is launched with PDL starts when each CTA of the previous kernel on the stream has let
it start or has ended. Its wait ends when the previous kernel has completed and the writes of that
kernel are visible. As each kernel with PDL waits, the kernels before the previous one have also
completed by then.

A kernel may read before its wait:

- memory that no kernel of a step writes: weights, factors of adapters, and constants, which change
  between steps alone;
- memory whose last writer is followed by a launch without PDL, which in turn comes before the
  reader; such a launch starts when everything before it has completed and is visible, and no later
  kernel starts before that launch does;
- memory that was written before the previous kernel, if the previous kernel lets this one start
  after its own wait. Prefill attention beside `paged_decode_attention` runs and writes its results
  in this way.

A writer that was launched without PDL is not enough, if the reader or a chain of kernels with PDL
follows it directly. The reader may start when the writer's CTAs have ended, and only the wait makes
their writes visible. Several kernels between writer and reader are not enough either, because with
mode 2 all of them may be waiting at the same time.

Two launches without PDL come before the layers of a step: `enter_step`, and then the lookup of the
embedding table in torch. A graph's replay starts like a launch without PDL. So each layer may read
before its wait

- what earlier steps wrote (decodes, chunks of prompts, or drafts), and what was copied before the
  step: recurrent states and inputs of the convolution, also those from a checkpoint; cached keys
  and values, also those from the host's memory; and the uploaded arrays of the step, such as
  `cu_query_lens`;
- what `enter_step` wrote (rows, lengths and tables of blocks), and what is computed between it and
  the lookup (groups of tokens with adapters).

The same holds for the drafts of the layer for multi-token prediction, because `draft_places` comes
before a lookup in torch. In the last layer, slots and groups of the sampled tokens are made before
torch gathers the hidden states of these tokens, see `StepContext.kernels_of`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Waits for the previous kernel on the stream, and lets the next kernel start.

    The module says which memory a kernel may read before the wait.

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
