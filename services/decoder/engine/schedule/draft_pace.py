"""Decides whether all sequences of a batch verify the drafts of the model's own layer. Pure Python.

The layer drafts for all sequences at once, and the host has to know a step's tokens and drafts
before it plans the next step. So a batch either verifies drafts together, or is planned ahead
without drafts. If each sequence decided for itself, it would miss steps of the rest, and the layer
would draft behind nearly every step for a few sequences.

Drafts pay if steps with drafts yield more tokens than they take time, both relative to steps
without drafts. The time is measured from the tokens of a step to the tokens of the next step. It
contains the layer, the verification, and the work of the host that no step hides.
"""

# What a step with drafts takes, relative to one without, until one was measured.
_FIRST_TIME = 1.35
# Weight of a measured step. A step that takes more than `_OUTLIER` times as long as predicted has
# waited for something else. The first step with drafts of an engine is left out, because it may
# load kernels.
_WEIGHT, _OUTLIER = 0.1, 3.0
# Drafts have to pay by so much more than they take, because both are estimates.
_MARGIN = 1.05
# Where drafts do not pay, they are tried once in so many steps, and in half as many after each
# trial, down to one in `_MAX_PAUSE`.
_PAUSE, _MAX_PAUSE = 8, 64


class DraftPace:
    """Owner of the decision whether the layer drafts behind a step.

    Attributes:
        is_trial: True if the last decision was to try drafts that are not expected to pay.
    """

    def __init__(self) -> None:
        self.is_trial = False
        # Times of steps with drafts, and of steps that were planned ahead, relative to the
        # predicted time of a step without drafts, which leaves out the host's work between steps.
        self._with, self._without = _FIRST_TIME, 1.0
        self._is_warm = False
        self._pause = self._num_left = _PAUSE

    @property
    def time(self) -> float:
        """Time of a step with drafts, relative to one without."""
        return self._with / self._without

    def drafts(self, tokens: float) -> bool:
        """Returns whether the layer should draft behind the step that is planned.

        Args:
            tokens: expected tokens of the next step for each sequence, if it verifies drafts.
        """
        self.is_trial = False
        if tokens >= _MARGIN * self.time:
            self._pause = self._num_left = _PAUSE
            return True
        self._num_left -= 1
        if self._num_left > 0:
            return False
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._num_left = self._pause
        self.is_trial = True
        return True

    def timed(self, ms: float, predicted_ms: float, *, has_drafts: bool) -> None:
        """Learns from a step with drafts, or from one that was planned ahead.

        Args:
            ms: milliseconds between the tokens of the step before and the step's own.
            predicted_ms: predicted milliseconds of the step without drafts.
            has_drafts: True if the step has verified drafts.
        """
        if predicted_ms <= 0:
            return
        found = min(_OUTLIER, ms / predicted_ms)
        if not has_drafts:
            self._without += _WEIGHT * (found - self._without)
        elif self._is_warm:
            self._with += _WEIGHT * (found - self._with)
        self._is_warm |= has_drafts
