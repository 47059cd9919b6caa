"""The gate before a launch: the next step waits for requests that may still arrive. Pure Python.

A new sequence takes part in the first step that is launched after its arrival. Usually step n + 1
is launched when step n begins. While lines of batches run beside requests
(`Background.expects_others`), step n + 1 is launched as late as it can be without the device
becoming idle, so that a request does not wait for a whole step of lines.
"""

from collections.abc import Sequence

from services.common.clock import Clock
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.step_times import StepTimes

# Seconds between the expected end of a step and the time at which the next step should have been
# launched, for the error of the prediction.
_MARGIN_S = 0.0005
# First guess of the seconds in which a step is planned and launched, and the most that count.
_LAUNCH_S, _LONGEST_LAUNCH_S = 0.001, 0.005
# Shares of the difference to the guess by which a longer and a shorter launch correct it. Most
# launches should be done in time, so a longer one counts for more.
_LONGER, _SHORTER = 0.2, 0.02


class LaunchGate:
    """Decides whether the next step should be launched later.

    Args:
        scheduler: the engine's scheduler.
        times: the times of the engine's steps, which predict the end of a step.
        clock: the engine's clock.
    """

    def __init__(self, scheduler: Scheduler, times: StepTimes, clock: Clock) -> None:
        self._prefills, self._background = scheduler.prefills, scheduler.background
        self._times = times
        self._clock = clock
        self._launch_s = _LAUNCH_S  # seconds in which most steps are planned and launched

    def launched(self, seconds: float) -> None:
        """Notes in how many seconds the host has planned and launched a step."""
        if not self._background.expects_others:
            return
        error = min(seconds, _LONGEST_LAUNCH_S) - self._launch_s
        self._launch_s += error * (_LONGER if error > 0 else _SHORTER)

    def waits(self, in_flight: Sequence[tuple[int, Batch, PendingStep]]) -> bool:
        """Returns whether the next step should be launched later.

        Args:
            in_flight: steps in flight, oldest first, as in `Engine.pending`.
        """
        if not in_flight or not self._background.expects_others:
            return False
        if self._prefills.waiting.has_foreground:
            return False
        _, batch, pending = in_flight[-1]
        if self._clock() >= self._times.expected_end(batch) - _MARGIN_S - self._launch_s:
            return False
        return not pending.is_done()
