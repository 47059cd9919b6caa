"""The half of a step that one rank runs: tokens of logits, log-probabilities, copies to the host.

`ModelRunner` stages a `SampleStep` behind the half that computes (`step_computer`), and samples
what that gave.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.rows import DeviceRows
from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.decoder.engine.messages import EngineInfo, SamplingParams
from services.decoder.engine.pending_step import DevicePendingStep, HostTokens, Readback
from services.decoder.engine.sampler import Sampled, Sampler
from services.decoder.engine.staging import Staging
from services.decoder.engine.step import ComputeStep, Int32Array, RowSampling, SampleStep, Step
from services.decoder.engine.step_computer import Computed
from services.decoder.models.transformer import Transformer

# Together, they run every branch of the sampler.
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, top_logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
)


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


class StepSampler:
    """Owner of the rows' sampling parameters, and of the way back to the host.

    Args:
        model: its head, for tokens of prompts, and its operations.
        rows: of the device; the last tokens are written.
        staging: of the half that computes.
        extras: late masks, and scores of prompts.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Transformer,
        rows: DeviceRows,
        staging: Staging,
        dtype: torch.dtype,
        extras: Extras,
    ) -> None:
        device = rows.blocks.device
        self._info = info
        self._model = model
        self._last_tokens = rows.last_tokens
        self._staging = staging
        self._dtype = dtype
        self._sampler = Sampler(info.max_num_sequences, info.vocab_size, device, model.ops)
        self._masks, self._score_prompt = extras
        self._readback = Readback(info.max_num_sequences, device)

    def start_rows(self, starts: list[RowSampling]) -> None:
        """Gives rows to other sequences. Until the step before is sampled, they are the last
        ones'.
        """
        for start in starts:
            self._sampler.start_row(start)

    def stage(self, step: SampleStep, compute: ComputeStep) -> SamplingInputs | MaskedRows | None:
        """Adds a step's arrays to the staging buffer; returns what `Sampler.prepare` does."""
        rows, ends, samples = compute.rows, compute.starts + compute.lengths, compute.samples
        if len(samples) < len(rows):
            rows, ends = rows[samples], ends[samples]
        late_masks = None
        if len(step.late):
            late_masks = self._masks.device(len(step.masked) + len(step.late))
        return self._sampler.prepare(rows, ends, self._staging, step, late_masks)

    def begin_masks(self, token_masks: Int32Array) -> None:
        """To be called before a step with late masks is computed: all are uploaded beside it."""
        self._masks.begin()
        for index, mask in enumerate(token_masks):
            self._masks.put(index, mask)

    def sample(
        self, step: Step, computed: Computed, sampling: SamplingInputs | MaskedRows | None
    ) -> DevicePendingStep:
        """Launches the sampling of a computed step, or leaves it to the pending step if masks are
        late.
        """
        scores = self._score(step, computed.hidden) if len(step.compute.scored) else []
        if computed.logits is None:
            # The step still reads the arena, which may be reused once its result is there.
            return DevicePendingStep(self._readback.tokens(None), scores)
        late, masks = step.sample.late, step.sample.token_masks
        if len(late) == 0:
            return DevicePendingStep(self._sample(computed, sampling), scores)
        first, count = len(masks), len(masks) + len(late)
        return DevicePendingStep(
            None,
            scores,
            put=lambda index, mask: self._masks.put(first + index, mask),
            launch=partial(self._sample_late, computed, sampling, count),
            computed=self._readback.mark(),
        )

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
                self._model.logits, min(most, self._info.vocab_size), self._info.max_num_sequences,
            )  # fmt: skip
            runs.append(tuple(map(self._readback.copy, found)))
        return runs

    @torch.inference_mode()
    def _sample_late(
        self, computed: Computed, sampling: SamplingInputs | MaskedRows | None, num_masks: int
    ) -> HostTokens:
        """`_sample` of a step whose masks are all there."""
        self._masks.upload(num_masks)
        return self._sample(computed, sampling)

    def _sample(
        self, computed: Computed, sampling: SamplingInputs | MaskedRows | None
    ) -> HostTokens:
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
        logits = torch.zeros(
            (num_rows, self._info.vocab_size), dtype=self._dtype, device=self._last_tokens.device
        )
        rows, one = np.zeros(num_rows, np.int64), bytes(4)
        words = -(-self._info.vocab_size // 32)
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
