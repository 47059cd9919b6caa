"""What the decoder's front and its engine say to each other."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How a sequence's tokens are chosen; see proto/decoder.proto for each field's meaning."""

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


class ImageSpan(msgspec.Struct, frozen=True):
    """A run of image placeholders: prompt tokens [offset, offset + num_tokens)."""

    key: bytes
    offset: int
    num_tokens: int


# Front to engine.


class AddSequence(msgspec.Struct, tag="add"):
    """A sequence to generate. Its images may still be on their way."""

    sequence_id: int  # minted by the front, never reused
    prompt_token_ids: bytes  # int32 [num_tokens]
    positions: bytes  # int32 [3, num_tokens], or empty: text only
    position_delta: int
    images: list[ImageSpan]
    sampling: SamplingParams
    cache_salt: bytes = b""


class ImageReady(msgspec.Struct, tag="image"):
    """A sequence's image is in the arena. It stays there until the engine has read it and says so
    (`StepDone.images_read`), or the sequence has ended.
    """

    sequence_id: int
    key: bytes
    arena_offset: int  # bytes


class AbortSequence(msgspec.Struct, tag="abort"):
    """Ends a sequence; the engine answers with its last event."""

    sequence_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine ends after this."""


FrontMessage = AddSequence | ImageReady | AbortSequence | Shutdown


# Engine to front.


class EngineReady(msgspec.Struct, tag="ready"):
    """Weights are loaded and each kernel has run once."""

    model_name: str
    dtype: str
    num_features: int
    hidden: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_sequences: int


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one sampled token and of the most likely ones."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class StartOfSequence(msgspec.Struct, array_like=True):
    """How a sequence came to its first token; seconds since the engine received it."""

    num_cached_tokens: int
    first_scheduled_s: float
    first_token_s: float


class EndOfSequence(msgspec.Struct, array_like=True):
    """Why and how a sequence ended.

    `reason` is "stop", "length", "aborted" or "failed"; with "failed", `message` says why.
    """

    reason: str
    message: str = ""
    num_preemptions: int = 0


class SequenceEvent(msgspec.Struct, array_like=True):
    """New tokens of one sequence; its start with the first of them, its end with the last."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[Logprobs] = []
    end: EndOfSequence | None = None
    start: StartOfSequence | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent with each step and when it falls idle."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int  # total
    num_prefix_hit_tokens: int  # total
    num_prompt_tokens: int  # total
    num_steps: int  # total


class ImagesOf(msgspec.Struct, array_like=True):
    """Some images of one sequence."""

    sequence_id: int
    keys: list[bytes]


class StepDone(msgspec.Struct, tag="step"):
    """All that one step produced, for all sequences.

    Attributes:
        events: new tokens, starts and ends.
        stats: as they are now.
        images_read: their places in the arena are not read any more.
        images_wanted: `ImageReady` is asked for once more: these were read, and what was computed
            from them is lost.
    """

    events: list[SequenceEvent]
    stats: EngineStats
    images_read: list[ImagesOf] = []
    images_wanted: list[ImagesOf] = []


EngineMessage = EngineReady | StepDone
