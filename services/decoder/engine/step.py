"""The runner's contract: a step of plain arrays goes in, sampled tokens come out.

A `Step` holds numpy arrays, integers and sampling parameters, and no live object, so another
process can execute it. Every rank computes the `ComputeStep`, which is sent to the ranks as bytes.
One rank samples, as the `SampleStep` says.

Steps are planned one ahead of sampling: when step n + 1 is planned, the tokens of step n are still
on the device. Therefore a step never needs the id of a sampled token. A decode says only "the token
that this row sampled last", which the runner keeps on the device, one per row.
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
    """Returns a field whose default is an array without elements, of shape `[0]` or `shape`."""
    array = np.empty(shape or 0, dtype)
    return msgspec.field(default_factory=lambda: array)


def _array_out(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_in(_kind: type, value: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - msgspec's
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_out)


class RowStart(msgspec.Struct, array_like=True, frozen=True):
    """The start of a sequence in a row, from this step on.

    Attributes:
        row: row number, 0 .. max_num_sequences - 1.
        sequence_id: id of the sequence, for logs and tests.
        position_delta: a completion token at index j of the sequence has position
            j + position_delta on each axis.
        checkpoint: slot whose recurrent state becomes the row's state; -1 if the sequence is
            computed from its first token on, so that the row begins without a state.
    """

    row: int
    sequence_id: int
    position_delta: int
    checkpoint: int = -1


class RowSampling(msgspec.Struct, frozen=True):
    """The sampling parameters of a row from this step on.

    Attributes:
        row: row number, as in the same step's `RowStart`.
        params: sampling parameters of the sequence.
        num_prompt_tokens: length of the prompt. The sampler derives the number of completion tokens
            from it, for `min_tokens` and for the random numbers of a seed.
        prompt_token_ids, completion_token_ids: int32 ids of the tokens that penalties count; empty
            if there are no penalties.
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""
    completion_token_ids: bytes = b""


class ComputeStep(msgspec.Struct, array_like=True):
    """The part of a step that each rank computes.

    The step has S chunks with T tokens together. A chunk is one sequence's part of the step: the
    sequence's tokens [start, start + length) are computed. B of the chunks reach the last token of
    their sequence, so that the next token is sampled. Chunks that take a token from the device come
    first, then other chunks of a single token, then longer chunks.

    Attributes:
        rows: `[S]`, row of each chunk.
        starts: `[S]`, number of tokens of each chunk's sequence whose keys and values are in the
            cache already. Where steps may yield several tokens, the number for a chunk from the
            device is an upper bound, and the device knows the right one.
        lengths: `[S]`, number of tokens to compute of each chunk, at least 1.
        num_from_device: number of the leading chunks whose one input token is the row's last
            sampled token.
        samples: `[B]`, indices of the chunks that reach the last token of their sequence. Their
            logits are computed.
        token_ids: `[K]`, token ids of the chunks that are not from the device, chunk after chunk.
        positions: `[3, K]`, positions of the same tokens. The positions of tokens from the device
            follow from the row's position delta.
        limits: `[B]`, the most tokens that the step may yield for each sampling chunk, whose row
            has blocks for start + length - 1 + limit tokens. None if each limit is 1.
        block_updates: `[U, 3]`, additions to block tables before the step runs: row, index of the
            first new entry, number of new entries.
        block_ids: the new entries of all U additions, one addition after the other.
        row_starts: rows that other sequences get before the step runs.
        images: `[I, 5]`, runs of image tokens in the order of the step: index in the step of the
            run's first token, number of tokens of the run, byte offset of the embedding in the
            arena, number of tokens of the image, index in the image of the run's first token.
        state_saves: `[C, 2]`, recurrent states to save: index in the step of the token after which
            the state is saved, slot of the checkpoint. None if no state is saved.
        scored: `[P, 3]`, runs of prompt tokens whose followers' logprobs are wanted: index in the
            step of the run's first token, number n of tokens, number of alternatives.
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
        """Number T of tokens in the step."""
        return self.num_from_device + len(self.token_ids)

    @property
    def keeps_hidden(self) -> bool:
        """True if the hidden states of all tokens are kept, not only of the tokens that sample."""
        return len(self.scored) > 0

    def to_bytes(self) -> bytes:
        """Returns the step as MessagePack, with arrays as type, shape and bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads the result of `to_bytes`; the arrays are read-only."""
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_array_in)


class SampleStep(msgspec.Struct):
    """The part of a step that one rank does: sampling from the logits of `ComputeStep.samples`.

    Attributes:
        row_starts: sampling parameters of the rows of `ComputeStep.row_starts`.
        masked: `[M]`, samples that have a token mask, as indices into the B samples.
        token_masks: `[M, ceil(vocab_size / 32)]` int32; bit i of word w allows token 32 * w + i.
        late: `[L]`, further samples, whose token masks have not arrived yet. If there are any, the
            step is computed at once and sampled only when `PendingStep.sample` is called.
        followers: the tokens that follow the runs of `ComputeStep.scored`, run after run.
    """

    row_starts: list[RowSampling] = []
    masked: Int64Array = _empty(np.int64)
    token_masks: Int32Array = _empty(np.int32, 0, 0)
    late: Int64Array = _empty(np.int64)
    followers: Int32Array = _empty(np.int32)


class Step(NamedTuple):
    """A step: `compute` is run by every rank, and `sample` by one rank."""

    compute: ComputeStep
    sample: SampleStep


class Scores(NamedTuple):
    """Logprobs of the n followers of a run, and of the m most likely tokens at each place."""

    logprobs: FloatArray  # [n] float32, from the raw logits
    ranks: Int32Array  # [n], rank of each follower; 1 is the most likely token
    top_ids: Int32Array  # [n, m]
    top: FloatArray  # [n, m] float32


class StepOutput(NamedTuple):
    """The tokens that a step yielded for its B samples, in their order.

    A runner with `info.max_tokens_per_step` k = 1 yields exactly one token for each sample. A
    runner with a larger k yields between 1 and `ComputeStep.limits` tokens, and has computed the
    keys and values of all of them but the last. So in both cases only the sequence's last token
    lacks keys and values. The next step may be launched before the host knows the number. A
    sequence that failed has one id, which is `NOT_FINITE` or `ALL_MASKED` of `kernels.sampling`.
    """

    token_ids: Int32Array  # [B, k]; the first num_tokens of each row are valid
    num_tokens: Int32Array  # [B]
    logprobs: dict[int, list[Logprobs]]  # by sample, one per token; for rows that request them
    scores: Sequence[Scores] = ()  # one for each of the P runs


class PendingStep(Protocol):
    """A step that was launched."""

    def is_computed(self) -> bool:
        """Returns whether a step with late masks is computed and could be sampled."""
        ...

    def put_mask(self, index: int, mask: Int32Array) -> None:
        """Copies the mask of `SampleStep.late[index]`; a later copy replaces an earlier one."""
        ...

    def sample(self) -> None:
        """Launches the sampling of a step with late masks, after `put_mask` for each of them.

        The call has to come before the next step is executed.
        """
        ...

    def result(self) -> StepOutput:
        """Waits for the step's tokens, which are copied to the host without stopping the device."""
        ...


class Runner(Protocol):
    """The only owner of a device."""

    @property
    def info(self) -> EngineInfo:
        """Sizes and names of the runner, which never change."""
        ...

    def prepare(self, step: Step) -> None:
        """Prepares a step on the host while the step before it waits to be sampled.

        The next call of `execute` may be for this step or for another.
        """
        ...

    def execute(self, step: Step) -> PendingStep:
        """Launches one step and returns without waiting for the device.

        If the call raises, part of the step may have run. The rows of the step's chunks are then
        undefined, so their sequences have to start again. Row starts and block updates of rows
        without a chunk may be lost, too, so a later step has to repeat them.
        """
        ...
