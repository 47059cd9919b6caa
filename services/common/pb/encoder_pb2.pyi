from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType

class DescribeEncoderRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeEncoderResponse(_message.Message):
    __slots__ = ("model_name", "key_prefix", "dtype", "num_features", "hidden", "max_image_patches", "fingerprint", "protocol", "adapters")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PATCHES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    key_prefix: bytes
    dtype: DType
    num_features: int
    hidden: int
    max_image_patches: int
    fingerprint: bytes
    protocol: int
    adapters: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model_name: _Optional[str] = ..., key_prefix: _Optional[bytes] = ..., dtype: _Optional[_Union[DType, str]] = ..., num_features: _Optional[int] = ..., hidden: _Optional[int] = ..., max_image_patches: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., protocol: _Optional[int] = ..., adapters: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("t", "h", "w")
    T_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    W_FIELD_NUMBER: _ClassVar[int]
    t: int
    h: int
    w: int
    def __init__(self, t: _Optional[int] = ..., h: _Optional[int] = ..., w: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("video", "video_digest", "tenant", "tenant_weight")
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    video: bytes
    video_digest: bytes
    tenant: str
    tenant_weight: float
    def __init__(self, video: _Optional[bytes] = ..., video_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("video_digest", "num_frames", "rate", "height", "width", "duration_s", "frame_digests", "key_frames")
    VIDEO_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    FRAME_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FRAMES_FIELD_NUMBER: _ClassVar[int]
    video_digest: bytes
    num_frames: int
    rate: float
    height: int
    width: int
    duration_s: float
    frame_digests: bytes
    key_frames: bytes
    def __init__(self, video_digest: _Optional[bytes] = ..., num_frames: _Optional[int] = ..., rate: _Optional[float] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., duration_s: _Optional[float] = ..., frame_digests: _Optional[bytes] = ..., key_frames: _Optional[bytes] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("file", "tenant")
    FILE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    file: bytes
    tenant: str
    def __init__(self, file: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("digest", "kept_s")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEPT_S_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    kept_s: int
    def __init__(self, digest: _Optional[bytes] = ..., kept_s: _Optional[int] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("digest", "tenant", "forget")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    tenant: str
    forget: bool
    def __init__(self, digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., forget: _Optional[bool] = ...) -> None: ...

class DownloadResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: bytes
    def __init__(self, file: _Optional[bytes] = ...) -> None: ...

class FramePair(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: int
    second: int
    def __init__(self, first: _Optional[int] = ..., second: _Optional[int] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("image_key", "image", "grid", "cache_salt", "tenant", "tenant_weight", "background", "frames", "video_digest", "is_embedding", "second_image", "adapter")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    VIDEO_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    SECOND_IMAGE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    image: bytes
    grid: Grid
    cache_salt: bytes
    tenant: str
    tenant_weight: float
    background: bool
    frames: FramePair
    video_digest: bytes
    is_embedding: bool
    second_image: bytes
    adapter: bytes
    def __init__(self, image_key: _Optional[bytes] = ..., image: _Optional[bytes] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., background: _Optional[bool] = ..., frames: _Optional[_Union[FramePair, _Mapping]] = ..., video_digest: _Optional[bytes] = ..., is_embedding: _Optional[bool] = ..., second_image: _Optional[bytes] = ..., adapter: _Optional[bytes] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("source", "num_tokens", "patch_s")
    class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SOURCE_UNSPECIFIED: _ClassVar[EncodeResponse.Source]
        SOURCE_COMPUTED: _ClassVar[EncodeResponse.Source]
        SOURCE_MEMORY: _ClassVar[EncodeResponse.Source]
        SOURCE_REDIS: _ClassVar[EncodeResponse.Source]
        SOURCE_JOINED: _ClassVar[EncodeResponse.Source]
    SOURCE_UNSPECIFIED: EncodeResponse.Source
    SOURCE_COMPUTED: EncodeResponse.Source
    SOURCE_MEMORY: EncodeResponse.Source
    SOURCE_REDIS: EncodeResponse.Source
    SOURCE_JOINED: EncodeResponse.Source
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATCH_S_FIELD_NUMBER: _ClassVar[int]
    source: EncodeResponse.Source
    num_tokens: int
    patch_s: float
    def __init__(self, source: _Optional[_Union[EncodeResponse.Source, str]] = ..., num_tokens: _Optional[int] = ..., patch_s: _Optional[float] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("image_key", "reader_host", "tell_waiting")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    READER_HOST_FIELD_NUMBER: _ClassVar[int]
    TELL_WAITING_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    reader_host: bytes
    tell_waiting: bool
    def __init__(self, image_key: _Optional[bytes] = ..., reader_host: _Optional[bytes] = ..., tell_waiting: _Optional[bool] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer", "shared", "ready", "waiting")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    header: FetchHeader
    chunk: FetchChunk
    trailer: FetchTrailer
    shared: FetchShared
    ready: FetchReady
    waiting: FetchWaiting
    def __init__(self, header: _Optional[_Union[FetchHeader, _Mapping]] = ..., chunk: _Optional[_Union[FetchChunk, _Mapping]] = ..., trailer: _Optional[_Union[FetchTrailer, _Mapping]] = ..., shared: _Optional[_Union[FetchShared, _Mapping]] = ..., ready: _Optional[_Union[FetchReady, _Mapping]] = ..., waiting: _Optional[_Union[FetchWaiting, _Mapping]] = ...) -> None: ...

class FetchWaiting(_message.Message):
    __slots__ = ("in_work",)
    IN_WORK_FIELD_NUMBER: _ClassVar[int]
    in_work: bool
    def __init__(self, in_work: _Optional[bool] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("image_key", "dtype", "num_features", "num_tokens", "hidden")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    dtype: DType
    num_features: int
    num_tokens: int
    hidden: int
    def __init__(self, image_key: _Optional[bytes] = ..., dtype: _Optional[_Union[DType, str]] = ..., num_features: _Optional[int] = ..., num_tokens: _Optional[int] = ..., hidden: _Optional[int] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchTrailer(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class FetchShared(_message.Message):
    __slots__ = ("pid", "fd", "name", "size_bytes", "offset")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    name: str
    size_bytes: int
    offset: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchReady(_message.Message):
    __slots__ = ("offset", "size_bytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    size_bytes: int
    def __init__(self, offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
