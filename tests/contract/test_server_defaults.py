"""What an operator sets for all requests: names, chat template, its variables, sampling."""

import json

import numpy as np
import pytest

from services.common.settings import SettingsError
from services.gateway.app import create_gateway
from services.gateway.forms.openai import ChatRequest
from services.gateway.settings import GatewaySettings
from tests.gateway_stack import GatewayStack

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if style is defined %}[{{ style }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "own.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def stack(loop_thread, tmp_path_factory, template):
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("stack"), text_only=True, num_encoders=0,
        chat_template=template, served_model_name="first, second,first",
        default_chat_template_kwargs='{"enable_thinking": false, "style": "short"}',
        override_generation_config='{"temperature": 0.25, "top_k": 7, "max_new_tokens": 33}',
    )  # fmt: skip
    yield stack
    stack.close()


def prompt_of(stack, **fields):
    """The prompt that the decoder was sent for a chat request."""
    stack.reset()
    answer = stack.chat(**{"model": "first", **fields})
    assert answer.status_code == 200, answer.text
    (submit,) = stack.decoder.submits
    return b"".join(
        map(stack.tokenizer.token_bytes, np.frombuffer(submit.prompt_token_ids, np.int32).tolist())
    ).decode()


@pytest.mark.parametrize(
    "fields, style, thinks",
    [
        ({}, "short", False),
        ({"chat_template_kwargs": {"style": "long"}}, "long", False),
        ({"chat_template_kwargs": {"style": None}}, "short", False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "short", True),
        ({"enable_thinking": True}, "short", True),
        ({"reasoning_effort": "high"}, "short", True),
        ({"reasoning_effort": "none"}, "short", False),
    ],
)
def test_template_variables_have_the_servers_defaults(stack, fields, style, thinks):
    prompt = prompt_of(stack, **fields)
    assert f"[{style}]<assistant>" in prompt
    assert ("(no thoughts)" in prompt) is not thinks


def test_sampling_has_the_servers_defaults(stack):
    prompt_of(stack)
    sampling = stack.decoder.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.25, 7, 33)
    prompt_of(stack, temperature=1.5, top_k=0, max_tokens=5)
    sampling = stack.decoder.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (1.5, 0, 5)


def test_each_name_is_served_and_answers_have_the_first(stack):
    for name in ("first", "second"):
        stack.reset()
        answer = stack.chat(model=name)
        assert answer.json()["model"] == "first"
        with stack.client() as client:
            assert client.get(f"/v1/models/{name}").json()["id"] == name
            models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["first", "second"]
    assert stack.chat(model="third").status_code == 404


def test_the_template_is_told(stack):
    with stack.client() as client:
        assert client.get("/tokenizer_info").json()["chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("DEFAULT_CHAT_TEMPLATE_KWARGS", '{"colour": 1}', "no variable 'colour'.*enable_thinking"),
        ("DEFAULT_CHAT_TEMPLATE_KWARGS", '{"messages": []}', "no variable 'messages'"),
        ("DEFAULT_CHAT_TEMPLATE_KWARGS", "[1]", "not a JSON object"),
        ("DEFAULT_CHAT_TEMPLATE_KWARGS", "{", "not JSON"),
        ("OVERRIDE_GENERATION_CONFIG", '{"num_beams": 4}', "num_beams cannot be overridden"),
        ("OVERRIDE_GENERATION_CONFIG", '{"temperature": -1}', "temperature"),
        ("OVERRIDE_GENERATION_CONFIG", '{"top_p": "x"}', "top_p"),
        ("OVERRIDE_GENERATION_CONFIG", '{"max_new_tokens": 0.5}', "max_new_tokens"),
        ("CHAT_TEMPLATE", "/nowhere/t.jinja", "cannot read /nowhere/t.jinja"),
        ("CHAT_TEMPLATE", None, "not valid"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_at_the_start(
    stack, template, tmp_path, variable, value, message
):
    if value is None:
        (tmp_path / "bad.jinja").write_text("{% if %}")
        value = str(tmp_path / "bad.jinja")
    given = {
        "GATEWAY_MODEL": str(stack.model_directory), "GATEWAY_DECODER_ADDRESSES": "d:1",
        "GATEWAY_CHAT_TEMPLATE": str(template), f"GATEWAY_{variable}": value,
    }  # fmt: skip
    with pytest.raises(SettingsError, match=f"GATEWAY_{variable}.*{message}"):
        create_gateway(GatewaySettings.from_environment(given))


def test_an_override_of_no_sampling_is_greedy(stack):
    settings = stack.settings.model_copy(
        update={"override_generation_config": json.dumps({"do_sample": False})}
    )
    sampling = create_gateway(settings).service.sampling.read(
        ChatRequest(messages=[], model="m"), 100
    )
    assert sampling.temperature == 0.0
