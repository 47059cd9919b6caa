from services.common.pb import encoder_pb2 as _encoder_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "root", "num_waiting", "adapts_tower")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    ADAPTS_TOWER_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    root: str
    num_waiting: int
    adapts_tower: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., root: _Optional[str] = ..., num_waiting: _Optional[int] = ..., adapts_tower: _Optional[bool] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "directory", "load_inplace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    LOAD_INPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    load_inplace: bool
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., load_inplace: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks_used", "num_blocks", "adapters", "max_adapters")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_blocks: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ...) -> None: ...

class DescribeDecoderRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeDecoderResponse(_message.Message):
    __slots__ = ("model_name", "dtype", "num_features", "hidden", "vocab_size", "max_model_len", "block_size", "num_blocks", "max_num_sequences", "fingerprint", "protocol", "task", "takes_batches")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TAKES_BATCHES_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    dtype: _encoder_pb2.DType
    num_features: int
    hidden: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_sequences: int
    fingerprint: bytes
    protocol: int
    task: str
    takes_batches: bool
    def __init__(self, model_name: _Optional[str] = ..., dtype: _Optional[_Union[_encoder_pb2.DType, str]] = ..., num_features: _Optional[int] = ..., hidden: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_sequences: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., protocol: _Optional[int] = ..., task: _Optional[str] = ..., takes_batches: _Optional[bool] = ...) -> None: ...

class GenerateCommand(_message.Message):
    __slots__ = ("submit", "cancel", "accept", "batch")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    accept: Accept
    batch: CommandBatch
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., batch: _Optional[_Union[CommandBatch, _Mapping]] = ...) -> None: ...

class CommandBatch(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[GenerateCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[GenerateCommand, _Mapping]]] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("bare_tokens",)
    BARE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    bare_tokens: bool
    def __init__(self, bare_tokens: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("sequence_id", "request_id", "prompt_token_ids", "positions", "position_delta", "images", "sampling", "cache_salt", "timeout_s", "traceparent", "grammar", "generated_token_ids", "prediction", "adapter", "tenant", "tenant_weight", "priority", "background")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    POSITION_DELTA_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    request_id: str
    prompt_token_ids: bytes
    positions: bytes
    position_delta: int
    images: _containers.RepeatedCompositeFieldContainer[ImageRef]
    sampling: SamplingParams
    cache_salt: bytes
    timeout_s: float
    traceparent: str
    grammar: Grammar
    generated_token_ids: bytes
    prediction: bytes
    adapter: bytes
    tenant: str
    tenant_weight: float
    priority: int
    background: bool
    def __init__(self, sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., position_delta: _Optional[int] = ..., images: _Optional[_Iterable[_Union[ImageRef, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., generated_token_ids: _Optional[bytes] = ..., prediction: _Optional[bytes] = ..., adapter: _Optional[bytes] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., priority: _Optional[int] = ..., background: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "begins_after", "end_token_ids", "plain_strings", "by_gateway")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Grammar.Kind]
        KIND_JSON_SCHEMA: _ClassVar[Grammar.Kind]
        KIND_REGEX: _ClassVar[Grammar.Kind]
        KIND_CHOICE: _ClassVar[Grammar.Kind]
        KIND_GRAMMAR: _ClassVar[Grammar.Kind]
    KIND_UNSPECIFIED: Grammar.Kind
    KIND_JSON_SCHEMA: Grammar.Kind
    KIND_REGEX: Grammar.Kind
    KIND_CHOICE: Grammar.Kind
    KIND_GRAMMAR: Grammar.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AFTER_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    BY_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    kind: Grammar.Kind
    text: str
    begins_after: _containers.RepeatedScalarFieldContainer[int]
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    plain_strings: bool
    by_gateway: bool
    def __init__(self, kind: _Optional[_Union[Grammar.Kind, str]] = ..., text: _Optional[str] = ..., begins_after: _Optional[_Iterable[int]] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., plain_strings: _Optional[bool] = ..., by_gateway: _Optional[bool] = ...) -> None: ...

class ImageRef(_message.Message):
    __slots__ = ("image_key", "offset", "num_tokens", "encoder_address")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    offset: int
    num_tokens: int
    encoder_address: str
    def __init__(self, image_key: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., encoder_address: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop_token_ids", "max_tokens", "min_tokens", "top_logprobs", "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    top_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateEvents(_message.Message):
    __slots__ = ("events", "sequence_ids", "token_ids")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "logprobs", "finished", "failed", "started", "prompt_logprobs", "leaving", "vector", "accepted_tokens", "rejected_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finished: Finished
    failed: Failed
    started: Started
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    leaving: bool
    vector: bytes
    accepted_tokens: int
    rejected_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., leaving: _Optional[bool] = ..., vector: _Optional[bytes] = ..., accepted_tokens: _Optional[int] = ..., rejected_tokens: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s", "transfer_s", "prefill_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    start: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, start: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "num_preemptions")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finished.Reason]
        REASON_STOP: _ClassVar[Finished.Reason]
        REASON_LENGTH: _ClassVar[Finished.Reason]
    REASON_UNSPECIFIED: Finished.Reason
    REASON_STOP: Finished.Reason
    REASON_LENGTH: Finished.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: Finished.Reason
    num_preemptions: int
    def __init__(self, reason: _Optional[_Union[Finished.Reason, str]] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "encoder_address")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    encoder_address: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., encoder_address: _Optional[str] = ...) -> None: ...
