"""The tokens that penalties count where sequences verify drafts."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DraftCounts(NamedTuple):
    """The tokens of drafts that the penalties of a step count.

    The sampler counts each sampled token, except in chunks with drafts, because the host may reject
    some of their tokens. The host sends the accepted tokens with the sequence's next step.

    Attributes:
        accepted: `[N, 2]`, tokens that are counted before the step is sampled: row, token id.
        assumed: `[M, 2]`, drafts that a sample counts, because they come before it: index of the
            sample, token id.
        samples: `[D]`, indices of the samples whose tokens are not counted.
    """

    accepted: npt.NDArray[np.int64]
    assumed: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
