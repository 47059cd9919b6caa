"""A gateway for a text model: one decoder, and no encoder anywhere."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from services.common.settings import SettingsError
from services.gateway.app import create_gateway
from services.gateway.settings import GatewaySettings
from tests.fakes import FakeEncoder
from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import GatewayStack
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import write_model_directory


@pytest.fixture(scope="module")
def stack(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("text"), text_only=True, num_encoders=0,
        log_level="ERROR",
    )  # fmt: skip
    yield stack
    stack.close()


def test_it_is_ready_with_a_decoder_alone(stack):
    ready = httpx2.get(f"{stack.url}/ready", timeout=PATIENCE_S)
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_it_reports_no_encoders_as_missing(stack):
    value = stack.gateway.metrics.registry.get_sample_value
    assert value("triptych_gateway_healthy_pods", {"service": "decoder"}) == 1
    assert value("triptych_gateway_healthy_pods", {"service": "encoder"}) is None


def test_it_answers_whole_and_streamed(stack):
    assert stack.chat().json()["choices"][0]["message"]["content"] == "A red circle."
    lines = stack.chat(stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    text = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert "".join(text) == "A red circle."
    submit = stack.decoder.submits[-1]
    assert (submit.positions, submit.position_delta) == (b"", 0)


def test_text_parts_are_one_text(stack):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    stack.chat(messages=[{"role": "user", "content": parts}])
    stack.chat(messages=[{"role": "user", "content": "one\ntwo"}])
    first, second = stack.decoder.submits[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": asking("data:image/png;base64,AAAA")}, "messages[0].content[0]"),
        ({"min_pixels": 100}, "min_pixels"),
        ({"max_pixels": 100}, "max_pixels"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"chat_template_kwargs": {"add_vision_id": True}}, "chat_template_kwargs.add_vision_id"),
    ],
)
def test_images_are_refused_by_field(stack, fields, param):
    num_submits = len(stack.decoder.submits)
    response = stack.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(stack.decoder.submits) == num_submits


def test_an_image_cannot_be_tokenized(stack):
    response = httpx2.post(
        f"{stack.url}/tokenize", json={"messages": asking(image_url())}, timeout=PATIENCE_S
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "messages[0].content[0]: the model takes no images"
    )


def test_the_models_list_names_it(stack):
    listed = httpx2.get(f"{stack.url}/v1/models", timeout=PATIENCE_S).json()
    (model,) = listed["data"]
    assert (model["id"], model["input_modalities"]) == ("tiny", ["text"])
    assert model["can_switch_thinking"] is True


def test_decoder_addresses_are_needed(tmp_path):
    with pytest.raises(SettingsError, match="GATEWAY_DECODER_ADDRESSES"):
        GatewaySettings.from_environment({"GATEWAY_MODEL": str(tmp_path)})


def test_encoder_addresses_of_a_text_model_are_not_dialled(loop_thread, tmp_path):
    encoder = FakeEncoder()
    address = loop_thread.run(encoder.start())
    stack = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0, encoder_addresses=address
    )
    try:
        assert stack.chat().status_code == 200
        assert not stack.gateway.service.encoders.pods
    finally:
        stack.close()
        loop_thread.run(encoder.stop())


def test_a_vision_model_without_encoders_is_refused_at_start(tmp_path):
    settings = GatewaySettings(
        model=write_model_directory(tmp_path / "vision"), decoder_addresses="d:1"
    )
    with pytest.raises(SettingsError, match="GATEWAY_ENCODER_ADDRESSES"):
        create_gateway(settings)
