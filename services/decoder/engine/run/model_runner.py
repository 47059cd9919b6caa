"""The model runner turns steps into sampled tokens, and is the only owner of its device.

The engine calls the runner with nothing but a `Step`, and handles exceptions of the device.
`StepComputer` computes the part of a step that every rank has. The runner does the part of the one
rank that samples: tokens from logits, log-probabilities, and copies to the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.decoder.engine.messages import SamplingParams
from services.decoder.engine.run.mask_buffer import MaskBuffer
from services.decoder.engine.run.pending_step import DevicePendingStep, HostTokens, Readback
from services.decoder.engine.run.prompt_scores import score_prompt
from services.decoder.engine.run.sampler import Sampled, Sampler
from services.decoder.engine.run.step_computer import Computed, StepComputer
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import Int32Array, RowSampling, SampleStep, Step

# Together, they run every branch of the sampler.
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, top_logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
)

Sampling = SamplingInputs | MaskedRows | None  # what `Sampler.prepare` returns


class ModelRunner:
    """The `step.Runner` of a model. Not thread-safe.

    Nothing in `execute` waits for the device: a step is arrays on the host, one upload, launches,
    and one copy back. All steps run on one stream, so that step n + 1 finds the tokens of step n in
    the rows.

    Args:
        computer: computes the part of a step that every rank has.

    Attributes:
        info: the engine's limits.
        sampler: samples tokens from logits.
        readback: copies results to the host.
    """

    def __init__(self, computer: StepComputer) -> None:
        info, model, rows = computer.info, computer.model, computer.state.rows
        device = rows.blocks.device
        self.info = info
        self.computer = computer
        self.sampler = Sampler(info.max_num_sequences, info.vocab_size, device, model.ops)
        self.readback = Readback(info.max_num_sequences, device)
        self._model = model
        self._last_tokens = rows.last_tokens
        self._staging = computer.staging
        self._masks = MaskBuffer(info.max_num_sequences, info.vocab_size, device)
        self._prepared: tuple[Step, StepInputs, Sampling] | None = None

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Number of kernel calls by "operation=implementation"; replays of graphs count, too."""
        calls = self._model.ops.table.calls()
        return {f"{operation}={name}": count for (operation, name), count in calls.items()}

    @torch.inference_mode()
    def prepare(self, step: Step) -> None:
        """Stages a step ahead; see `step.Runner`.

        A step that gives a row to another sequence is not staged ahead. Staging would replace the
        row's sampling parameters, which the previous step still needs when it is sampled.
        """
        if not step.sample.row_starts:
            self._prepared = self._stage(step)

    @torch.inference_mode()
    def execute(self, step: Step) -> DevicePendingStep:
        """Launches a step; see `step.Runner`.

        A step with late masks is sampled when `sample` of the pending step is called. The sampling
        of any other step is launched here.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not step:
            prepared = self._stage(step)
        _, inputs, sampling = prepared
        late, masks = step.sample.late, step.sample.token_masks
        if len(late):  # all masks are uploaded together, while the step is computed
            self._masks.begin()
            for index, mask in enumerate(masks):
                self._masks.put(index, mask)
        computed = self.computer.run(step.compute, inputs)
        scores = self._score(step, computed.hidden) if len(step.compute.scored) else []
        if computed.logits is None:
            # No token is sampled, but the engine has to know when the step has read its images:
            # their memory in the arena may be reused once the result is there.
            return DevicePendingStep(self.readback.tokens(None), scores)
        if len(late) == 0:
            return DevicePendingStep(self.sample(computed, sampling), scores)
        waiting = _LateSampling(self, self._masks, computed, sampling, len(masks), len(late))
        return DevicePendingStep(None, scores, late=waiting, computed=self.readback.mark())

    def _stage(self, step: Step) -> tuple[Step, StepInputs, Sampling]:
        """Starts rows of other sequences, and puts all arrays into the staging buffer."""
        for start in step.sample.row_starts:
            self.sampler.start_row(start)
        compute, late_masks = step.compute, None
        inputs = self.computer.stage(compute)
        rows, ends, samples = compute.rows, compute.starts + compute.lengths, compute.samples
        if len(samples) < len(rows):
            rows, ends = rows[samples], ends[samples]
        if len(step.sample.late):
            late_masks = self._masks.device(len(step.sample.masked) + len(step.sample.late))
        prepared = self.sampler.prepare(rows, ends, self._staging, step.sample, late_masks)
        return step, inputs, prepared

    def _score(self, step: Step, hidden: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Scores the prompt tokens that a step names, and starts the copies to the host."""
        assert hidden is not None
        runs: list[tuple[Tensor, ...]] = []
        taken = 0
        for first, count, most in step.compute.scored.tolist():
            ids = step.sample.followers[taken : taken + count]
            followers = torch.from_numpy(ids.astype(np.int64))
            taken += count
            found = score_prompt(
                self._model,
                hidden[first : first + count],
                self.sampler.upload(followers),
                min(most, self.info.vocab_size),
                self.info.max_num_sequences,
            )
            runs.append(tuple(map(self.readback.copy, found)))
        return runs

    def sample(self, computed: Computed, sampling: Sampling) -> HostTokens:
        """Samples tokens, stores them for the next step, and starts their copy to the host."""
        _, logits, token_ids, rows = computed
        assert logits is not None and rows is not None
        if isinstance(sampling, SamplingInputs):
            sampled = self.sampler.sample(logits, sampling)
            self._keep(rows, sampled.token_ids)
            return self.readback.tokens(sampled, sampling)
        if token_ids is None:  # else a graph has chosen the tokens and stored them in the rows
            token_ids = self._model.ops.greedy(logits)
            self._keep(rows, token_ids)
        if sampling is not None:  # masked rows get other tokens, here and in the rows
            self._model.ops.greedy_masked(logits, sampling, token_ids, self._last_tokens)
        return self.readback.tokens(Sampled(token_ids, None))

    def _keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """Writes a step's tokens into the rows, where the next step reads them."""
        rows = rows[: len(token_ids)]  # without padding
        # A row that failed may be in the next step already, which then needs any valid id.
        self._last_tokens.index_copy_(0, rows, token_ids.clamp(min=0))

    @torch.inference_mode()
    def sample_scratch(self, num_rows: int) -> None:
        """Runs every sampling kernel on rows of meaningless logits."""
        info, device = self.info, self._last_tokens.device
        dtype: torch.dtype = getattr(torch, info.dtype)
        logits = torch.zeros((num_rows, info.vocab_size), dtype=dtype, device=device)
        rows, one = np.zeros(num_rows, np.int64), bytes(4)
        words = -(-info.vocab_size // 32)
        masked = SampleStep(masked=rows[:1], token_masks=np.full((1, words), -1, np.int32))
        for params in _WARM_UP_PARAMS:
            self.sampler.start_row(RowSampling(0, params, 0, one, one))
            for step in (SampleStep(), masked):
                self._staging.begin()
                inputs = self.sampler.prepare(rows, rows, self._staging, step)
                self._staging.upload()
                assert isinstance(inputs, SamplingInputs)
                sampled = self.sampler.sample(logits, inputs)
                DevicePendingStep(self.readback.tokens(sampled, inputs)).result()
        self.sampler.start_row(RowSampling(0, SamplingParams(), 0))
        self._staging.begin()
        inputs = self.sampler.prepare(rows[:1], rows[:1], self._staging, masked)
        self._staging.upload()
        assert isinstance(inputs, MaskedRows)
        token_ids = self._model.ops.greedy(logits)
        # The tokens are meaningless, and the next sequence of the row does not read them.
        self._model.ops.greedy_masked(logits, inputs, token_ids, self._last_tokens)


@dataclass(frozen=True, slots=True)
class _LateSampling:
    """The sampling of a step whose last `num_late` token masks arrive while it is computed.

    Attributes:
        runner: the runner that launched the step.
        masks: the masks of the step on their way to the device.
        computed: the step's logits.
        sampling: the inputs of the sampler.
        num_known: number of masks that came with the step; late masks stand behind them.
        num_late: number of late masks.
    """

    runner: ModelRunner
    masks: MaskBuffer
    computed: Computed
    sampling: Sampling
    num_known: int
    num_late: int

    def put(self, index: int, mask: Int32Array) -> None:
        self.masks.put(self.num_known + index, mask)

    @torch.inference_mode()
    def launch(self) -> HostTokens:
        self.masks.upload(self.num_known + self.num_late)
        return self.runner.sample(self.computed, self.sampling)
