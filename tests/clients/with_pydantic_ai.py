"""pydantic-ai: agents over chat completions and over Responses."""

import asyncio
import base64
from typing import Literal

from cells import (
    CITIES,
    IMAGE_ANSWER,
    IMAGE_QUESTION,
    IMAGE_URL,
    KEY,
    MODEL,
    QUESTION,
    URL,
    report,
)
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
settings = {"max_tokens": 200, "temperature": 0}


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def text():
    assert Agent(chat, model_settings=settings).run_sync(QUESTION).output


def image():
    image_part = BinaryContent(base64.b64decode(IMAGE_URL.split(",")[1]), media_type="image/png")
    answer = Agent(chat, model_settings=settings).run_sync([IMAGE_QUESTION, image_part])
    assert IMAGE_ANSWER in answer.output


def streaming():
    async def stream():
        async with Agent(chat, model_settings=settings).run_stream(QUESTION) as run:
            return [delta async for delta in run.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(stream())
    assert len(deltas) > 1
    assert "".join(deltas) == Agent(chat, model_settings=settings).run_sync(QUESTION).output


def tools():
    """An output tool: the model has to call it."""
    agent = Agent(chat, model_settings=settings, output_type=ToolOutput(Trip))
    assert agent.run_sync(QUESTION).output.city in CITIES


def tools_streaming():
    async def stream():
        agent = Agent(chat, model_settings=settings, output_type=ToolOutput(Trip))
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    assert asyncio.run(stream()).city in CITIES


def structured():
    agent = Agent(chat, model_settings=settings, output_type=NativeOutput(Trip))
    assert isinstance(agent.run_sync(QUESTION).output, Trip)


def responses():
    model = OpenAIResponsesModel(MODEL, provider=provider)
    assert Agent(model, model_settings=settings).run_sync(QUESTION).output
    agent = Agent(model, model_settings=settings, output_type=NativeOutput(Trip))
    assert isinstance(agent.run_sync(QUESTION).output, Trip)


report(
    text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming,
    structured=structured, responses=responses,
)  # fmt: skip
