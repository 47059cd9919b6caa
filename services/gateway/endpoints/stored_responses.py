"""The stored responses of /v1/responses, which later requests continue and clients read again.

A stored entry has one turn of a conversation and the id of the turn before it, so each turn is
stored only once. Images are entries of their own, whose name is the digest of their bytes. Clients
cannot name these entries by `uuid`, because such names have another prefix.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3
from msgspec import Raw, Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest, NotFound
from services.gateway.entry_store import EntryStore
from services.gateway.forms import responses_api as api
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import MAX_MESSAGES
from services.gateway.forms.responses import encode_json
from services.gateway.forms.video import InputVideoPart
from services.gateway.http.exchange import JsonResponse
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import bound_tenant

# Limit of the turns that a request continues, without their images.
_MAX_BYTES = 4 << 20
_INLINE_BYTES = 64 << 10  # Parsing this many bytes takes some milliseconds at most.
_MAX_ID_LENGTH = 256


class _Turn(Struct, omit_defaults=True):
    """The items of one request without earlier turns, followed by the items of its answer."""

    items: list[api.InputItem]
    response: Raw
    previous: str | None = None


_decoder = msgspec.json.Decoder(_Turn)


class _StoredImage(api.ResponseImage, tag="input_image"):
    """An image of a stored turn. Its `uuid` is the digest of its bytes."""

    @property
    def stored_name(self) -> str | None:
        return _content_name(self.uuid or "")


def _decode(data: bytes) -> _Turn:
    """Returns a stored turn, in which all images are `_StoredImage`s."""
    turn = _decoder.decode(data)
    for item in turn.items:
        for parts in (item.content, item.output):
            if not isinstance(parts, list):
                continue
            for index, part in enumerate(parts):
                if isinstance(part, api.ResponseImage):
                    parts[index] = _StoredImage(**structs.asdict(part))
    return turn


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The stored turns, and the handlers that read and delete them. The service's parser thread
    parses long turns.
    """

    _service: ChatService
    _store: EntryStore

    async def items_until(self, tenant: str, response_id: str | None) -> list[api.InputItem]:
        """Returns the items of the conversation that ends with a response, in order. Empty if there
        is no response id.

        Raises:
            NotFound: a turn of the conversation is not stored.
            InvalidRequest: the conversation is too long.
        """
        turns: list[Sequence[api.InputItem]] = []
        num_items = num_bytes = 0
        while response_id is not None:
            turn, size = await self._turn(tenant, response_id, "previous_response_id")
            turns.append(turn.items)
            num_items += len(turn.items)
            num_bytes += size
            _check_length(num_items, num_bytes, "previous_response_id")
            response_id = turn.previous
        return [item for items in reversed(turns) for item in items]

    async def resolve(self, tenant: str, items: list[api.InputItem]) -> None:
        """Replaces references by the items of earlier answers that they name.

        Raises:
            NotFound: an item is not stored, or it is named twice.
            InvalidRequest: the turns of the items are too long.
        """
        found: dict[str | None, api.InputItem] = {}
        sizes: dict[str, int] = {}
        for index, item in enumerate(items):
            if item.type != "item_reference":
                continue
            name, param = item.id or "", f"input[{index}].id"
            response_id = f"resp_{name.partition('_')[2].rpartition('_')[0]}"
            if response_id not in sizes:
                turn, sizes[response_id] = await self._turn(tenant, response_id, param)
                _check_length(len(items), sum(sizes.values()), param)
                found |= {each.id: each for each in turn.items}
            if name not in found:
                raise self._not_found(name, param)
            items[index] = found.pop(name)

    async def store(
        self,
        tenant: str,
        request: api.ResponsesRequest,
        response: api.ResponseObject,
        images: Mapping[str, bytes],
    ) -> None:
        """Stores a turn unless the request forbids it. Sets the response's `store` to whether the
        turn is stored.

        Args:
            tenant: name of the tenant.
            request: the request, without earlier turns.
            response: the complete response.
            images: bytes of the images in the request's items, by the paths of the images.
        """
        items = None
        if request.store is not False:
            items = await self._own_items(tenant, request, images)
        response.store = items is not None
        if items is None:
            return
        items += [_as_input(item) for item in response.output]
        turn = _Turn(items, Raw(encode_json(response)), request.previous_response_id)
        response.store = await self._store.put(tenant, _name(response.id), encode_json(turn))

    async def retrieve(self, _: ChatService, request: Request, slot: Slot, __: Body) -> Response:
        """Returns a stored response."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("a stored response cannot be streamed", param="stream")
        turn, size = await self._turn(slot.tenant.name, request.path_params["name"])
        slot.memory.add(2 * size)
        return JsonResponse(turn.response)

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response, so that later turns cannot be continued."""
        response_id = request.path_params["name"]
        if not await self._store.delete(bound_tenant().name, _name(response_id)):
            raise self._not_found(response_id, None)
        return JsonResponse(api.DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        """Refuses to cancel a response, because a stored response is complete."""
        await self._turn(bound_tenant().name, request.path_params["name"])
        raise InvalidRequest("Cannot cancel a synchronous response.")

    async def _turn(
        self, tenant: str, response_id: str, param: str | None = None
    ) -> tuple[_Turn, int]:
        """Returns a stored turn and its size in bytes."""
        data = await self._store.get(tenant, _name(response_id))
        if data is not None:
            with suppress(msgspec.DecodeError):  # A gateway of another version has stored it.
                if len(data) <= _INLINE_BYTES:
                    return _decode(data), len(data)
                return await self._service.parsers.run(_decode, data), len(data)
        raise self._not_found(response_id, param)

    def _not_found(self, response_id: str, param: str | None) -> NotFound:
        message = f"Response with id {response_id[:200]!r} not found. {self._store.terms}"
        return NotFound(message, param=param)

    async def _own_items(
        self, tenant: str, request: api.ResponsesRequest, images: Mapping[str, bytes]
    ) -> list[api.InputItem] | None:
        """Returns the request's items with digests in place of images. None if an image or a video
        cannot be stored.
        """
        if isinstance(request.input, str):
            return [api.InputItem(role="user", content=request.input)]
        items: list[api.InputItem] = []
        for index, item in enumerate(request.input):
            changed: dict[str, Any] = {}
            for field, parts in (("content", item.content), ("output", item.output)):
                if not isinstance(parts, list):
                    continue
                place = f"input[{index}].{field}"
                found = await self._with_digests(tenant, parts, place, images)
                if found is None:
                    return None
                changed[field] = found
            items.append(structs.replace(item, **changed) if changed else item)
        return items

    async def _with_digests(
        self, tenant: str, parts: Sequence[api.InputPart], place: str, images: Mapping[str, bytes]
    ) -> list[api.InputPart] | None:
        found: list[api.InputPart] = []
        for index, part in enumerate(parts):
            if isinstance(part, api.ResponseImage):
                data = images.get(f"{place}[{index}]")
                if data is None:  # `truncation` has left out the turn with the image.
                    return None
                digest = f"blake3:{blake3(data).hexdigest()}"
                if not await self._store.put(tenant, _content_name(digest), data):
                    return None
                image = structs.replace(part.image, url=None)
                part = structs.replace(part, image_url=image, uuid=digest)
            elif isinstance(part, InputVideoPart) and not part.urls.startswith(("http:", "https:")):
                return None  # The bytes of a `data:` video are not stored.
            found.append(part)
        return found


def _check_length(num_items: int, num_bytes: int, param: str) -> None:
    if num_items > MAX_MESSAGES or num_bytes > _MAX_BYTES:
        raise InvalidRequest(
            f"the conversation has more than {MAX_MESSAGES} items or {_MAX_BYTES} bytes",
            param=param,
        )


def _content_name(digest: str) -> str:
    """Returns the name of an image's entry, which depends on its bytes alone."""
    return f"image:{digest}"


def _name(response_id: str) -> str:
    return f"response:{response_id[:_MAX_ID_LENGTH]}"


def _as_input(item: api.OutputItem) -> api.InputItem:
    """Returns an output item in the form in which a client sends the item back."""
    match item:
        case api.OutputMessage():
            texts: list[api.InputPart] = [
                api.ResponseOutputText(part.text) for part in item.content
            ]
            return api.InputItem(id=item.id, role="assistant", content=texts)
        case api.OutputReasoning():
            thoughts: list[api.InputPart] = [
                api.ResponseReasoningText(p.text) for p in item.content
            ]
            return api.InputItem(type="reasoning", id=item.id, content=thoughts)
        case api.OutputCall():
            namespace = item.namespace if isinstance(item.namespace, str) else None
            return api.InputItem(
                type="function_call",
                id=item.id,
                call_id=item.call_id,
                name=item.name,
                namespace=namespace,
                arguments=item.arguments,
            )
