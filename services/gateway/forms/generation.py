"""Fields of chat, text completion and Responses requests that control generation.

The checks in this module do not depend on the model; `sampling` makes the checks that do. All
errors are `InvalidRequest`, and `param` names the field.
"""

import re
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.common.errors import InvalidRequest
from services.common.images.image_key import MAX_SALT_BYTES

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_N = 8
MAX_LOGIT_BIAS, MAX_BIAS = 1024, 100
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_NAME_LENGTH = 64
MAX_CHOICES = 1024

TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[
    dict[str, Any],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        extra_json_schema={
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
        },
    ),
]
_AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_SALT = re.compile(r"[^@/\\\x00]+")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Further fields of a stream's chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object: a value of the schema, as llama.cpp's clients send it, or of any kind."""

    schema: Raw | UnsetType = UNSET


class JsonSchema(Struct, forbid_unknown_fields=True):
    """OpenAI's wrapper of a schema. The answer fits the schema even if `strict` is not true."""

    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    description: str | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A value of a schema."""

    json_schema: JsonSchema

    @property
    def schema(self) -> Raw | UnsetType:
        """The JSON Schema. UNSET if the answer may be any object."""
        return self.json_schema.schema


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's constraints on the answer. A request has one of the fields. `json` is a schema or the
    JSON text of a schema.
    """

    json: Raw | UnsetType = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that requests for chat, text completions and Responses share."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Logits are divided by the penalty and by the temperature, and must not overflow.
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """The fields that requests for chat and text completions share."""

    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    allowed_token_ids: _AllowedIds | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = (
        None
    )
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stream_usage(self) -> tuple[bool, bool]:
        """Returns whether a stream ends with its usage, and whether each chunk has one, too."""
        options = self.stream_options or StreamOptions()
        continuous = bool(options.continuous_usage_stats) and options.include_usage is not False
        return bool(options.include_usage) or continuous, continuous


def check_generation(request: GenerationFields) -> None:
    """Raises InvalidRequest for faults that the fields' types allow. `param` names the field."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("not available in a stream", param="prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest("0 would leave nothing of the prompt", param="truncate_prompt_tokens")
    for name, bias in (request.logit_bias or {}).items():
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"a bias is a number from -{MAX_BIAS} to {MAX_BIAS}",
                param=f"logit_bias.{name[:100]}",
            )
    check_salt(request.cache_salt)


def check_salt(cache_salt: str | None) -> None:
    """Raises InvalidRequest unless the salt is one that image keys and prefix hashes can have."""
    if cache_salt is not None and not _SALT.fullmatch(cache_salt):
        raise InvalidRequest("cache_salt must not contain @, / or \\", param="cache_salt")
    if cache_salt is not None and len(cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"more than {MAX_SALT_BYTES} bytes", param="cache_salt")
