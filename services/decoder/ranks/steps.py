"""How ranks run the same steps: rank 0 tells the others each step before it runs it.

Which graphs or kernels run a step follows from the `ComputeStep` alone, and from what the ranks
have agreed on at the start (`runner_factory`), so that all do the same.
"""

import socket
import struct
from collections.abc import Callable

import torch

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import ComputeStep, PendingStep, Step

# A record: its length, its kind and, of the first two kinds, a `ComputeStep`.
_STAGE, _RUN, _RUN_STAGED = b"s", b"r", b"x"
_LENGTH = struct.Struct("<I")


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
        self._tell(_record(_STAGE, step))
        self._staged = step
        self._runner.prepare(step)

    def execute(self, step: Step) -> PendingStep:
        staged, self._staged = self._staged, None
        self._tell(_record(_RUN_STAGED) if staged is step else _record(_RUN, step))
        return self._runner.execute(step)


class Follower:
    """Runs the steps that another rank samples."""

    def __init__(self, runner: ModelRunner) -> None:
        self._computer = runner.computer
        self._staged: tuple[ComputeStep, StepInputs] | None = None

    @torch.inference_mode()
    def take(self, link: socket.socket) -> bool:
        """Does what `LeadingRunner` tells next; False: the other end is closed."""
        head = link.recv(_LENGTH.size, socket.MSG_WAITALL)
        (size,) = _LENGTH.unpack(head or bytes(_LENGTH.size))
        record = link.recv(size, socket.MSG_WAITALL)
        if not record or len(record) < size:
            return False
        if record[:1] != _RUN_STAGED:
            step = ComputeStep.from_bytes(record[1:])
            self._staged = step, self._computer.stage(step)
        if record[:1] != _STAGE:
            assert self._staged is not None
            step, inputs = self._staged
            self._staged = None
            computed = self._computer.run(step, inputs)
            self._computer.score(step, computed)
        return True


def _record(kind: bytes, step: Step | None = None) -> bytes:
    body = kind if step is None else kind + step.compute.to_bytes()
    return _LENGTH.pack(len(body)) + body
