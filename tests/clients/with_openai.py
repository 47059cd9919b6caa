"""openai: chat, the streaming helper, parse, tools, Responses, Completions."""

import json
from typing import Literal

import openai
from cells import (
    CITIES,
    IMAGE_ANSWER,
    IMAGE_QUESTION,
    IMAGE_URL,
    KEY,
    MODEL,
    PARAMETERS,
    QUESTION,
    URL,
    report,
)
from pydantic import BaseModel, ConfigDict

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": QUESTION}]
IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": IMAGE_QUESTION},
            {"type": "image_url", "image_url": {"url": IMAGE_URL}},
        ],
    }
]
FUNCTION = {"name": "forecast", "description": "The weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": {**FUNCTION, "strict": True}}]


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def text():
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def image():
    answer = client.chat.completions.create(model=MODEL, messages=IMAGE, temperature=0)
    assert IMAGE_ANSWER in answer.choices[0].message.content


def streaming():
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 1
    assert "".join(deltas) == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content


def check_call(function):
    assert function.name == "forecast"
    assert json.loads(function.arguments)["city"] in CITIES


def tools():
    first = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls:
        check_call(call.function)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=[*HELLO, message, *results], tools=TOOLS, max_tokens=50
    )
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


def tools_streaming():
    with client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    for call in final.choices[0].message.tool_calls:
        check_call(call.function)


def structured():
    parsed = client.chat.completions.parse(
        model=MODEL, messages=IMAGE, response_format=Trip, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Trip)


def structured_streaming():
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Trip, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Trip)


def responses():
    content = [
        {"type": "input_text", "text": IMAGE_QUESTION},
        {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
    ]
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], temperature=0
    )
    assert IMAGE_ANSWER in answer.output_text
    # The image is not sent again.
    again = client.responses.create(
        model=MODEL, input=IMAGE_QUESTION, previous_response_id=answer.id, temperature=0
    )
    assert IMAGE_ANSWER in again.output_text
    assert again.usage.input_tokens > answer.usage.input_tokens
    assert client.responses.retrieve(again.id) == again
    client.responses.delete(again.id)
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text != ""
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Trip, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Trip)
    called = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice="required",
        max_output_tokens=200,
    )
    check_call(next(item for item in called.output if item.type == "function_call"))


def completions():
    answer = client.completions.create(model=MODEL, prompt="A red", max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("A red")


if __name__ == "__main__":
    report(
        text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming,
        structured=structured, structured_streaming=structured_streaming, responses=responses,
        completions=completions,
    )  # fmt: skip
