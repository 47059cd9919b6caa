"""When a step is sampled without the token masks that are missing. Pure; times are seconds.

The device must not wait for a mask: others in the batch would. So the host has to be through with
this step's sampling and the next step's launch when the device has computed the step, and begins
early enough, by what the last steps took. Where all rows have masks, a missing one costs its row
two steps and waiting for it costs all rows a little, so that the device may wait a little.
"""

_NEWEST = 0.2  # of the means
_MARGIN_S = 5e-5
_LEAST_SHARE = 0.5  # of a step, in which masks may always arrive
_STEPS_PER_MISS = 2
_MOST_PATIENCE = 0.1  # of a step; a mask that always takes longer costs the other rows no more


class MaskDeadline:
    """Means over the last steps of decodes alone, and the deadline that follows."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._launch_s = 0.0
        self._began_at = 0.0  # of the step that the device computes; 0: unknown
        self._decodes_only = False
        self._has_waited = False  # the device, for masks

    @property
    def at(self) -> float | None:
        """The deadline of the step that the device computes; None: when it is computed."""
        if not (self._began_at and self._decodes_only and self._step_s):
            return None
        least = self._step_s - self._launch_s - _MARGIN_S
        return self._began_at + max(least, _LEAST_SHARE * self._step_s)

    def patience_s(self, missing: int, rows: int) -> float:
        """How long after the deadline a step whose rows all have masks waits for those missing."""
        return self._step_s * min(_MOST_PATIENCE, _STEPS_PER_MISS * missing / rows)

    def began(self, now: float, *, decodes_only: bool) -> None:
        """The tokens of a step have arrived, so the device computes the next one.

        Args:
            decodes_only: of the next one.
        """
        if self._began_at and self._decodes_only and not self._has_waited:
            self._step_s = _mean(self._step_s, now - self._began_at)
        self._began_at, self._decodes_only = now, decodes_only
        self._has_waited = False

    def computed(self, now: float) -> None:
        """The device had computed the step before it could be sampled: how long it took the device
        is not known, only that it was no longer than this.
        """
        if self._began_at and self._decodes_only:
            self._step_s = min(self._step_s or now - self._began_at, now - self._began_at)
            self._has_waited = True

    def idle(self) -> None:
        """The device computes nothing."""
        self._began_at = 0.0

    def launched(self, seconds: float) -> None:
        """The time from the decision to sample a step to the next step's launch."""
        self._launch_s = _mean(self._launch_s, seconds)


def _mean(mean: float, newest: float) -> float:
    return mean + _NEWEST * (newest - mean) if mean else newest
