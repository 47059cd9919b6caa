"""The objects of OpenAI's files and batches."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.gateway.forms.json_body import TEXT_END, Parser


class FileObject(Struct):
    """An uploaded file, or a file with results of a batch."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct):
    """A page of the tenant's files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    """The answer of DELETE /v1/files/{name}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """A time of expiry, counted from the creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class BatchRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(pattern=rf"^[1-9][0-9]{{0,2}}h{TEXT_END}")]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchFault(Struct):
    """A reason why a batch has failed. `line` is the number of the line in the input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(Struct):
    """The reasons why a batch has failed."""

    data: list[BatchFault]
    object: Literal["list"] = "list"


class BatchCounts(Struct):
    """The numbers of a batch's lines: all, answered, failed."""

    total: int
    completed: int
    failed: int


class BatchObject(Struct):
    """A batch. Its times are Unix times in seconds; null for states that it has not reached."""

    id: str
    endpoint: str
    model: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: BatchCounts
    metadata: dict[str, str] | None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: Literal["batch"] = "batch"


class BatchList(Struct):
    """A page of the tenant's batches, the newest first."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


parse_batch_request = Parser(BatchRequest)
