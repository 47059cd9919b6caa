"""A step goes from the engine to the runner as arrays, and its sampled tokens come back.

A `Step` consists of numpy arrays, integers and sampling parameters, so it can be sent to another
process. With tensor parallelism, several ranks (processes with a GPU each) compute the model
together: each gets the `ComputeStep` as bytes. Rank 0 alone samples, as the `SampleStep` says.

Step n + 1 is planned and launched while the tokens of step n are still on the device, so a step
must not need the ids of tokens that were just sampled. For such a token, the step names only the
row. The runner keeps on the device, for each row, the token that was sampled last.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from services.decoder.engine.draft_counts import DraftCounts
from services.decoder.engine.messages import Logprobs, SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def _empty(dtype: type, *shape: int) -> Any:  # noqa: ANN401 - a field
    """Returns a field whose default is an array without elements. Its shape defaults to `[0]`."""
    array = np.empty(shape or 0, dtype)
    return msgspec.field(default_factory=lambda: array)


def _array_out(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_in(_kind: type, value: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - msgspec's
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_out)


class RowStart(msgspec.Struct, array_like=True, frozen=True):
    """Gives a row to a sequence, from this step on.

    Attributes:
        row: row number, 0 .. max_num_sequences - 1.
        sequence_id: id of the sequence, for logs and tests.
        position_delta: number that is added to the index of a completion token in the sequence to
            get its position on each axis.
        checkpoint: slot with the recurrent state from which the row starts; `-2 - slot` for a slot
            in the host's memory; -1 if the sequence is computed from its first token on.
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
        num_prompt_tokens: length of the prompt. The sampler subtracts it from the sequence's length
            to get the number of completion tokens, on which `min_tokens` and the random numbers
            of a seed depend.
        prompt_token_ids, completion_token_ids: int32 ids of the tokens so far, which penalties
            count. Empty if the parameters have no penalties.
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""
    completion_token_ids: bytes = b""


class ComputeStep(msgspec.Struct, array_like=True):
    """The part of a step that each rank computes.

    The step has S chunks with T tokens together. A chunk is one sequence's part of the step, or one
    token of that part if the sequence has drafts: tokens [start, start + length) are computed. B of
    the chunks have the last token of their sequence or a draft; a token is sampled for these. A
    chunk is *from the device* if it consists of the token that its row has sampled last, whose id
    the host did not have when it planned the step. These chunks come first. Other decodes follow,
    then prompts. K is the number of tokens of all chunks that are not from the device. The *place*
    of a token is its index among the T tokens.

    For example, a step with two decodes, in rows 3 and 0, and the first 3 tokens of a longer prompt
    in row 1 has S = 3, T = 5, B = 2, K = 3, rows `[3, 0, 1]`, lengths `[1, 1, 3]`,
    num_from_device 2 and samples `[0, 1]`.

    Attributes:
        rows: `[S]`, row of each chunk.
        starts: `[S]`, number of tokens of each chunk's sequence whose keys and values are in the
            cache already. If steps may yield several tokens, the number is an upper bound for a
            chunk from the device; the runner keeps the exact number on the device.
        lengths: `[S]`, number of tokens of each chunk, at least 1.
        num_from_device: number of chunks from the device, which come first.
        samples: `[B]`, indices of the chunks for which a token is sampled.
        token_ids: `[K]`, token ids of the chunks that are not from the device, chunk after chunk.
        positions: `[3, K]`, positions of the same tokens. The runner computes the positions of
            tokens from the device, with the position delta of their rows.
        limits: `[B]`, the most tokens that the step may yield for each chunk of `samples`. The
            chunk's row needs no block for the last of them, because only the next step computes
            its keys and values. None if each limit is 1.
        block_updates: `[U, 3]`, additions to block tables before the step runs: row, index of the
            first new entry, number of new entries.
        block_ids: the new entries of all U additions, one addition after the other.
        row_starts: rows that are given to other sequences before the step runs.
        images: `[I, 5]`, runs of image tokens in the order of the step: place of the run's first
            token, number of tokens of the run, byte offset of the embedding in the arena, number of
            tokens of the whole image, number of the image's tokens that precede the run.
        state_saves: `[C, 2]`, recurrent states to save: place of the token after which the state is
            saved, slot of the checkpoint. None if no state is saved.
        scored: `[P, 3]`, runs of prompt tokens. For each token of a run, the logprob of the token
            that follows it is wanted. The columns are: place of the run's first token, number n of
            tokens, number m of most likely tokens to report at each place.
        adapters: `[S]`, slot of the adapter of each chunk's sequence, -1 for none. None if no
            sequence of the step has an adapter.
        block_saves, checkpoint_saves: `[n, 2]`, KV blocks and checkpoints that are copied to the
            host before the step changes blocks: id, slot of the host. None if there are none.
        block_loads: `[n, 2]`, KV blocks that are then copied from the host: id, slot of the host.
        idle_block_saves, idle_checkpoint_saves: `[n, 2]`, KV blocks and checkpoints that the step
            does not change, and that are copied to the host beside its computation: id, slot of the
            host. None if there are none.
        has_drafts: True if sequences verify drafts. Each of these sequences has several chunks of
            one token, one after the other (`schedule.chunk`).
        folds: `[F, 2]`, accepted drafts by which the rows' recurrent states are advanced in this
            step: index of the row's first chunk, number of drafts. None if there are none.
        num_head_drafts: number of tokens that the model's draft head proposes after each sample.
        draft_sources: `[D, 3]`, drafts that the device still makes behind the step before: index of
            the chunk, row and column of its id among them. None if there are none.
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
    adapters: Int64Array | None = None
    block_saves: Int64Array | None = None
    block_loads: Int64Array | None = None
    checkpoint_saves: Int64Array | None = None
    idle_block_saves: Int64Array | None = None
    idle_checkpoint_saves: Int64Array | None = None
    has_drafts: bool = False
    folds: Int64Array | None = None
    num_head_drafts: int = 0
    draft_sources: Int64Array | None = None

    @property
    def num_tokens(self) -> int:
        """Number T of tokens in the step."""
        return self.num_from_device + len(self.token_ids)

    @property
    def keeps_hidden(self) -> bool:
        """True if the hidden states of all T tokens are needed, and not only those of the samples,
        because logprobs of prompt tokens are wanted.
        """
        return len(self.scored) > 0

    def to_bytes(self) -> bytes:
        """Returns the step as MessagePack, with arrays as type, shape and bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads the result of `to_bytes`; the arrays are read-only."""
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_array_in)


class SampleStep(msgspec.Struct):
    """The part of a step that rank 0 alone does: sampling from the logits of the B samples.

    Attributes:
        row_starts: sampling parameters of the rows of `ComputeStep.row_starts`.
        masked: `[M]`, the samples that have a token mask, as indices into the B samples.
        token_masks: `[M, ceil(vocab_size / 32)]` int32; bit i of word w allows token 32 * w + i.
        late: `[L]`, the samples whose token masks have not arrived yet, as indices into the B
            samples. If there are any, the step is computed at once, but it is sampled only when
            `PendingStep.sample` is called.
        followers: ids of the tokens that follow each token of the runs in `ComputeStep.scored`.
        draft_counts: the drafts that penalties count. None if no row with penalties has drafts.
    """

    row_starts: list[RowSampling] = []
    masked: Int64Array = _empty(np.int64)
    token_masks: Int32Array = _empty(np.int32, 0, 0)
    late: Int64Array = _empty(np.int64)
    followers: Int32Array = _empty(np.int32)
    draft_counts: DraftCounts | None = None


class Step(NamedTuple):
    """A step: `compute` is run by every rank, and `sample` by one rank."""

    compute: ComputeStep
    sample: SampleStep


class Scores(NamedTuple):
    """Logprobs for a run of `ComputeStep.scored`. Each of the run's n tokens has the logprob of the
    token that comes next in the prompt, and those of the m most likely next tokens.
    """

    logprobs: FloatArray  # [n] float32, of the tokens that follow, from the raw logits
    ranks: Int32Array  # [n], their ranks among all tokens; 1 is the most likely token
    top_ids: Int32Array  # [n, m]
    top: FloatArray  # [n, m] float32


class StepOutput(NamedTuple):
    """The tokens that a step has yielded for its B samples, in their order.

    If `EngineInfo.max_tokens_per_step` is 1, each sample has exactly one token. Otherwise it has
    between 1 and `ComputeStep.limits` tokens, and the keys and values of all of them but the last
    are in the cache. In both cases, the last token of a sequence is the only one without keys and
    values. If sampling has failed for a sequence, it has a single id, which is negative:
    `NOT_FINITE` or `ALL_MASKED` of `kernels.sampling`.
    """

    token_ids: Int32Array  # [B, k]; the first num_tokens of each row are valid
    num_tokens: Int32Array  # [B]
    logprobs: dict[int, list[Logprobs]]  # by sample, one per token; for rows that request them
    scores: Sequence[Scores] = ()  # one for each of the P runs
    vectors: FloatArray | None = None  # [B, n] float32, of an embedding or reranking model
