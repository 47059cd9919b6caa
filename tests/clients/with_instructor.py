"""instructor: its modes over chat completions."""

from typing import Literal

import instructor
import openai
from cells import IMAGE_QUESTION, IMAGE_URL, KEY, MODEL, QUESTION, URL, report
from pydantic import BaseModel, ConfigDict

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def ask(mode, content=QUESTION, **options):
    return instructor.from_openai(plain, mode=mode).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], response_model=Trip,
        max_retries=0, max_tokens=200, **options,
    )  # fmt: skip


def image():
    image_part = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    text = {"type": "text", "text": IMAGE_QUESTION}
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA, [text, image_part]), Trip)


def streaming():
    model = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    partial = model.chat.completions.create_partial(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_model=Trip,
        max_tokens=200,
    )  # fmt: skip
    *_, last = partial
    assert last.city in ("Paris", "Rome")


def tools():
    assert isinstance(ask(instructor.Mode.TOOLS), Trip)
    assert isinstance(ask(instructor.Mode.TOOLS_STRICT), Trip)


def structured():
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Trip)


report(image=image, streaming=streaming, tools=tools, structured=structured)
