"""Extraction with a schema: a picture becomes an object whose fields and values are given.

Usage: python examples/extract.py demo/samples/shapes.png

The schema comes from a Pydantic model. The server allows only tokens that fit the schema, so the
answer of every model, however small, can be parsed.
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

Shape = Literal["circle", "square", "triangle", "star", "heart", "ring", "cross", "diamond"]
Colour = Literal["red", "green", "blue", "yellow", "orange", "purple", "pink", "brown"]


class Thing(BaseModel):
    """One thing of a picture."""

    shape: Shape
    colour: Colour


class Scene(BaseModel):
    """What a picture shows."""

    things: list[Thing] = Field(min_length=1, max_length=4)
    has_text: bool


def main() -> None:
    image = Path(sys.argv[1])
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    kind = mimetypes.guess_type(image)[0]
    url = f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "Which things are in the picture?"},
                ],
            }
        ],
        response_format=Scene,
        temperature=0,
        max_tokens=1000,
    )
    scene = answer.choices[0].message.parsed
    assert scene is not None, answer.choices[0].message.refusal
    for thing in scene.things:
        print(f"{thing.colour} {thing.shape}")
    print(f"has text: {scene.has_text}")


if __name__ == "__main__":
    main()
