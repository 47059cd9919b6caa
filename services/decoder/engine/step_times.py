"""The times of the engine's steps: how long each step takes, and how long the device was busy."""

from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad


class StepTimes:
    """Times the steps of an engine, and corrects the step cost by them.

    A step is taken to begin when the result of the step before was read, because the device runs
    one step after the other. A step that was launched even later begins at its launch.

    Args:
        cost: the model that predicts how long a step lasts.

    Attributes:
        cost: the model that predicts how long a step lasts.
        num_steps: number of steps that were launched.
    """

    def __init__(self, cost: StepCost) -> None:
        self.num_steps = 0
        self.cost = cost
        self._has_drafts = False  # whether there was a step with drafts
        self._read_at = 0.0  # when the last step's result was read
        self._busy_s = 0.0  # how long steps were in flight, up to the last time that none was
        self._busy_since = 0.0  # when a step was last launched while none was in flight

    def busy_s(self, now: float, *, in_flight: bool) -> float:
        """Returns for how many seconds so far a step was in flight.

        Args:
            now: present time.
            in_flight: True if a step is in flight now.
        """
        return self._busy_s + (now - self._busy_since if in_flight else 0.0)

    def launching(self, batch: Batch, now: float, *, in_flight: bool) -> None:
        """Notes that a step is launched now. `in_flight` says whether another step is in flight."""
        batch.launched_at = now
        if not in_flight:
            self._busy_since = now

    def resumed(self, now: float) -> None:
        """Notes that the engine could launch no step until now, because another process had the
        device.
        """
        self._read_at = now

    def launched(self, batch: Batch, seconds: float, before: Batch, *, is_late: bool) -> None:
        """Notes that a step was launched while the step before it was not read yet.

        Args:
            batch: plan of the step.
            seconds: time in which the host has planned and launched the step.
            before: plan of the step before.
            is_late: True if the device had computed the step before when the launch ended.
        """
        if batch.load is not None:
            before.is_next_late = is_late
            self.cost.launched(1e3 * seconds, is_late=is_late)

    def expected_end(self, batch: Batch) -> float:
        """Returns when the device should have computed a step, by the engine's clock.

        Args:
            batch: plan of the launched step that the device computes now.
        """
        load = batch.load or _load_of_decodes(batch)
        return max(self._read_at, batch.launched_at) + self.cost.predict(load) / 1e3

    def drafted(self, seconds: float, *, in_flight: bool) -> None:
        """Notes for how long the device drafted behind the tokens that are read now, see `read`."""
        if not in_flight:
            self._busy_s += seconds

    def read(self, batch: Batch, now: float, *, in_flight: bool) -> float:
        """Notes that the result of a step was read now, and corrects the step cost.

        A step that waited for token masks, or for blocks of the host, is left out. So is a step
        that seems to take longer than predicted because the host launched the next step meanwhile:
        when the device was done is not known. Of the steps without prompts and drafts, one in
        `StepCost.decode_period` is used, and all of them once there were drafts.

        Args:
            batch: plan of the step.
            now: present time.
            in_flight: True if another step is in flight.

        Returns:
            Milliseconds since the tokens of the step before were read.
        """
        if not in_flight:
            self._busy_s += now - self._busy_since
        # If the model drafted behind the step before, this step was launched later, or, if the host
        # did not wait for the drafts (`DraftReader`), its time includes the rest of the drafting.
        ms = (now - max(self._read_at, batch.launched_at)) * 1e3
        whole_ms, self._read_at = (now - self._read_at) * 1e3, now
        load = batch.load
        self._has_drafts |= batch.num_drafts > 0
        # The price of drafts is a difference to steps without them, which therefore all count.
        is_used = self._has_drafts or self.num_steps % self.cost.decode_period == 0
        if load is None and is_used:
            load = _load_of_decodes(batch)
        if load is not None and not batch.late and not batch.has_loads:
            may_be_shorter = batch.is_next_late and 0 < self.cost.predict(load) < ms
            if not may_be_shorter:
                self.cost.observe(load, ms)
        return whole_ms


def _load_of_decodes(batch: Batch) -> StepLoad:
    """Returns the work of a step without prompts."""
    num_drafts = batch.num_drafts
    load = StepLoad(len(batch.chunks), batch.num_tokens - num_drafts, drafts=num_drafts)
    limits = [chunk.limit - len(chunk.drafts) for chunk in batch.chunks]
    keys = [chunk.start + 1 for chunk in batch.chunks]
    load.keys = sum([n * key for n, key in zip(limits, keys, strict=True)])
    return load
