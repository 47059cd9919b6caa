"""Messages between the decoder's front and its engine process.

Plain data that crosses a socket as MessagePack; no torch and no gRPC. `common/process/channel.py`
sends and checks them.
"""

import msgspec

from services.common.process.heartbeat import Ping, Pong


class SamplingParams(msgspec.Struct, frozen=True):
    """How a sequence's tokens are sampled; proto/decoder.proto explains each field."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens that the sequence has seen change its logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class ImageSpan(msgspec.Struct, frozen=True):
    """A run of image placeholders: prompt tokens [offset, offset + num_tokens)."""

    key: bytes
    offset: int
    num_tokens: int


# Front to engine.


class AddSequence(msgspec.Struct, tag="add"):
    """A sequence to generate. Its images may arrive later."""

    sequence_id: int  # minted by the front, never reused
    prompt_token_ids: bytes  # int32 [num_tokens]
    positions: bytes  # int32 [3, num_tokens], or empty: text only
    position_delta: int
    images: list[ImageSpan]  # by offset
    sampling: SamplingParams
    # int32: the completion's first tokens, if it is continued.
    generated_token_ids: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0  # lower ones first among those that wait; the highest is preempted first
    tenant: str = ""  # shares the engine fairly with others, see engine/admission.py
    tenant_weight: float = 1.0
    # Each token is sampled under a mask that a process sends (`TokenMasks`) when it has seen
    # the token before. A step may be computed meanwhile; if the mask is not there when the step is
    # to be sampled, the sequence gets no token from it.
    token_masks: bool = False


class ImageReady(msgspec.Struct, tag="image"):
    """A sequence's image is in the arena. It stays there until the engine has read it
    (`StepDone.images_read`) or the sequence has ended.
    """

    sequence_id: int
    key: bytes
    arena_offset: int  # bytes


class MaskLink(msgspec.Struct, tag="mask_link"):
    """A process that fills masks, from now on. A socket to it and the memory of its masks came
    before this message, as descriptors over the engine's link.

    Attributes:
        link: the number of the process.
        num_rows, num_words: int32 `[num_rows, num_words]`; masks are each row's first words.
    """

    link: int
    num_rows: int
    num_words: int


class TokenMasks(msgspec.Struct, tag="masks"):
    """The tokens that sequences with `token_masks` may have next. A row stays as it is until the
    sequence's next token was sent. Masks of a sequence that has ended, and those that it has had
    already, are ignored.

    Attributes:
        sequence_ids: of `AddSequence`.
        num_generated: completion tokens before the one that the mask is for.
        rows: of the `MaskLink`; bit i of word w allows token 32 * w + i; -1: all are allowed.
    """

    sequence_ids: list[int]
    num_generated: list[int]
    rows: list[int]
    link: int


class AbortSequence(msgspec.Struct, tag="abort"):
    """Ends a sequence; the engine replies with the sequence's last event."""

    sequence_id: int


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Sequences that come later find no block that was computed before."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine process exits."""


FrontMessage = (
    AddSequence | ImageReady | MaskLink | TokenMasks | AbortSequence | ResetPrefixCache | Ping
    | Shutdown
)  # fmt: skip


# Engine to front.


class EngineInfo(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """What an engine serves and how much; constant. Sent to the front when the weights are loaded
    and every kernel has run once.

    Attributes:
        model_name, dtype: as configured and resolved.
        num_features: of an image's embedding; 0: the model takes no images.
        hidden: width of an image's embedding.
        vocab_size: rows of the head.
        max_model_len: prompt and completion tokens of one sequence; all blocks together hold them.
        block_size: tokens per KV block.
        num_blocks: block ids 0 .. num_blocks - 1 are the scheduler's.
        max_num_sequences: rows 0 .. max_num_sequences - 1.
        max_batched_tokens: tokens of one step; at least one for each row, or k.
        max_tokens_per_step: k, the most tokens that a step yields for one sequence.
        num_weight_tokens: tokens whose keys and values have as many bytes as the weights.
        expert_share: of a layer's experts, what one token uses; 0: it has none.
        on_gpu: the engine computes on a GPU.
        has_states: rows have recurrent states, without which KV blocks cannot be shared.
        num_checkpoints: slots 0 .. num_checkpoints - 1 for states are the scheduler's.
        state_tokens: a state can be kept after each multiple of so many tokens of a chunk.
    """

    model_name: str
    dtype: str
    num_features: int
    hidden: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_sequences: int
    max_batched_tokens: int
    max_tokens_per_step: int = 1
    num_weight_tokens: int = 0
    expert_share: float = 0.0
    on_gpu: bool = False
    has_states: bool = False
    num_checkpoints: int = 0
    state_tokens: int = 1


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one sampled token and of the most likely ones."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of n tokens of a prompt, and of the m most likely ones in their places.

    Attributes:
        start: index of the first token; at least 1, because nothing precedes token 0.
        logprobs: float32 `[n]`, from the raw logits.
        ranks: int32 `[n]`, 1: the most likely.
        top_token_ids, top_logprobs: int32 and float32 `[n, m]`.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes


class StartOfSequence(msgspec.Struct, array_like=True):
    """Timings up to a sequence's first token; seconds since the engine received it."""

    num_cached_tokens: int
    first_scheduled_s: float
    first_token_s: float


class EndOfSequence(msgspec.Struct, array_like=True):
    """How a sequence ended.

    `reason` is "stop", "length", "aborted", "failed" or "refused" (what the request asks for cannot
    be); with the last two, `message` says why.
    """

    reason: str
    message: str = ""
    num_preemptions: int = 0


class SequenceEvent(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence; its start with the first of them, its end with the last."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[Logprobs] = []
    end: EndOfSequence | None = None
    start: StartOfSequence | None = None
    prompt_logprobs: PromptLogprobs | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent with each step and when a gauge has changed."""

    num_running: int
    num_waiting: int  # without a row
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int  # total
    num_prefix_hit_tokens: int  # total
    num_prompt_tokens: int  # total
    num_steps: int  # total
    num_late_masks: int = 0  # total; token masks that missed their step
    num_lacking_images: int = 0  # of those that wait: for an image, not for the engine
    busy_s: float = 0.0  # total; a step was in flight


class ImagesOf(msgspec.Struct, array_like=True):
    """Some images of one sequence."""

    sequence_id: int
    keys: list[bytes]


class StepDone(msgspec.Struct, tag="step"):
    """All that one step produced, for all sequences.

    Attributes:
        events: new tokens, starts and ends.
        stats: current values.
        images_read: their arena memory is not read any more.
        images_wanted: images that were read already and are needed again, because a preempted
            sequence lost what was computed from them: the front sends `ImageReady` again.
    """

    events: list[SequenceEvent]
    stats: EngineStats
    images_read: list[ImagesOf] = []
    images_wanted: list[ImagesOf] = []


class KernelCalls(msgspec.Struct, tag="kernels"):
    """Calls of each kernel so far, replayed ones included; sent about once a second of steps."""

    calls: dict[str, int]  # "operation=implementation" → total


class NewTokens(msgspec.Struct, tag="tokens"):
    """A step's tokens of sequences with masks that go on, to all processes that fill masks.

    Attributes:
        num_generated: of each sequence, with these.
    """

    sequence_ids: list[int]
    token_ids: list[list[int]]
    num_generated: list[int]


EngineMessage = EngineInfo | StepDone | KernelCalls | Pong
