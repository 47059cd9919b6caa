"""The descriptions of the fields of files and batches, see `field_descriptions`."""

from collections.abc import Mapping

# Object -> field -> description.
BATCHES: Mapping[str, Mapping[str, str]] = {
    "FileObject": {
        "id": "Name of the file.",
        "bytes": "Size of the file in bytes.",
        "created_at": "Unix time of the upload, or of the end of the batch.",
        "expires_at": "Unix time at which the file is removed.",
        "filename": "Name of the file at the client.",
        "purpose": "`batch` for lines of requests, `batch_output` for results.",
        "status": "Always `processed`.",
    },
    "FileList": {
        "data": "The files.",
        "first_id": "Name of the first file of the page.",
        "last_id": "Name of the last file of the page, for `after` of the next request.",
        "has_more": "True if there are files behind this page.",
    },
    "DeletedFile": {"id": "Name of the file."},
    "ExpiresAfter": {
        "anchor": "Always `created_at`.",
        "seconds": "Seconds after which the files are removed, 3600 to 2592000.",
    },
    "BatchRequest": {
        "input_file_id": "File with the requests, one per line.",
        "endpoint": "Path to which all lines are sent, such as `/v1/chat/completions`.",
        "completion_window": "Time after which lines that have not ended are given up: `24h`, or another number of hours up to 168.",
        "metadata": "Up to 16 texts of the client, which the batch returns.",
        "output_expires_after": "Lifetime of the files with results. Defaults to 30 days.",
    },
    "BatchFault": {
        "code": "Kind of the fault, such as `duplicate_custom_id`.",
        "message": "Description of the fault.",
        "param": "Field of the line that is wrong. Null if no single field is.",
        "line": "Number of the line, from 1. Null if no single line is wrong.",
    },
    "BatchFaults": {"data": "The reasons."},
    "BatchCounts": {
        "total": "Number of lines. 0 until they are checked.",
        "completed": "Number of lines that were answered.",
        "failed": "Number of lines that have failed.",
    },
    "BatchObject": {
        "id": "Name of the batch.",
        "endpoint": "Path to which its lines are sent.",
        "model": "Name of the model.",
        "errors": "Reasons why the batch has failed. Null for any other batch.",
        "input_file_id": "File with its lines.",
        "completion_window": "Time after which lines are given up.",
        "status": "State of the batch.",
        "output_file_id": "File with the answers, once the batch has ended. Null if there are none.",
        "error_file_id": "File with the failed lines, once the batch has ended. Null if there are none.",
        "created_at": "Unix time of the creation.",
        "expires_at": "Unix time at which lines that have not ended are given up.",
        "request_counts": "Numbers of lines.",
        "metadata": "The texts of the request.",
        **{
            f"{state}_at": f"Unix time at which the batch was `{state}`. Null if it was not."
            for state in (
                "in_progress",
                "finalizing",
                "completed",
                "failed",
                "expired",
                "cancelling",
                "cancelled",
            )
        },
    },
    "BatchList": {
        "data": "The batches, the newest first.",
        "first_id": "Name of the first batch of the page.",
        "last_id": "Name of the last batch of the page, for `after` of the next request.",
        "has_more": "True if there are batches behind this page.",
    },
}
