"""The `PendingStep` of a device: a launched step whose results are copied to pinned memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingInputs
from services.decoder.engine.messages import Logprobs
from services.decoder.engine.run.sampler import Sampled, SampledLogprobs
from services.decoder.engine.step import Int32Array, Scores, StepOutput

_NO_TOKENS = torch.empty(0, dtype=torch.int32)


class HostTokens:
    """The tokens that a step sampled, on their way to the host.

    Args:
        token_ids: `[B]` int32 on the host, valid once the buffer's event has happened.
        logprobs: log-probabilities on the host, likewise. None if no row wants any.
        sampling: the rows that want log-probabilities. None if no row does.
        buffer: the pinned buffer under `token_ids`, which goes back to its pool when it was read.
            None on a CPU, where there is nothing to wait for.
        vectors: `[B, n]` float32, likewise, the results of a model for search. None if the step
            samples.

    Attributes:
        drafts: the model's own drafts, which are launched behind the copy of the tokens and have an
            event of their own, so that the host reads the tokens meanwhile. None if the model
            drafts nothing.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: SampledLogprobs | None,
        sampling: SamplingInputs | None,
        buffer: "PinnedBuffer | None" = None,
        vectors: Tensor | None = None,
    ) -> None:
        self.vectors = vectors
        self.drafts: HostDrafts | None = None
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._sampling = sampling
        self._buffer = buffer

    def is_there(self) -> bool:
        """Returns whether the copies have arrived, so that `wait` would not wait."""
        return self._buffer is None or self._buffer.copied.query()

    def wait(self) -> tuple[Int32Array, dict[int, list[Logprobs]]]:
        """Waits for the copies, and returns ids `[B]` and `StepOutput.logprobs`; called once."""
        token_ids = self._token_ids.numpy()
        if self._buffer is not None:
            self._buffer.copied.synchronize()
            token_ids = token_ids.copy()
            self._buffer.pool.append(self._buffer)
        return token_ids, _logprobs(self._logprobs, self._sampling)


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """The model's own drafts, on their way to the host.

    Attributes:
        drafts: `[G, n]` int32 on the host, valid once the event has happened.
        copied: event after the copy. None on a CPU, where there is nothing to wait for.
    """

    drafts: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> Int32Array:
        """Waits for the copy, and returns the drafts."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.drafts.numpy()


@dataclass(frozen=True, slots=True)
class PinnedBuffer:
    """Pinned memory for the token ids of one step.

    Attributes:
        ids: `[num_rows]` int32.
        copied: event after the copy of the ids.
        pool: the list of free buffers, to which the buffer goes back.
    """

    ids: Tensor
    copied: torch.cuda.Event
    pool: "list[PinnedBuffer]"


class Readback:
    """Copies to pinned memory that do not stop the device; on a CPU there is nothing to copy.

    Token ids have pinned buffers and events of their own, which are used again when their step was
    read. Other copies are rare: torch's allocator caches and reuses their memory.

    Args:
        num_rows: the most samples of a step.
        device: the device that the values are copied from.

    Attributes:
        free: buffers whose step was read.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._num_rows = num_rows
        self.free: list[PinnedBuffer] = []

    def tokens(
        self,
        sampled: Sampled | None,
        sampling: SamplingInputs | None = None,
        vectors: Tensor | None = None,
    ) -> HostTokens:
        """Starts the copy of a step's tokens, and of what is read together with them.

        Args:
            sampled: the sampled tokens on the device. None if the step samples nothing; the result
                then only says when the step is over.
            sampling: the rows that want log-probabilities. None if no row does.
            vectors: `[B, n]` float32 results of a model for search. None if the step samples.
        """
        token_ids = _NO_TOKENS if sampled is None else sampled.token_ids
        logprobs = None if sampled is None else sampled.logprobs
        if not self._cuda:
            return HostTokens(token_ids, logprobs, sampling, vectors=vectors)
        if vectors is not None:
            vectors = self.copy(vectors)
        if logprobs is not None:
            parts = (logprobs.chosen, logprobs.top_ids, logprobs.top)
            logprobs = SampledLogprobs(*map(self.copy, parts))
        buffer = self.free.pop() if self.free else self.new_buffer()
        ids = buffer.ids[: len(token_ids)]
        ids.copy_(token_ids, non_blocking=True)
        buffer.copied.record()
        return HostTokens(ids, logprobs, sampling, buffer, vectors)

    def drafts(self, drafts: Tensor) -> HostDrafts:
        """Starts the copy of the model's own drafts `[G, n]` int32."""
        copied = self.copy(drafts)
        return HostDrafts(copied, self.mark())

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event after everything launched so far, or None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(self, values: Tensor) -> Tensor:
        """Returns a tensor on the host, which is valid once the tokens of the same step are."""
        if not self._cuda:
            return values
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return target.copy_(values, non_blocking=True)

    def new_buffer(self) -> PinnedBuffer:
        """Allocates a buffer for one more step in flight."""
        ids = torch.empty(self._num_rows, dtype=torch.int32, pin_memory=True)
        return PinnedBuffer(ids, torch.cuda.Event(), self.free)


class LateSampling(Protocol):
    """The sampling of a launched step whose token masks arrive while the step is computed."""

    def put(self, index: int, mask: Int32Array) -> None:
        """Copies the mask of `SampleStep.late[index]`."""
        ...

    def launch(self) -> HostTokens:
        """Launches the sampling; the step's logits are valid until the next step is executed."""
        ...


@dataclass(slots=True)
class DevicePendingStep:
    """A launched step.

    Attributes:
        tokens: the sampled tokens. None if the step is not sampled yet, because token masks arrive
            while it is computed.
        scores: the parts of `Scores`, on the host when `tokens` are.
        late: the sampling that waits for token masks. None if the step was sampled at once.
        computed: event after the step's logits. None if they are there already.
    """

    tokens: HostTokens | None
    scores: Sequence[tuple[Tensor, ...]] = ()
    late: LateSampling | None = None
    computed: torch.cuda.Event | None = None
    _output: StepOutput | None = field(default=None, init=False)

    def is_computed(self) -> bool:
        return self.computed is None or self.computed.query()

    def is_done(self) -> bool:
        return self._output is not None or (self.tokens is not None and self.tokens.is_there())

    def put_mask(self, index: int, mask: Int32Array) -> None:
        assert self.late is not None
        self.late.put(index, mask)

    def sample(self) -> None:
        assert self.late is not None
        self.tokens = self.late.launch()

    def result(self) -> StepOutput:
        """Waits for the step's tokens and scores, and returns them."""
        if self._output is None:
            assert self.tokens is not None, "the step's masks have not arrived"
            ids, logprobs = self.tokens.wait()
            scores = [Scores(*(part.numpy() for part in found)) for found in self.scores]
            ones = np.ones(len(ids), np.int32)
            vectors = self.tokens.vectors
            pooled = None if vectors is None else vectors.numpy()
            self._output = StepOutput(ids[:, None], ones, logprobs, scores, pooled)
        return self._output

    def drafts(self) -> Int32Array | None:
        """Waits for the model's own drafts, and returns them; see `PendingStep`."""
        if self.tokens is None or self.tokens.drafts is None:
            return None
        return self.tokens.drafts.wait()


def _logprobs(
    found: SampledLogprobs | None, inputs: SamplingInputs | None
) -> dict[int, list[Logprobs]]:
    """Returns `StepOutput.logprobs`."""
    if found is None or inputs is None:
        return {}
    chosen, top_ids, top = found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist()
    named = inputs.logprob_ids
    num_ranked = len(top_ids[0]) - (0 if named is None else named.shape[1])
    logprobs: dict[int, list[Logprobs]] = {}
    for place, (index, count) in enumerate(
        zip(inputs.logprob_rows, inputs.logprob_counts, strict=True)
    ):
        ids, values = top_ids[place][:count], top[place][:count]
        if named is not None:
            wanted = inputs.logprob_named[place]
            for i in range(num_ranked, num_ranked + wanted):
                if top_ids[place][i] not in ids:
                    ids.append(top_ids[place][i])
                    values.append(top[place][i])
        logprobs[index] = [Logprobs(chosen[place], ids, values)]
    return logprobs
