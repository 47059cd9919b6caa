"""Messages between the decoder's front and its engine process.

The messages are plain data that crosses a socket as MessagePack. `common/process/channel.py` sends
and checks them. The module imports neither torch nor gRPC.
"""

import msgspec

from services.common.process.heartbeat import Ping, Pong


class SamplingParams(msgspec.Struct, frozen=True):
    """The sampling parameters of a sequence; proto/decoder.proto explains each field."""

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
        """True if the tokens that the sequence has seen change its logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class ImageSpan(msgspec.Struct, frozen=True):
    """A run of image placeholders: prompt tokens [offset, offset + num_tokens).

    Attributes:
        key: key of the image's embedding.
        offset: index of the first placeholder in the prompt.
        num_tokens: number of placeholders.
    """

    key: bytes
    offset: int
    num_tokens: int


# Messages from the front to the engine.


class AddSequence(msgspec.Struct, tag="add"):
    """Adds a sequence to generate, whose images may arrive later.

    Attributes:
        sequence_id: id of the sequence, which the front chooses and never reuses.
        prompt_token_ids: int32 `[num_tokens]`.
        positions: int32 `[3, num_tokens]`. Empty if each token's position is its index.
        position_delta: difference between the position and the index of a completion token.
        images: images of the prompt, by offset.
        sampling: sampling parameters.
        generated_token_ids: int32 ids of the completion's first tokens, if another decoder has
            generated them.
        cache_salt: salt of the prefix cache; sequences with different salts share no blocks.
        priority: waiting sequences with lower numbers are admitted first, and running sequences
            with higher numbers are preempted first.
        tenant: name of the tenant, which shares the engine fairly with other tenants, see
            `schedule.admission`.
        tenant_weight: weight of the tenant.
        background: True if the sequence runs only where no other sequence waits.
        request: id of the request, to which all prompts of a search belong, see
            `schedule.fair_queue`. Empty if the model generates text.
        prediction: int32 ids that the client predicts for the completion. Empty if there are none.
        adapter: slot of the adapter that computes the sequence; -1 for the base model alone.
        token_masks: True if each token is sampled under a mask. A process sends the mask
            (`TokenMasks`) when it has seen the token before. A step may be computed meanwhile. If
            the mask has not arrived when the step is sampled, the sequence gets no token from it.
    """

    sequence_id: int
    prompt_token_ids: bytes
    positions: bytes
    position_delta: int
    images: list[ImageSpan]
    sampling: SamplingParams
    generated_token_ids: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0
    token_masks: bool = False
    prediction: bytes = b""
    adapter: int = -1
    background: bool = False
    request: str = ""


class ImageReady(msgspec.Struct, tag="image"):
    """Reports that an image of a sequence is in the arena.

    The image stays there until the engine has read it (`StepDone.images_read`) or the sequence has
    ended.

    Attributes:
        sequence_id: id of the sequence.
        key: key of the image's embedding.
        arena_offset: byte offset of the embedding in the arena.
    """

    sequence_id: int
    key: bytes
    arena_offset: int


class MaskLink(msgspec.Struct, tag="mask_link"):
    """Announces a process that fills masks.

    The engine's link carries two file descriptors before this message: a socket to the process and
    the memory of its masks.

    Attributes:
        link: number of the process.
        num_rows, num_words: shape of the int32 masks `[num_rows, num_words]`. A mask is the first
            words of a row.
    """

    link: int
    num_rows: int
    num_words: int


class TokenMasks(msgspec.Struct, tag="masks"):
    """Carries the masks of the next tokens of sequences with `token_masks`.

    A mask stays unchanged until the sequence's next token was sent. Masks that the sequence has had
    already, and masks of a sequence that has ended, are ignored.

    Attributes:
        sequence_ids: ids of the sequences.
        num_generated: number of completion tokens before the token of each mask.
        rows: row of each mask in the memory of the `MaskLink`, or -1 if all tokens are allowed. Bit
            i of word w allows token 32 * w + i.
        link: number of the process.
        num_drafts: number of drafts of each sequence that its masks allow one after the other. The
            rows behind the sequence's row have the masks of the tokens behind each of them. Empty
            if no sequence has drafts.
    """

    sequence_ids: list[int]
    num_generated: list[int]
    rows: list[int]
    link: int
    num_drafts: list[int] = []


class AbortSequence(msgspec.Struct, tag="abort"):
    """Ends a sequence; the engine replies with the sequence's last event."""

    sequence_id: int


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Empties the prefix cache: later sequences find no block that was computed before."""


class LoadAdapter(msgspec.Struct, tag="adapter"):
    """Loads an adapter into a slot. The engine answers with `AdapterLoaded`, in order.

    Attributes:
        slot: number of the slot, which no running sequence uses.
        directory: directory of the adapter. Empty if the slot is emptied.
    """

    slot: int
    directory: str


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Tells the engine process to exit."""


FrontMessage = (
    AddSequence
    | ImageReady
    | MaskLink
    | TokenMasks
    | AbortSequence
    | ResetPrefixCache
    | LoadAdapter
    | Ping
    | Shutdown
)


# Messages from the engine to the front.

# The most drafts of a layer for multi-token prediction, which is trained to predict one token, so
# that later drafts are right less often.
MAX_HEAD_DRAFTS = 3


class EngineInfo(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The model and the limits of an engine, which never change.

    The engine sends them to the front when the weights are loaded and every kernel has run once.

    Attributes:
        model_name: name of the model.
        dtype: data type of weights and activations.
        num_features: number of embeddings of an image token; 0 if the model takes no images.
        hidden: width of an image's embedding.
        vocab_size: number of tokens that the head scores.
        max_model_len: the most prompt and completion tokens of one sequence. All blocks together
            hold at least so many.
        block_size: tokens per KV block.
        num_blocks: number of KV blocks; the scheduler hands out ids 0 .. num_blocks - 1.
        max_num_sequences: number of rows; the scheduler hands out rows 0 .. max_num_sequences - 1.
        max_batched_tokens: the most tokens of one step; at least one for each row, and at least
            `max_tokens_per_step`.
        max_tokens_per_step: the most tokens that a step yields for one sequence, without drafts.
        max_drafts: the most drafts of a sequence in a step. 0 if there is no speculation.
        has_draft_head: True if the model drafts tokens itself, see `DraftHead`.
        num_weight_tokens: number of tokens whose keys and values have as many bytes as the weights.
        expert_share: share of a layer's experts that one token uses; 0 if there are no experts.
        wave_tokens: number of prompt tokens whose attention fills all SMs once: each SM computes
            one tile of one head. 0 if it is not known.
        on_gpu: True if the engine computes on a GPU.
        has_states: True if rows have recurrent states. KV blocks are then shared only together with
            a state.
        num_checkpoints: number of slots for states; the scheduler hands out slots
            0 .. num_checkpoints - 1.
        state_tokens: number of tokens of a piece of a chunk. A state can be saved after each piece.
        task: task of the model, see `ModelSpec.task`. A sequence of a model for search ends with
            its prompt.
        max_adapters: number of slots for adapters.
        num_host_blocks: number of slots for copies of KV blocks in the host's memory.
        num_host_states: number of slots for copies of checkpoints there.
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
    max_drafts: int = 0
    has_draft_head: bool = False
    num_weight_tokens: int = 0
    expert_share: float = 0.0
    wave_tokens: int = 0
    on_gpu: bool = False
    has_states: bool = False
    num_checkpoints: int = 0
    state_tokens: int = 1
    task: str = "generate"
    max_adapters: int = 0
    num_host_blocks: int = 0
    num_host_states: int = 0

    @property
    def num_head_drafts(self) -> int:
        """Number of tokens that the model drafts itself behind each sampled token; 0 if none."""
        return min(self.max_drafts, MAX_HEAD_DRAFTS) if self.has_draft_head else 0


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a sampled token and of the most likely tokens at its place."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of n tokens of a prompt, and of the m most likely tokens at each place.

    Attributes:
        start: index of the first token; at least 1, because nothing precedes token 0.
        logprobs: float32 `[n]`, from the raw logits.
        ranks: int32 `[n]`; rank 1 is the most likely token.
        top_token_ids: int32 `[n, m]`, the most likely tokens.
        top_logprobs: float32 `[n, m]`, log-probabilities of these tokens.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes


class StartOfSequence(msgspec.Struct, array_like=True):
    """Timings up to a sequence's first token.

    Attributes:
        num_cached_tokens: number of prompt tokens found in the prefix cache.
        first_scheduled_s: seconds from the arrival of the sequence to its first launched step.
        first_token_s: seconds from the arrival of the sequence to its first token.
    """

    num_cached_tokens: int
    first_scheduled_s: float
    first_token_s: float


class EndOfSequence(msgspec.Struct, array_like=True):
    """The end of a sequence.

    Attributes:
        reason: "stop", "length" or "aborted"; "refused" if the request itself is at fault, so that
            no engine can answer it; "failed" if this engine is at fault.
        message: cause, if the sequence failed or was refused.
        num_preemptions: number of times that the sequence was preempted.
        code: code of the error (`services.common.errors`), if the sequence failed or was refused.
    """

    reason: str
    message: str = ""
    num_preemptions: int = 0
    code: str = ""


class SequenceEvent(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence.

    Attributes:
        sequence_id: id of the sequence.
        token_ids: the new tokens.
        logprobs: log-probabilities of each token, if the request wants any.
        end: end of the sequence, with its last tokens. None before.
        start: timings, with the first tokens. None afterwards.
        prompt_logprobs: log-probabilities of prompt tokens. None if there are no new ones.
        vector: float32 `[n]`, the result of a model for search, with the only token. Empty if the
            model generates text.
        predicted: numbers of drafts from the client's prediction that were accepted and rejected.
            None if there were no such drafts.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: list[Logprobs] = []
    end: EndOfSequence | None = None
    start: StartOfSequence | None = None
    prompt_logprobs: PromptLogprobs | None = None
    vector: bytes = b""
    predicted: tuple[int, int] | None = None


class DraftTotals(msgspec.Struct, array_like=True):
    """Totals of the drafts that an engine has verified.

    Attributes:
        num_chunks: number of chunks with drafts.
        num_drafts: number of drafts.
        num_accepted: number of accepted drafts.
        accepted_at: number of accepted drafts by their place behind a sequence's last token.
    """

    num_chunks: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = []


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent with each step and when a gauge has changed.

    Attributes:
        num_running: number of sequences with a row.
        num_waiting: number of sequences without a row.
        num_free_blocks: number of KV blocks that no sequence owns.
        num_blocks: number of KV blocks.
        num_preemptions: number of preemptions so far.
        num_prefix_hit_tokens: number of prompt tokens found in the prefix cache so far.
        num_prompt_tokens: number of prompt tokens received so far.
        num_steps: number of launched steps so far.
        num_late_masks: number of token masks so far that missed their step.
        num_lacking_images: number of waiting sequences that wait for an image, not for the engine.
        busy_s: seconds so far during which a step was in flight.
        drafts: totals of drafts. None if there is no speculation.
        num_blocks_to_host: number of KV blocks copied to the host so far.
        num_blocks_from_host: number of KV blocks copied back so far.
        num_turns: number of turns so far on a GPU that is shared with an encoder.
        turn_wait_s: seconds so far for which the engine waited for its turns.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    num_steps: int
    num_late_masks: int = 0
    num_lacking_images: int = 0
    busy_s: float = 0.0
    drafts: DraftTotals | None = None
    num_blocks_to_host: int = 0
    num_blocks_from_host: int = 0
    num_turns: int = 0
    turn_wait_s: float = 0.0


class ImagesOf(msgspec.Struct, array_like=True):
    """Some images of one sequence."""

    sequence_id: int
    keys: list[bytes]


class StepDone(msgspec.Struct, tag="step"):
    """The results of one step for all sequences.

    Attributes:
        events: new tokens, starts and ends.
        stats: present gauges and counters.
        images_read: images whose memory in the arena is not read any more.
        images_wanted: images that were read already and have to be read again, because a preempted
            sequence lost the keys and values of their tokens. The front sends `ImageReady` again.
    """

    events: list[SequenceEvent]
    stats: EngineStats
    images_read: list[ImagesOf] = []
    images_wanted: list[ImagesOf] = []


class KernelCalls(msgspec.Struct, tag="kernels"):
    """The number of calls of each kernel so far, sent about once a second while steps run.

    Attributes:
        calls: number of calls by "operation=implementation", with calls in replayed graphs.
    """

    calls: dict[str, int]


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """Answers a `LoadAdapter`.

    Attributes:
        error: reason why the adapter cannot be served. Empty if it is loaded.
    """

    error: str = ""


class NewTokens(msgspec.Struct, tag="tokens"):
    """The tokens of a step for all processes that fill masks.

    Attributes:
        sequence_ids: ids of the sequences with masks that have not ended.
        token_ids: new tokens of each sequence.
        num_generated: number of completion tokens of each sequence, with the new tokens.
        drafts: drafts behind the new tokens of each sequence, for which masks are wanted, too. The
            front, which knows no drafts, leaves the list empty.
    """

    sequence_ids: list[int]
    token_ids: list[list[int]]
    num_generated: list[int]
    drafts: list[list[int]] = []


EngineMessage = EngineInfo | StepDone | KernelCalls | AdapterLoaded | Pong
