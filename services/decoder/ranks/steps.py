"""How ranks run the same steps: rank 0 tells the others each step before it runs it.

Which graphs or kernels run a step follows from the `ComputeStep` alone, and from what the ranks
have agreed on at the start (`runner_factory`), so that all do the same.
"""

from collections.abc import Callable

import torch

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.model_runner import ModelRunner
from services.decoder.engine.step import ComputeStep, PendingStep, Step
from services.decoder.engine.step_inputs import StepInputs

# The first byte of a record; a `ComputeStep` follows the first two.
_STAGE, _RUN, _RUN_STAGED = b"s", b"r", b"x"


class LeadingRunner:
    """The `step.Runner` of rank 0: its own model runner, which others follow.

    A step that raises leaves them within it, so that the engine has to end.

    Args:
        tell: sends a record to all others.
    """

    def __init__(self, runner: ModelRunner, tell: Callable[[bytes], None]) -> None:
        self._runner, self._tell = runner, tell
        self._staged: Step | None = None

    @property
    def info(self) -> EngineInfo:
        return self._runner.info

    def prepare(self, step: Step) -> None:
        self._tell(_STAGE + step.compute.to_bytes())
        self._staged = step
        self._runner.prepare(step)

    def execute(self, step: Step) -> PendingStep:
        staged, self._staged = self._staged, None
        self._tell(_RUN_STAGED if staged is step else _RUN + step.compute.to_bytes())
        return self._runner.execute(step)


class Follower:
    """Runs the steps that another rank samples."""

    def __init__(self, runner: ModelRunner) -> None:
        self._computer = runner.computer
        self._staged: tuple[ComputeStep, StepInputs] | None = None

    @torch.inference_mode()
    def handle(self, record: bytes) -> None:
        """Does what `LeadingRunner` has told."""
        if record[:1] != _RUN_STAGED:
            step = ComputeStep.from_bytes(record[1:])
            self._staged = step, self._computer.stage(step)
        if record[:1] != _STAGE:
            assert self._staged is not None
            step, inputs = self._staged
            self._staged = None
            computed = self._computer.run(step, inputs)
            self._computer.score(step, computed)
