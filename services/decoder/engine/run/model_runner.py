"""The model runner: steps in, sampled tokens out. The only owner of its device.

The engine calls it, with nothing but a `Step`. An exception of the device is the engine's to
handle. `StepComputer` is the half of a step that every rank has; here is the half of the one rank
that samples: tokens of logits, log-probabilities, copies to the host.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.common.nn.collectives import ALONE, Ranks
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine.messages import EngineInfo, SamplingParams
from services.decoder.engine.run.graphs import DeviceState
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.pending_step import DevicePendingStep, HostTokens, Readback
from services.decoder.engine.run.sampler import Sampled, Sampler
from services.decoder.engine.run.step_computer import Computed, StepComputer
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import Int32Array, RowSampling, SampleStep, Step
from services.decoder.models.transformer import Transformer

# Together, they run every branch of the sampler.
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, top_logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
)

Sampling = SamplingInputs | MaskedRows | None  # what `Sampler.prepare` returns


class LateMasks(Protocol):
    """Token masks on their way to the device, of one step after the other."""

    def device(self, count: int) -> Tensor:
        """`[count, ceil(vocab_size / 32)]` int32, which the next `upload` fills."""
        ...

    def begin(self) -> None:
        """Starts on the next step's masks. To be called when the step of the last ones was sampled,
        and before the one that reads these is launched.
        """
        ...

    def put(self, index: int, mask: Int32Array) -> None:
        """Copies one of the step's masks."""
        ...

    def upload(self, count: int) -> None:
        """Enqueues the copy of the first `count` masks before what is launched next."""
        ...


class Extras(NamedTuple):
    """What of sampling is not the core's."""

    masks: LateMasks
    score_prompt: Callable[..., tuple[Tensor, ...]]  # see `prompt_scores`


class ModelRunner:
    """The `step.Runner` of a model. Not thread-safe.

    Nothing in `execute` waits for the device: a step is arrays on the host, one upload, launches,
    and one copy back. All steps run on one stream, so that step n + 1 finds the tokens of step n in
    the rows.

    Attributes:
        computer: the half of a step that every rank has.
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
        device = state.rows.blocks.device
        self.info = info
        self.computer = StepComputer(info, model, backend, state, images, ranks)
        self._model = model
        self._last_tokens = state.rows.last_tokens
        self._staging = self.computer.staging
        self._sampler = Sampler(info.max_num_sequences, info.vocab_size, device, model.ops)
        self._masks, self._score_prompt = extras
        self._readback = Readback(info.max_num_sequences, device)
        self._prepared: tuple[Step, StepInputs, Sampling] | None = None

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Calls so far by "operation=implementation", replayed ones included."""
        calls = self._model.ops.table.calls()
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
        """Launches a step; see `step.Runner`. One with late masks is sampled by what it returns."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not step:
            prepared = self._stage(step)
        _, inputs, sampling = prepared
        late, masks = step.sample.late, step.sample.token_masks
        if len(late):  # all are uploaded beside the step
            self._masks.begin()
            for index, mask in enumerate(masks):
                self._masks.put(index, mask)
        computed = self.computer.run(step.compute, inputs)
        scores = self._score(step, computed.hidden) if len(step.compute.scored) else []
        if computed.logits is None:
            # The step still reads the arena, which may be reused once its result is there.
            return DevicePendingStep(self._readback.tokens(None), scores)
        if len(late) == 0:
            return DevicePendingStep(self._sample(computed, sampling), scores)
        first = len(masks)
        return DevicePendingStep(
            None,
            scores,
            put=lambda index, mask: self._masks.put(first + index, mask),
            launch=partial(self._sample_late, computed, sampling, first + len(late)),
            computed=self._readback.mark(),
        )

    def _stage(self, step: Step) -> tuple[Step, StepInputs, Sampling]:
        """Gives rows to other sequences, and puts both halves' arrays into the staging buffer."""
        for start in step.sample.row_starts:
            self._sampler.start_row(start)
        compute, late_masks = step.compute, None
        inputs = self.computer.stage(compute)
        rows, ends, samples = compute.rows, compute.starts + compute.lengths, compute.samples
        if len(samples) < len(rows):
            rows, ends = rows[samples], ends[samples]
        if len(step.sample.late):
            late_masks = self._masks.device(len(step.sample.masked) + len(step.sample.late))
        prepared = self._sampler.prepare(rows, ends, self._staging, step.sample, late_masks)
        return step, inputs, prepared

    def _score(self, step: Step, hidden: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Logprobs of the prompt tokens that a step names, on their way to the host."""
        assert hidden is not None
        runs: list[tuple[Tensor, ...]] = []
        taken = 0
        for first, count, most in step.compute.scored.tolist():
            ids = step.sample.followers[taken : taken + count]
            followers = torch.from_numpy(ids.astype(np.int64))
            taken += count
            found = self._score_prompt(
                hidden[first : first + count], self._sampler.upload(followers),
                self._model.logits, min(most, self.info.vocab_size), self.info.max_num_sequences,
            )  # fmt: skip
            runs.append(tuple(map(self._readback.copy, found)))
        return runs

    @torch.inference_mode()
    def _sample_late(self, computed: Computed, sampling: Sampling, num_masks: int) -> HostTokens:
        """`_sample` of a step whose masks are all there."""
        self._masks.upload(num_masks)
        return self._sample(computed, sampling)

    def _sample(self, computed: Computed, sampling: Sampling) -> HostTokens:
        """Samples tokens, keeps them for the next step, copies them to the host."""
        _, logits, token_ids, rows = computed
        assert logits is not None and rows is not None
        if isinstance(sampling, SamplingInputs):
            sampled = self._sampler.sample(logits, sampling)
            self._keep(rows, sampled.token_ids)
            return self._readback.tokens(sampled, sampling)
        if token_ids is None:
            token_ids = self._model.ops.greedy(logits)
            self._keep(rows, token_ids)
        if sampling is not None:
            self._model.ops.greedy_masked(logits, sampling, token_ids, self._last_tokens)
        return self._readback.tokens(Sampled(token_ids, None))

    def _keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """Writes a step's tokens where the next step reads them."""
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
            self._sampler.start_row(RowSampling(0, params, 0, one, one))
            for step in (SampleStep(), masked):
                self._staging.begin()
                inputs = self._sampler.prepare(rows, rows, self._staging, step)
                self._staging.upload()
                assert isinstance(inputs, SamplingInputs)
                sampled = self._sampler.sample(logits, inputs)
                DevicePendingStep(self._readback.tokens(sampled, inputs)).result()
        self._sampler.start_row(RowSampling(0, SamplingParams(), 0))
        self._staging.begin()
        inputs = self._sampler.prepare(rows[:1], rows[:1], self._staging, masked)
        self._staging.upload()
        assert isinstance(inputs, MaskedRows)
        token_ids = self._model.ops.greedy(logits)
        # Of meaningless tokens, which the row's next sequence does not read.
        self._model.ops.greedy_masked(logits, inputs, token_ids, self._last_tokens)
