"""anthropic: Messages."""

import anthropic
from cells import (
    CITIES,
    IMAGE_ANSWER,
    IMAGE_QUESTION,
    IMAGE_URL,
    KEY,
    MODEL,
    ONE_CALL,
    PARAMETERS,
    QUESTION,
    URL,
    report,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": "forecast", "description": "The weather", "input_schema": PARAMETERS}]


def text():
    answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=100)
    assert answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 1


def image():
    data = IMAGE_URL.split(",")[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": IMAGE_QUESTION}]
    answer = client.messages.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=100
    )
    assert IMAGE_ANSWER in answer.content[0].text


def streaming():
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=100) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(deltas) > 1
    assert "".join(deltas) == final.content[0].text


def tools():
    first = client.messages.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=ONE_CALL, max_tokens=200
    )
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert all(call.name == "forecast" and call.input["city"] in CITIES for call in calls)
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "sunny"} for c in calls]
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(
        model=MODEL, messages=messages, tools=TOOLS, max_tokens=100
    ).content


def tools_streaming():
    with client.messages.stream(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=ONE_CALL, max_tokens=200
    ) as stream:
        final = stream.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    assert calls and all(call.input["city"] in CITIES for call in calls)


if __name__ == "__main__":
    report(
        text=text, image=image, streaming=streaming, tools=tools, tools_streaming=tools_streaming
    )
