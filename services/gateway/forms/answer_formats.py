"""The fields of a request that say what its answer has to be, as clients send them.

`openai` parses requests with them; `grammar` makes one grammar of what they say.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

MAX_NAME_LENGTH = 64
MAX_CHOICES = 1024


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object of any kind."""


class JsonSchema(Struct, forbid_unknown_fields=True):
    """OpenAI's wrapper. The answer validates whether or not it is `strict`."""

    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    description: str | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A value of a schema."""

    json_schema: JsonSchema


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's spelling; one of them. `json` is a schema, or the JSON text of one."""

    json: Raw | UnsetType = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
