"""langchain-openai: ChatOpenAI, a tool loop, with_structured_output."""

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
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

model = ChatOpenAI(
    model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=200
)
content = [
    {"type": "text", "text": IMAGE_QUESTION},
    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
]


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@tool
def forecast(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather."""
    return "sunny"


def text():
    assert model.invoke(QUESTION).content


def image():
    assert IMAGE_ANSWER in model.invoke([HumanMessage(content=content)]).content


def streaming():
    chunks = [chunk.content for chunk in model.stream(QUESTION)]
    assert len(chunks) > 2
    assert "".join(chunks) == model.invoke(QUESTION).content


def tools():
    bound = model.bind_tools([forecast], tool_choice="any", strict=True)
    messages = [HumanMessage(content=QUESTION)]
    answer = bound.invoke(messages)
    assert answer.tool_calls and all(c["args"]["city"] in CITIES for c in answer.tool_calls)
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    after = model.bind_tools([forecast]).invoke([*messages, answer, *results])
    assert after.content or after.tool_calls


def tools_streaming():
    whole = None
    for chunk in model.bind_tools([forecast], tool_choice="any").stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls and all(c["args"]["city"] in CITIES for c in whole.tool_calls)


def structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            model.with_structured_output(Trip, method=method).invoke(QUESTION), Trip
        ), method


def responses():
    other = ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, use_responses_api=True
    )
    assert other.invoke(QUESTION).text


report(
    text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming,
    structured=structured, responses=responses,
)  # fmt: skip
