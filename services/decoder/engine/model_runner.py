"""The model runner: steps in, sampled tokens out. The only owner of its device.

The engine calls it, with nothing but a `Step`. An exception of the device is the engine's to
handle.
"""

import torch

from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.common.nn.collectives import ALONE, Ranks
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine.graphs import DeviceState
from services.decoder.engine.images import ImageReader
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.pending_step import DevicePendingStep
from services.decoder.engine.step import Step
from services.decoder.engine.step_computer import StepComputer
from services.decoder.engine.step_inputs import StepInputs
from services.decoder.engine.step_sampler import Extras, StepSampler
from services.decoder.models.transformer import Transformer


class ModelRunner:
    """The `step.Runner` of a model. Not thread-safe.

    Nothing in `execute` waits for the device: a step is arrays on the host, one upload, launches,
    and one copy back. All steps run on one stream, so that step n + 1 finds the tokens of step n in
    the rows.

    Attributes:
        computer: the half of a step that every rank has.
        sampler: the half that one rank has.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Transformer,
        backend: AttentionBackend,
        state: DeviceState,
        images: ImageReader | None,
        extras: Extras,
        ranks: Ranks = ALONE,
    ) -> None:
        self.info = info
        self.computer = StepComputer(info, model, backend, state, images, ranks)
        self.sampler = StepSampler(
            info, model, state.rows, self.computer.staging, getattr(torch, info.dtype), extras
        )
        self._table = model.ops.table
        self._prepared: tuple[Step, StepInputs, SamplingInputs | MaskedRows | None] | None = None

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Calls so far by "operation=implementation", replayed ones included."""
        calls = self._table.calls()
        return {f"{operation}={name}": count for (operation, name), count in calls.items()}

    @torch.inference_mode()
    def prepare(self, step: Step) -> None:
        """Stages a step; see `step.Runner`. A row that is given to another sequence is the last
        one's until the step before is sampled, so that such a step is not staged yet.
        """
        if not step.sample.row_starts:
            self._prepared = self._stage(step)

    @torch.inference_mode()
    def execute(self, step: Step) -> DevicePendingStep:
        """Launches a step; see `step.Runner`."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not step:
            if step.sample.row_starts:
                self.sampler.start_rows(step.sample.row_starts)
            prepared = self._stage(step)
        _, inputs, sampling = prepared
        if len(step.sample.late):
            self.sampler.begin_masks(step.sample.token_masks)
        computed = self.computer.run(step.compute, inputs)
        return self.sampler.sample(step, computed, sampling)

    def close(self) -> None:
        """Releases the arena; the process may go on without the runner."""
        self.computer.close()

    def _stage(self, step: Step) -> tuple[Step, StepInputs, SamplingInputs | MaskedRows | None]:
        inputs = self.computer.stage(step.compute)
        return step, inputs, self.sampler.stage(step.sample, step.compute)
