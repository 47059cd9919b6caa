"""A LiteLLM proxy before the server, with OpenAI's and Anthropic's clients: two turns of each.

The second turn sends back what LiteLLM made of the first answer, fields of its own included.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path

import anthropic
import openai
from cells import CITIES, IMAGE_ANSWER, IMAGE_QUESTION, IMAGE_URL, MODEL, PARAMETERS, QUESTION, URL
from cells import report as report_cells

KEY = "sk-proxy"
HELLO = [{"role": "user", "content": QUESTION}]
FUNCTION = {"name": "forecast", "description": "The weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
PROVIDERS = ("openai", "hosted_vllm")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def start(directory, port):
    """The proxy, once it answers."""
    options = {"api_base": f"{URL}/v1", "api_key": "x"}
    models = [
        {"model_name": provider, "litellm_params": {"model": f"{provider}/{MODEL}", **options}}
        for provider in PROVIDERS
    ]
    config = {"model_list": models, "general_settings": {"master_key": KEY}}
    path = Path(directory, "config.yaml")
    path.write_text(json.dumps(config))  # which is YAML, too
    program = Path(sys.executable).with_name("litellm")
    command = [program, "--config", path, "--host", "127.0.0.1", "--port", str(port)]
    with Path(directory, "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
            return process
        except OSError:
            time.sleep(0.5)
    process.kill()
    raise RuntimeError(Path(directory, "log").read_text()[-500:])


def ask(client, messages, model="openai", **options):
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=100, temperature=0, **options
    )


def openai_cells(url):
    """Those of OpenAI's client."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=200)

    def text(model):
        assert ask(client, HELLO, model).choices[0].message.content

    def image(model):
        parts = [{"type": "text", "text": IMAGE_QUESTION},
                 {"type": "image_url", "image_url": {"url": IMAGE_URL}}]  # fmt: skip
        answer = ask(client, [{"role": "user", "content": parts}], model)
        assert IMAGE_ANSWER in answer.choices[0].message.content

    def streaming(model):
        stream = ask(client, HELLO, model, stream=True)
        deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(deltas) == ask(client, HELLO, model).choices[0].message.content

    def second_turn(model):
        message = ask(client, HELLO, model).choices[0].message
        history = [*HELLO, message.model_dump(), *HELLO]
        assert ask(client, history, model).choices[0].message.content

    def call(model):
        answer = ask(client, HELLO, model, tools=[TOOL], tool_choice="required")
        return answer.choices[0].message

    def tools(model):
        (made, *_) = call(model).tool_calls
        assert json.loads(made.function.arguments)["city"] in CITIES

    def tools_streaming(model):
        stream = ask(client, HELLO, model, tools=[TOOL], tool_choice="required", stream=True)
        pieces = [
            piece
            for chunk in stream
            if chunk.choices
            for piece in chunk.choices[0].delta.tool_calls or ()
        ]
        made = "".join(piece.function.arguments or "" for piece in pieces if piece.index == 0)
        assert json.loads(made)["city"] in CITIES

    def tool_result(model):
        message = call(model)
        results = [
            {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
            for made in message.tool_calls
        ]
        assert ask(client, [*HELLO, message.model_dump(), *results], model, tools=[TOOL])

    def structured(model):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
        answer = ask(client, HELLO, model, response_format=form).choices[0].message.content
        assert json.loads(answer)["city"] in CITIES

    def effort(model):
        assert ask(client, HELLO, model, reasoning_effort="low").choices[0].message.content

    def responses(model):
        assert client.responses.create(model=model, input=QUESTION).output_text

    def responses_second_turn(model):
        first = client.responses.create(model=model, input=QUESTION)
        history = [*HELLO, *[item.model_dump() for item in first.output], *HELLO]
        assert client.responses.create(model=model, input=history).output_text

    return (
        text, image, streaming, tools, tools_streaming, structured, responses, second_turn,
        tool_result, effort, responses_second_turn,
    )  # fmt: skip


def messages_cells(url):
    """Those of Anthropic's client."""
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=200)

    def messages(model):
        answer = claude.messages.create(model=model, max_tokens=100, messages=HELLO)
        assert answer.content[0].text

    def messages_second_turn(model):
        options = {"model": model, "max_tokens": 100}
        first = claude.messages.create(messages=HELLO, **options)
        history = [*HELLO, {"role": "assistant", "content": first.model_dump()["content"]}, *HELLO]
        assert claude.messages.create(messages=history, **options).content[0].text

    def messages_streaming(model):
        with claude.messages.stream(model=model, max_tokens=100, messages=HELLO) as stream:
            assert "".join(stream.text_stream) == stream.get_final_text() != ""

    return messages, messages_second_turn, messages_streaming


def for_all(cell):
    """With each of LiteLLM's providers of such servers."""
    for model in PROVIDERS:
        cell(model)


with tempfile.TemporaryDirectory() as directory:
    port = free_port()
    proxy = start(directory, port)
    try:
        url = f"http://127.0.0.1:{port}"
        found = (*openai_cells(url), *messages_cells(url))
        report_cells(**{cell.__name__: partial(for_all, cell) for cell in found})
    finally:
        proxy.terminate()
        proxy.wait()
