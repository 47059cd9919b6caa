"""Fields that are accepted without effect, because they change no answer: the one table of them.

The structs of `openai` and of the other surfaces inherit them; docs/api.md lists them, and a test
compares the two. A field belongs here only if an answer without it is a right answer.
"""

import msgspec
from msgspec import UNSET, Struct, UnsetType

_Any = msgspec.Raw


class RequestHints(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a request: who asks, what may be stored or cached, how it is billed."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: _Any | UnsetType = UNSET
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: _Any | UnsetType = UNSET
    prediction: _Any | UnsetType = UNSET
    request_id: str | None = None
    session_id: str | None = None


class MessageHints(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a message: a participant's name, and fields of an answer that is sent back."""

    name: str | None = None
    id: str | None = None
    created: _Any | UnsetType = UNSET
    parsed: _Any | UnsetType = UNSET


class PartHints(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a part of a message: where another server would end a cached prefix."""

    cache_control: _Any | UnsetType = UNSET
