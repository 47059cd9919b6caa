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

# Seconds before the expected end of a step at which the next step is launched. Planning and
# launching take up to 1 ms of them. The rest is for the error of the prediction.
_LAUNCH_S = 0.0015


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
        if self._clock() >= self._times.expected_end(batch) - _LAUNCH_S:
            return False
        return not pending.is_done()
