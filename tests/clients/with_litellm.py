"""litellm: its openai provider, its hosted_vllm provider, its Responses bridge."""

import json
from typing import Literal

import litellm
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

litellm.suppress_debug_info = True
litellm.telemetry = False
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


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def ask(messages=HELLO, provider="openai", **options):
    return litellm.completion(
        model=f"{provider}/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, messages=messages,
        max_retries=0, max_tokens=200, temperature=0, **options,
    )  # fmt: skip


def text():
    for provider in ("openai", "hosted_vllm"):
        assert ask(provider=provider).choices[0].message.content


def image():
    assert IMAGE_ANSWER in ask(IMAGE).choices[0].message.content


def streaming():
    deltas = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert len(deltas) > 2
    assert "".join(deltas) == ask().choices[0].message.content


def tools():
    answer = ask(tools=[{"type": "function", "function": FUNCTION}], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert calls and all(json.loads(c.function.arguments)["city"] in CITIES for c in calls)


def tools_streaming():
    stream = ask(
        tools=[{"type": "function", "function": FUNCTION}], tool_choice="required", stream=True
    )
    whole = litellm.stream_chunk_builder(list(stream))
    calls = whole.choices[0].message.tool_calls
    assert calls and all(json.loads(c.function.arguments)["city"] in CITIES for c in calls)


def structured():
    Trip.model_validate_json(ask(response_format=Trip).choices[0].message.content)


def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, input=QUESTION
    )
    assert answer.output[-1].content[0].text


def completions():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY,
        prompt="A red", max_tokens=4,
    )  # fmt: skip
    assert answer.choices[0].text


report(
    text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming,
    structured=structured, responses=responses, completions=completions,
)  # fmt: skip
