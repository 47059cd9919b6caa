"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: an administrator's calls, as vLLM's."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.common.errors import InvalidRequest
from services.gateway.clients.served_adapters import load_adapter, unload_adapter
from services.gateway.endpoints.request_context import parse_body
from services.gateway.forms.json_body import Body, Parser
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot


class LoadAdapterRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter. `lora_int_id` is vLLM's, and has no meaning here."""

    lora_name: str
    lora_int_id: int | None = None


_parse_load = Parser(LoadAdapterRequest)
_parse_unload = Parser(UnloadAdapterRequest)


async def load(service: ChatService, request: Request, slot: Slot, body: Body) -> Response:
    """Loads an adapter on all decoders, and answers when requests may call it."""
    parsed = await parse_body(service, _parse_load, body, request.scope)
    name = parsed.lora_name
    if not name or not parsed.lora_path:
        raise InvalidRequest("lora_name and lora_path must not be empty", param="lora_name")
    if name in service.model_names:
        raise InvalidRequest(f"{name} is the name of the base model", param="lora_name")
    await load_adapter(
        service.decoders, name, parsed.lora_path, load_inplace=bool(parsed.load_inplace)
    )
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: ChatService, request: Request, slot: Slot, body: Body) -> Response:
    """Unloads an adapter from all decoders."""
    parsed = await parse_body(service, _parse_unload, body, request.scope)
    await unload_adapter(service.decoders, parsed.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")
