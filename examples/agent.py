"""An agent with tools: the model looks up what a picture does not show, then answers.

Usage: python examples/agent.py demo/samples/shapes.png "How many of the circle are in stock?"
"""

import base64
import json
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_TURNS = 4
SHAPES = ["circle", "square", "triangle", "star", "heart", "ring", "cross", "diamond"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "in_stock",
            "description": "Returns how many pieces of a shape are in stock.",
            "strict": True,  # The arguments then always fit the schema.
            "parameters": {
                "type": "object",
                "properties": {"shape": {"type": "string", "enum": SHAPES}},
                "required": ["shape"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Returns the price of a shape in euros.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"shape": {"type": "string", "enum": SHAPES}},
                "required": ["shape"],
                "additionalProperties": False,
            },
        },
    },
]


def call(name: str, arguments: dict[str, str]) -> int:
    """Runs a tool. A real one would ask a database."""
    number = SHAPES.index(arguments["shape"]) + 1
    return {"in_stock": 12 * number, "price": 5 * number}[name]


def main() -> None:
    image, question = Path(sys.argv[1]), sys.argv[2]
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    kind = mimetypes.guess_type(image)[0]
    url = f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    messages: list[Any] = [{"role": "user", "content": content}]
    for turn in range(MAX_TURNS):
        # The first turn has to call a tool, and the last one has to answer.
        choice: Any = {0: "required", MAX_TURNS - 1: "none"}.get(turn, "auto")
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=500,
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(f"answer: {message.content}")
            return
        for tool_call in message.tool_calls:
            if tool_call.type == "function":
                arguments = json.loads(tool_call.function.arguments)
                result = call(tool_call.function.name, arguments)
                print(f"{tool_call.function.name}({arguments['shape']}) = {result}")
                messages.append(
                    {"role": "tool", "tool_call_id": tool_call.id, "content": str(result)}
                )


if __name__ == "__main__":
    main()
