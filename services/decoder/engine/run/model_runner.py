"""The model runner turns steps into sampled tokens. It is the only owner of its device.

The engine calls it with a `Step`, and handles the exceptions that it raises. `StepComputer` does
the part of a step that every rank has: from token ids to logits. The runner does the part of rank 0
alone: it samples tokens from the logits, and copies tokens and log-probabilities to the host.
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

# Together, these parameters run every branch of the sampler.
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, top_logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
)

# What `Sampler.prepare` returns: for greedy sampling `MaskedRows`, and None without token masks.
Sampling = SamplingInputs | MaskedRows | None


class ModelRunner:
    """The `Runner` of a model. Not thread-safe.

    On a GPU, `execute` never waits for the device: it writes the step's arrays into one staging
    buffer, uploads the buffer, launches kernels, and starts one copy of the results to the host.
    All steps run on one CUDA stream, in order, so step n + 1 finds the tokens of step n in the
    rows.

    Args:
        computer: the part of the runner that every rank has.
        num_sampled: number of rows that may be sampled. Defaults to all rows.

    Attributes:
        info: the engine's limits.
        sampler: samples tokens from logits.
        readback: copies results to the host.
    """

    def __init__(self, computer: StepComputer, num_sampled: int | None = None) -> None:
        info, model, rows = computer.info, computer.model, computer.state.rows
        device = rows.blocks.device
        num_sampled = info.max_num_sequences if num_sampled is None else num_sampled
        self.info, self.computer = info, computer
        self.sampler = Sampler(num_sampled, info.vocab_size, device, model.ops)
        self.readback = Readback(info.max_num_sequences, device)
        self._model, self._staging = model, computer.staging
        self._last_tokens = rows.last_tokens
        self._masks = MaskBuffer(num_sampled, info.vocab_size, device)
        self._prepared: tuple[Step, StepInputs, Sampling] | None = None

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Number of kernel calls by "operation=implementation", including calls in graphs."""
        calls = self._model.ops.table.calls()
        return {f"{operation}={name}": count for (operation, name), count in calls.items()}

    def load_adapter(self, slot: int, directory: str) -> None:
        """Loads an adapter, or empties its slot; see `StepComputer.load_adapter`."""
        self.computer.load_adapter(slot, directory)

    @torch.inference_mode()
    def prepare(self, step: Step) -> None:
        """Writes the arrays of a step into the staging buffer ahead of time; see `Runner`.

        A step that gives a row to another sequence is not written ahead of time. Its arrays would
        replace the sampling parameters of the row, which the step before may still need.
        """
        if not step.sample.row_starts:
            self._prepared = self._stage(step)

    @torch.inference_mode()
    def execute(self, step: Step) -> DevicePendingStep:
        """Launches a step; see `Runner`. Its sampling is launched here, too, unless token
        masks are late: then `DevicePendingStep.sample` launches the sampling.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not step:
            prepared = self._stage(step)
        _, inputs, sampling = prepared
        late, masks = step.sample.late, step.sample.token_masks
        if len(late):  # All masks are uploaded together, when the late masks have arrived.
            self._masks.begin()
            for index, mask in enumerate(masks):
                self._masks.put(index, mask)
        computed = self.computer.run(step.compute, inputs)
        scores = self._score(step, computed) if len(step.compute.scored) else []
        if computed.logits is None:
            # No token is sampled. The engine waits for a result all the same, because the memory of
            # the step's images must not be reused before the step is done.
            return DevicePendingStep(self.readback.tokens(None), scores)
        if len(late) == 0:
            return DevicePendingStep(self.sample(computed, sampling), scores)
        waiting = _LateSampling(self, self._masks, computed, sampling, len(masks), len(late))
        return DevicePendingStep(None, scores, late=waiting, computed=self.readback.mark())

    def _stage(self, step: Step) -> tuple[Step, StepInputs, Sampling]:
        """Writes all arrays of a step into the staging buffer, and stores the sampling parameters
        of rows that are given to other sequences.
        """
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

    def _score(self, step: Step, computed: Computed) -> list[tuple[Tensor, ...]]:
        """Computes the logprobs of the prompt tokens in `ComputeStep.scored`, and starts to copy
        them to the host.
        """
        hidden, adapters = computed.hidden, computed.adapters
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
                None if adapters is None else adapters.piece(first, first + count),
            )
            runs.append(tuple(map(self.readback.copy, found)))
        return runs

    def sample(self, computed: Computed, sampling: Sampling) -> HostTokens:
        """Samples tokens, stores them in their rows, and starts to copy them to the host."""
        _, logits, token_ids, rows, _ = computed
        assert logits is not None and rows is not None
        if isinstance(sampling, SamplingInputs):
            sampled = self.sampler.sample(logits, sampling)
            self._keep(rows, sampled.token_ids)
            return self._read(sampled, sampling)
        if token_ids is None:  # The step did not run as a CUDA graph, which would have sampled.
            token_ids = self._model.ops.greedy(logits)
            self._keep(rows, token_ids)
        if sampling is not None:  # Rows with a mask are sampled again, under their masks.
            self._model.ops.greedy_masked(logits, sampling, token_ids, self._last_tokens)
        return self._read(Sampled(token_ids, None), None)

    def _read(self, sampled: Sampled, sampling: SamplingInputs | None) -> HostTokens:
        """Starts to copy sampled tokens to the host."""
        return self.readback.tokens(sampled, sampling)

    def _keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """Writes a step's tokens into the rows, where the next step reads them."""
        rows = rows[: len(token_ids)]  # without padding
        # The id of a row whose sampling has failed is negative. The row may take part in the next
        # step, which needs a valid id.
        self._last_tokens.index_copy_(0, rows, token_ids.clamp(min=0))

    @torch.inference_mode()
    def sample_scratch(self, num_rows: int) -> None:
        """Runs every sampling kernel once on meaningless logits, as a warm-up."""
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
        # This writes meaningless tokens into the rows. The first step of a row's next sequence is a
        # prefill, which does not read them.
        self._model.ops.greedy_masked(logits, inputs, token_ids, self._last_tokens)


@dataclass(frozen=True, slots=True)
class _LateSampling:
    """The sampling of a step with late token masks, which `DevicePendingStep` launches.

    Attributes:
        runner: the runner that launched the step.
        masks: buffer for the masks of the step.
        computed: the step's logits.
        sampling: the inputs of the sampler.
        num_known: number of masks that came with the step. They precede the late ones in `masks`.
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
