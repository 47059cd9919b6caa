"""The steps that all ranks run: rank 0 sends each step to the others before it runs the step.

Which graphs or kernels run a step follows from the `ComputeStep` alone, and from what the ranks
have agreed on at the start (`runner_factory`), so that all ranks do the same.
"""

import json
import socket
import struct
from contextlib import suppress

import torch

from services.common.adapter_config import AdapterError
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.step import ComputeStep, Step
from services.decoder.ranks.processes import RankProcesses

# Kinds of records. A record has its length, its kind and, for the first two kinds, a `ComputeStep`.
# A record of the last kind has a JSON list of the slot and the directory of an adapter.
_STAGE, _RUN, _RUN_STAGED, _ADAPTER = b"s", b"r", b"x", b"a"
_LENGTH = struct.Struct("<I")


class LeadingRunner:
    """The `Runner` of rank 0, whose steps the other ranks run, too.

    If a step raises, the other ranks wait in the middle of the step, so the engine has to end.

    Args:
        runner: rank 0's own runner.
        processes: the other ranks.
    """

    def __init__(self, runner: ModelRunner, processes: RankProcesses) -> None:
        self._runner, self._processes = runner, processes
        self._staged: Step | None = None

    @property
    def info(self) -> EngineInfo:
        return self._runner.info

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Number of kernel calls of rank 0; see `ModelRunner`."""
        return self._runner.kernel_calls

    def load_adapter(self, slot: int, directory: str) -> None:
        """Loads an adapter on all ranks, or on none, see `Adapters.load_files`."""
        body = _ADAPTER + json.dumps([slot, directory]).encode()
        self._processes.send(_LENGTH.pack(len(body)) + body)
        self._runner.load_adapter(slot, directory)

    def prepare(self, step: Step) -> None:
        self._processes.send(_record(_STAGE, step))
        self._staged = step
        self._runner.prepare(step)

    def execute(self, step: Step) -> PendingStep:
        staged, self._staged = self._staged, None
        self._processes.send(_record(_RUN_STAGED) if staged is step else _record(_RUN, step))
        return self._runner.execute(step)


class Follower:
    """Runs the steps that rank 0 samples.

    Args:
        runner: this rank's runner, which samples nothing.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._computer = runner.computer
        self._staged: tuple[ComputeStep, StepInputs] | None = None

    @torch.inference_mode()
    def take(self, link: socket.socket) -> bool:
        """Reads a record of `LeadingRunner` and does what it says.

        Returns False if the other end of the link is closed.
        """
        head = link.recv(_LENGTH.size, socket.MSG_WAITALL)
        (size,) = _LENGTH.unpack(head or bytes(_LENGTH.size))
        record = link.recv(size, socket.MSG_WAITALL)
        if not record or len(record) < size:
            return False
        if record[:1] == _ADAPTER:
            with suppress(AdapterError):  # rank 0 has the error, too, and reports it
                self._computer.load_adapter(*json.loads(record[1:]))
            return True
        if record[:1] != _RUN_STAGED:
            step = ComputeStep.from_bytes(record[1:])
            self._staged = step, self._computer.stage(step)
        if record[:1] != _STAGE:
            assert self._staged is not None
            step, inputs = self._staged
            self._staged = None
            computed = self._computer.run(step, inputs)
            self._computer.score(step, computed)
            if step.num_head_drafts and (drafter := self._computer.parts.drafter) is not None:
                drafter.draft(None)
        return True


def _record(kind: bytes, step: Step | None = None) -> bytes:
    body = kind if step is None else kind + step.compute.to_bytes()
    return _LENGTH.pack(len(body)) + body
