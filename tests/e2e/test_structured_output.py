"""Answers of a given form, by the official client, with everything that they combine with."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.serve_command import ServeCommand
from tests.noise import PATIENCE_S
from triptych.demo import SAMPLES

pytestmark = pytest.mark.e2e

COLOURS = ["red", "green", "blue", "yellow"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue", "yellow"]
    name: str = Field(max_length=12)
    sizes: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=3)


@pytest.fixture(scope="module")
def client(demo: ServeCommand) -> Iterator[openai.OpenAI]:
    url = f"{demo.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", timeout=PATIENCE_S) as client:
        yield client


def about_an_image(text: str = "What colour is the circle?") -> list:
    data = base64.b64encode((SAMPLES / "shapes.png").read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}],
        }
    ]


def ask(client: openai.OpenAI, **fields):
    given = {"model": "triptych-demo", "messages": about_an_image(), "temperature": 0}
    return client.chat.completions.create(**(given | fields))


def form(**options: object) -> dict:
    schema = {"name": "shape", "schema": Shape.model_json_schema(), **options}
    return {"type": "json_schema", "json_schema": schema}


def test_a_choice_about_an_image_is_the_right_one(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"structured_outputs": {"choice": COLOURS}}).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("red", "stop")


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="triptych-demo", messages=about_an_image(), response_format=Shape, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)


def test_choices_seeds_logprobs_penalties_and_streams(client: openai.OpenAI) -> None:
    fields = {
        "response_format": form(strict=True), "n": 3, "seed": 5, "temperature": 1.2,
        "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "max_tokens": 300,
    }  # fmt: skip
    whole = ask(client, **fields)
    contents = [choice.message.content for choice in whole.choices]
    assert len(set(contents)) == 3
    for choice in whole.choices:
        Shape.model_validate_json(choice.message.content)
        text = "".join(token.token for token in choice.logprobs.content)
        assert text.startswith(choice.message.content)
    streamed = ["", "", ""]
    for chunk in ask(client, **fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == contents


def test_a_stop_string_or_the_length_leaves_a_prefix(client: openai.OpenAI) -> None:
    fields = {"response_format": form(), "seed": 3, "temperature": 1.0}
    whole = ask(client, **fields, max_tokens=300).choices[0].message.content
    Shape.model_validate_json(whole)
    cut = ask(client, **fields, max_tokens=9).choices[0]
    assert cut.finish_reason == "length"
    assert whole.startswith(cut.message.content) and cut.message.content
    stopped = ask(client, **fields, stop='"name"').choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index('"name"')]


def test_the_form_outlives_bounds_of_its_length(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": "[ab]{4,9}"}, "ignore_eos": True, "min_tokens": 7}
    answer = ask(client, max_tokens=40, temperature=1.0, extra_body=body).choices[0]
    assert re.fullmatch("[ab]{7,9}", answer.message.content) and answer.finish_reason == "stop"
    objects = ask(client, max_tokens=200, response_format={"type": "json_object"}, temperature=1.5)
    text = objects.choices[0].message.content
    if objects.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.lstrip().startswith("{")


def test_allowed_ids_and_bad_words(client: openai.OpenAI) -> None:
    free = ask(client, max_tokens=8, logprobs=True, top_logprobs=5).choices[0]
    assert "red" in free.message.content
    answer = ask(client, max_tokens=8, extra_body={"bad_words": ["red"]}).choices[0]
    assert "red" not in answer.message.content.split()
    ids = client.post("/../tokenize", body={"prompt": "blue"}, cast_to=object)["tokens"]
    answer = ask(client, max_tokens=6, extra_body={"allowed_token_ids": ids}).choices[0]
    assert set(answer.message.content) <= set("blue")


def outputs(**fields: object) -> dict:
    return {"extra_body": {"structured_outputs": fields}}


UNKNOWN = {"not": {}}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        (
            {"response_format": form(schema=UNKNOWN)},
            "response_format.json_schema.schema.not",
            "not",
        ),
        (outputs(regex="a(?=b)"), "structured_outputs.regex", "look"),
        (outputs(grammar="start: x"), "structured_outputs.grammar", "x"),
        (outputs(choice=["a"], regex="b"), "structured_outputs", "one of"),
        ({"extra_body": {"allowed_token_ids": [10**6]}}, "allowed_token_ids[0]", "below"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_field_and_keyword(
    client: openai.OpenAI, fields: dict, param: str, word: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, stream=stream, **fields)
    assert refused.value.param == param and word in refused.value.message
