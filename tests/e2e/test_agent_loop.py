"""An agent about an image, by the official client: the demonstration model calls tools because the
grammar makes it, gets results, and answers.
"""

import base64
import json

import httpx2
import openai
import pytest

from tests.e2e.serve_command import ServeCommand
from tests.noise import PATIENCE_S
from triptych.demo import SAMPLES

pytestmark = pytest.mark.e2e

COLOURS = ["red", "green", "blue", "yellow"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "crop",
            "description": "Cuts a region out of the image.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"region": {"enum": ["left", "right"]}, "zoom": {"enum": [1, 2]}},
                "required": ["region", "zoom"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "report",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": COLOURS}},
                "required": ["colour"],
            },
        },
    },
]


def image(name: str) -> dict:
    data = base64.b64encode((SAMPLES / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_two_calls_and_an_answer_about_an_image(demo: ServeCommand) -> None:
    question = {"type": "text", "text": "What colour is the circle?"}
    messages: list = [{"role": "user", "content": [image("shapes.png"), question]}]
    crop = {"type": "function", "function": {"name": "crop"}}
    url = f"{demo.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", timeout=PATIENCE_S) as client:
        model = client.models.list().data[0].id
        fields = {"model": model, "tools": TOOLS, "temperature": 0, "max_tokens": 200}

        choice = client.chat.completions.create(
            **fields, messages=messages, tool_choice=crop
        ).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert call.function.name == "crop"
        arguments = json.loads(call.function.arguments)
        assert arguments["region"] in ("left", "right") and arguments["zoom"] in (1, 2)
        result = {"role": "tool", "tool_call_id": call.id, "content": [image("shapes.png")]}
        messages += [choice.message, result]

        with client.chat.completions.stream(
            **fields, messages=messages, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            choice = stream.get_final_completion().choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert call.function.name in ("crop", "report")
        assert json.loads(call.function.arguments).keys() <= {"region", "zoom", "colour"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
        messages += [choice.message, result]

        last = client.chat.completions.create(**fields, messages=messages, tool_choice="none")
    choice = last.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content and not choice.message.tool_calls
    assert last.usage.prompt_tokens_details.image_tokens > 0


def test_a_call_and_a_schema_that_it_was_not_trained_for_end_soon(demo: ServeCommand) -> None:
    """Without a limit of the request's, the demonstration model goes on to a limit of its own."""
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "text": {"type": "string"}},
        "required": ["number", "text"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for fields in ({"tools": [tool], "tool_choice": "required"}, {"response_format": form}):
        body = {"messages": [{"role": "user", "content": "Who are you?"}], **fields}
        answer = httpx2.post(f"{demo.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 256
