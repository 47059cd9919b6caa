"""The interface of a runner, which computes the steps that the engine plans (`step`)."""

from typing import Protocol

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.step import Int32Array, Step, StepOutput


class PendingStep(Protocol):
    """A step that was launched."""

    def is_computed(self) -> bool:
        """Returns whether a step with late masks is computed and could be sampled."""
        ...

    def is_done(self) -> bool:
        """Returns whether the step's tokens are on the host, so that `result` would not wait."""
        ...

    def put_mask(self, index: int, mask: Int32Array) -> None:
        """Copies the mask of `SampleStep.late[index]`; a later copy replaces an earlier one."""
        ...

    def sample(self) -> None:
        """Launches the sampling of a step with late masks. `put_mask` must have been called for
        the masks that have arrived.

        The call has to come before the next step is executed.
        """
        ...

    def result(self) -> StepOutput:
        """Waits until the step's tokens are on the host, and returns them. The device meanwhile
        computes the next step, if it was launched.
        """
        ...

    def drafts(self) -> Int32Array | None:
        """Waits until the drafts behind the step's tokens are on the host, and returns them.

        The device makes them behind the tokens, so the host should do what it can before this call.

        Returns:
            Drafts `[B, num_head_drafts]` of each sample, with -1 from the first one on that could
            not be made. There may be further rows. None if the model drafts nothing.
        """
        ...


class Runner(Protocol):
    """The only owner of a device. `ModelRunner` is the implementation."""

    @property
    def info(self) -> EngineInfo:
        """Sizes and names of the runner, which never change."""
        ...

    def prepare(self, step: Step) -> None:
        """Does the host's work for a step, while the step before it waits to be sampled. The next
        call of `execute` may be for this step or for another one.
        """
        ...

    def execute(self, step: Step) -> PendingStep:
        """Launches one step. On a GPU, returns without waiting for the device.

        If the call raises, part of the step may have run. The rows of the step's chunks are then
        undefined, so their sequences have to start again. The step's row starts, block updates and
        block loads may be lost, also those of rows without a chunk in this step. A later step has
        to repeat these. Blocks that the step was to save on the host are lost.
        """
        ...
