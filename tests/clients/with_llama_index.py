"""llama-index-llms-openai-like."""

from typing import Literal

from cells import (
    CITIES,
    IMAGE,
    IMAGE_ANSWER,
    IMAGE_QUESTION,
    KEY,
    MODEL,
    QUESTION,
    URL,
    report,
)
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, max_tokens=200,
    is_function_calling_model=True, should_use_structured_outputs=True, max_retries=0,
    context_window=8192, temperature=0,
)  # fmt: skip


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def forecast(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather."""
    return "sunny"


TOOL = FunctionTool.from_defaults(forecast)


def text():
    assert model.complete(QUESTION).text


def image():
    blocks = [TextBlock(text=IMAGE_QUESTION), ImageBlock(path=IMAGE)]
    assert IMAGE_ANSWER in model.chat([ChatMessage(role="user", blocks=blocks)]).message.content


def streaming():
    deltas = [r.delta for r in model.stream_chat([ChatMessage(QUESTION)])]
    assert len(deltas) > 1
    assert "".join(d or "" for d in deltas) == model.chat([ChatMessage(QUESTION)]).message.content


def tools():
    answer = model.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(call.tool_kwargs["city"] in CITIES for call in calls)


def tools_streaming():
    stream = model.stream_chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    *_, last = stream
    calls = model.get_tool_calls_from_response(last)
    assert calls and all(call.tool_kwargs["city"] in CITIES for call in calls)


def structured():
    answer = model.as_structured_llm(Trip).complete(QUESTION)
    assert isinstance(answer.raw, Trip)


def completions():
    other = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=False)
    assert other.complete("A red", max_tokens=4).text


report(
    text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming,
    structured=structured, completions=completions,
)  # fmt: skip
