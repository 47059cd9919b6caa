"""GET /v1/models over the gateways of several models, each asked with the client's key."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from services.common.settings import SettingsError
from services.gateway.settings import GatewaySettings
from tests.gateway_stack import GatewayStack
from tests.ports import free_port


def gateway(loop_thread, directory: Path, name: str, **settings: object) -> GatewayStack:
    return GatewayStack(
        loop_thread, directory / name, text_only=True, num_encoders=0, log_level="ERROR",
        served_model_name=name, **settings,
    )  # fmt: skip


@pytest.fixture
def three(loop_thread, tmp_path: Path) -> Iterator[tuple[GatewayStack, GatewayStack]]:
    """Two gateways that know each other; the first also knows one that is away."""
    first_port = free_port()
    away = f"http://127.0.0.1:{free_port()}"
    second = gateway(
        loop_thread, tmp_path, "second/model", api_keys="both,second",
        other_gateways=f"http://127.0.0.1:{first_port}",
    )  # fmt: skip
    first = gateway(
        loop_thread, tmp_path, "first", api_keys="both,first", port=first_port,
        other_gateways=f"{second.url}/, {away}",
    )  # fmt: skip
    yield first, second
    first.close()
    second.close()


def get(stack: GatewayStack, path: str, key: str) -> httpx2.Response:
    with stack.client(headers={"authorization": f"Bearer {key}"}) as client:
        return client.get(path)


def test_each_gateway_lists_the_models_that_the_key_opens(three) -> None:
    first, second = three
    for stack, names in ((first, ["first", "second/model"]), (second, ["second/model", "first"])):
        answer = get(stack, "/v1/models", "both")
        assert answer.status_code == 200 and answer.json()["object"] == "list"
        assert [model["id"] for model in answer.json()["data"]] == names
        for model in answer.json()["data"]:
            assert model["object"] == "model" and model["input_modalities"] == ["text"]
    assert [m["id"] for m in get(first, "/v1/models", "first").json()["data"]] == ["first"]
    assert get(first, "/v1/models", "second").status_code == 401


def test_a_model_of_another_gateway_is_found_by_its_name(three) -> None:
    first, _ = three
    assert get(first, "/v1/models/second/model", "both").json()["id"] == "second/model"
    assert get(first, "/v1/models/first", "both").json()["id"] == "first"
    unknown = get(first, "/v1/models/third", "both")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert get(first, "/v1/models/second/model", "first").status_code == 404


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data": [{"name": "x"}]}', b'{"data": {}}'])
async def test_what_is_no_list_of_models_is_left_out(answer: bytes) -> None:
    from services.gateway.endpoints.models import ModelRoutes

    routes = ModelRoutes(None, ["http://other"], 0)  # type: ignore[arg-type]
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, content=answer))
    async with httpx2.AsyncClient(transport=transport) as client:
        assert await routes.models_of(client, "http://other", {}) == {}
    good = httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=json.dumps({"data": [{"id": "x"}]}))
    )
    async with httpx2.AsyncClient(transport=good) as client:
        assert len(await routes.models_of(client, "http://other", {})) == 1


@pytest.mark.parametrize("given", ["gateway:8000", "http://", "http://a b", "ftp://a"])
def test_other_gateways_are_urls(given: str) -> None:
    environment = {
        "GATEWAY_MODEL": "m", "GATEWAY_DECODER_ADDRESSES": "d:1", "GATEWAY_OTHER_GATEWAYS": given,
    }  # fmt: skip
    with pytest.raises(SettingsError, match="GATEWAY_OTHER_GATEWAYS"):
        GatewaySettings.from_environment(environment)
    environment["GATEWAY_OTHER_GATEWAYS"] = "http://a:80, https://b"
    settings = GatewaySettings.from_environment(environment)
    assert settings.others == ("http://a:80", "https://b")
