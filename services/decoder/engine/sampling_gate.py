"""What the sampling of a launched step waits for. In the core: nothing."""

from services.decoder.engine.messages import TokenMasks
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.step import PendingStep


class SamplingGate:
    """A gate that is always open: each step is sampled when it is launched.

    Attributes:
        num_missed: samples that were not taken because what they needed came too late, in total.
    """

    num_missed = 0

    @property
    def waits(self) -> bool:
        """Whether the last step that was launched is better sampled later."""
        return False

    def handle(self, message: TokenMasks) -> None:
        """Takes a message of the front's that is the gate's."""
        raise TypeError(f"nothing waits for {type(message).__name__}")

    def sample(self) -> None:
        """Samples the step that is not sampled yet, if there is one; due before the next launch."""

    def launched(self, batch: Batch, pending: PendingStep) -> None:
        """A step was launched."""

    def read(self, following: Batch | None, now: float) -> None:
        """The oldest step's result was read; the device computes the following one, if any."""
