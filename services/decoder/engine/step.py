"""The runner's contract: a step of plain arrays in, sampled tokens out.

A `Step` holds numpy arrays, integers and sampling parameters, and no live object: it can be
executed in another process. Every rank computes its `ComputeStep`, which is sent as bytes; one of
them samples, by its `SampleStep`.

Steps are planned one ahead of sampling: when step n + 1 is planned, the tokens of step n are still
on the device. So a step never needs a sampled token's id. A decode says only "the token that this
row sampled last", which the runner keeps on the device, one per row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import EngineInfo, Logprobs, SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def _empty(dtype: type, *shape: int) -> Any:  # noqa: ANN401 - a field
    """A field whose default is an array without elements, `[0]` or of that shape."""
    array = np.empty(shape or 0, dtype)
    return msgspec.field(default_factory=lambda: array)


def _array_out(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_in(_kind: type, value: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - msgspec's
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_out)


class RowStart(msgspec.Struct, array_like=True, frozen=True):
    """A row is given to a sequence, from this step on.

    Attributes:
        row: 0 .. max_num_sequences - 1.
        sequence_id: for logs and tests.
        position_delta: token i of the completion, at index j of the sequence, has position
            j + position_delta on each axis.
        checkpoint: slot of the recurrent state that is copied to the row's; -1: none, the row's
            first token has index 0.
    """

    row: int
    sequence_id: int
    position_delta: int
    checkpoint: int = -1


class RowSampling(msgspec.Struct, frozen=True):
    """How the tokens of a row that is given to a sequence are sampled.

    Attributes:
        row: of the same step's `RowStart`.
        num_prompt_tokens: tokens behind them are the completion's: their number counts min_tokens
            and selects the seeded random numbers.
        prompt_token_ids, completion_token_ids: int32, the tokens that penalties count; empty
            without penalties.
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""
    completion_token_ids: bytes = b""


class ComputeStep(msgspec.Struct, array_like=True):
    """What each rank computes: S chunks of T tokens, of which B reach their sequence's last token.

    A chunk is one sequence's part of the step: its tokens [start, start + length) are computed.
    Chunks that take their one token from the device come first, then other chunks of one token,
    then longer ones.

    Attributes:
        rows: `[S]`, each chunk's row.
        starts: `[S]`, tokens whose keys and values are in the cache already. Of chunks from the
            device it is the most that there may be, if steps may yield several: the device knows.
        lengths: `[S]`, tokens to compute now, at least 1.
        num_from_device: the first chunks, whose one input token is the row's last sampled one.
        samples: `[B]`, the chunks that reach the last token of their sequence, whose logits are
            computed.
        token_ids: `[K]`, the tokens of all other chunks, one chunk after the other.
        positions: `[3, K]`, of the same tokens; the others' follow from the row's position delta.
        limits: `[B]`, the most tokens that the step may yield for the sequence: the row's blocks
            cover start + length - 1 + limit tokens. None: one each.
        block_updates: `[U, 3]`, rows whose block tables get entries before the step runs: the row,
            the index of the first entry, and their number.
        block_ids: the entries of all U, one after the other.
        row_starts: rows that are given to other sequences before the step runs.
        images: `[I, 5]`, runs of image tokens: the first one's index in the step, their number,
            the embedding's byte offset in the arena, the image's number of tokens, and the index
            of the run's first one among them. By index in the step.
        state_saves: `[C, 2]`, tokens after which recurrent states are kept: the index in the step,
            and the slot of a checkpoint. None: there are none.
        scored: `[P, 3]`, runs of prompt tokens whose followers' logprobs are wanted: the index in
            the step of the first, their number n, and the number of alternatives.
    """

    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    num_from_device: int
    samples: Int64Array
    token_ids: Int32Array = _empty(np.int32)
    positions: Int32Array = _empty(np.int32, 3, 0)
    limits: Int64Array | None = None
    block_updates: Int64Array = _empty(np.int64, 0, 3)
    block_ids: Int32Array = _empty(np.int32)
    row_starts: list[RowStart] = []
    images: Int64Array = _empty(np.int64, 0, 5)
    state_saves: Int64Array | None = None
    scored: Int64Array = _empty(np.int64, 0, 3)

    @property
    def num_tokens(self) -> int:
        return self.num_from_device + len(self.token_ids)

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states of all tokens are kept, not those alone that sample."""
        return len(self.scored) > 0

    def to_bytes(self) -> bytes:
        """One buffer: MessagePack; arrays as type, shape and bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads `to_bytes`; arrays are read-only."""
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_array_in)


class SampleStep(msgspec.Struct):
    """What the rank that samples does with the logits of the B chunks of `ComputeStep.samples`.

    Attributes:
        row_starts: of the rows of `ComputeStep.row_starts`.
        masked: `[M]`, the samples (indices into B) that have a token mask.
        token_masks: `[M, ceil(vocab_size / 32)]` int32: bit i of word w allows token 32 * w + i.
        late: `[L]`, further samples (indices into B) that have a mask, which is not there yet. If
            there are any, the step is computed and not sampled before `PendingStep.sample`.
        followers: the tokens that follow those of `ComputeStep.scored`, of all P, one run after the
            other.
    """

    row_starts: list[RowSampling] = []
    masked: Int64Array = _empty(np.int64)
    token_masks: Int32Array = _empty(np.int32, 0, 0)
    late: Int64Array = _empty(np.int64)
    followers: Int32Array = _empty(np.int32)


class Step(NamedTuple):
    """One step: what every rank computes, and what one of them samples."""

    compute: ComputeStep
    sample: SampleStep


class Scores(NamedTuple):
    """Logprobs of the n followers of a run, and of the m most likely tokens in their places."""

    logprobs: FloatArray  # [n] float32, from the raw logits
    ranks: Int32Array  # [n], 1: the most likely
    top_ids: Int32Array  # [n, m]
    top: FloatArray  # [n, m] float32


class StepOutput(NamedTuple):
    """What a step yielded for its B samples, in their order.

    A runner whose `info.max_tokens_per_step` k is 1 yields exactly one token for each. Any other
    yields 1 to `ComputeStep.limits`, at most k, and has computed keys and values of all of them but
    the last; of the sequence's tokens, exactly the last is then without. The next step may be
    launched before it is known how many there are. A failed sequence has one id, `NOT_FINITE` or
    `ALL_MASKED` of `kernels.sampling`.
    """

    token_ids: Int32Array  # [B, k]; of each row, the first num_tokens count
    num_tokens: Int32Array  # [B]
    logprobs: dict[int, list[Logprobs]]  # by index into B, one per token; of rows that request them
    scores: Sequence[Scores] = ()  # of each of the P runs


class PendingStep(Protocol):
    """A step that was launched."""

    def is_computed(self) -> bool:
        """Whether the device has nothing left to do but to sample; for a step with late masks."""
        ...

    def put_mask(self, index: int, mask: Int32Array) -> None:
        """Copies the mask of one of `SampleStep.late`; the last one of each counts."""
        ...

    def sample(self) -> None:
        """Launches the sampling of a step with late masks, all of which were put; before the next
        step is executed.
        """
        ...

    def result(self) -> StepOutput:
        """Waits for the step's ids, which are copied to the host without stopping the device."""
        ...


class Runner(Protocol):
    """The only owner of a device."""

    @property
    def info(self) -> EngineInfo:
        """Sizes and names; constant."""
        ...

    def prepare(self, step: Step) -> None:
        """Does what can be done of a step on the host before the one before it is sampled. It may
        be executed next, or another one instead.
        """
        ...

    def execute(self, step: Step) -> PendingStep:
        """Launches one step and returns without waiting for the device.

        A step that raised may have computed and sampled: the rows of its chunks are undefined and
        start again. Updates of other rows and their block tables are sent again.
        """
        ...
