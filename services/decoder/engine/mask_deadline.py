"""The deadline for token masks: when a step is sampled without those that are missing.

The device must not wait for a mask, because the other sequences of the batch would wait, too. So
the host has to have sampled this step and launched the next one when the device has computed this
step. The deadline is as early as the last steps say that this takes. If all sequences of a step
have masks, a missing mask costs its sequence two steps, and waiting costs all sequences a little,
so the device may wait a little. Pure Python; all times are seconds.
"""

# Weight of the newest value in a running mean.
_NEWEST_WEIGHT = 0.2
_MARGIN_S = 5e-5
# Masks may arrive during this share of a step, however long the launch of a step takes.
_LEAST_SHARE = 0.5
_STEPS_PER_MISS = 2
# The longest wait behind the deadline, as a share of a step. It limits what a mask that is always
# late costs the other sequences.
_MAX_PATIENCE = 0.1


class MaskDeadline:
    """Running means over the last steps with decodes alone, and the deadline that follows."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._launch_s = 0.0
        self._began_at = 0.0  # when the device began its present step; 0 if that is unknown
        self._decodes_only = False
        self._has_waited = False  # whether the device has waited for masks

    @property
    def at(self) -> float | None:
        """`time.monotonic()` of the deadline for the step that the device computes.

        None if the duration of the step cannot be predicted. The deadline is then its end.
        """
        if not (self._began_at and self._decodes_only and self._step_s):
            return None
        least = self._step_s - self._launch_s - _MARGIN_S
        return self._began_at + max(least, _LEAST_SHARE * self._step_s)

    def patience_s(self, missing: int, rows: int) -> float:
        """Returns for how long a step whose rows all have masks waits behind the deadline."""
        return self._step_s * min(_MAX_PATIENCE, _STEPS_PER_MISS * missing / rows)

    def began(self, now: float, *, decodes_only: bool) -> None:
        """Notes that the tokens of a step have arrived, so that the device computes the next step.

        Args:
            now: `time.monotonic()`.
            decodes_only: True if the next step has decodes alone.
        """
        if self._began_at and self._decodes_only and not self._has_waited:
            self._step_s = _mean(self._step_s, now - self._began_at)
        self._began_at, self._decodes_only = now, decodes_only
        self._has_waited = False

    def computed(self, now: float) -> None:
        """Notes that the device had computed the step before the step could be sampled.

        The duration of the step is unknown, except for the bound that `now` gives.
        """
        if self._began_at and self._decodes_only:
            self._step_s = min(self._step_s or now - self._began_at, now - self._began_at)
            self._has_waited = True

    def idle(self) -> None:
        """Notes that the device computes nothing."""
        self._began_at = 0.0

    def launched(self, seconds: float) -> None:
        """Takes the time from the decision to sample a step to the launch of the next step."""
        self._launch_s = _mean(self._launch_s, seconds)


def _mean(mean: float, newest: float) -> float:
    return mean + _NEWEST_WEIGHT * (newest - mean) if mean else newest
