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
    for _ in range(240):
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


def cells(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=100)
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=100)

    def text():
        for model in PROVIDERS:
            assert ask(client, HELLO, model).choices[0].message.content

    def image():
        parts = [{"type": "text", "text": IMAGE_QUESTION},
                 {"type": "image_url", "image_url": {"url": IMAGE_URL}}]  # fmt: skip
        answer = ask(client, [{"role": "user", "content": parts}])
        assert IMAGE_ANSWER in answer.choices[0].message.content

    def streaming():
        deltas = [c.choices[0].delta.content or "" for c in ask(client, HELLO, stream=True)]
        assert "".join(deltas) == ask(client, HELLO).choices[0].message.content

    def second_turn():
        for model in PROVIDERS:
            message = ask(client, HELLO, model).choices[0].message
            history = [*HELLO, message.model_dump(), *HELLO]
            assert ask(client, history, model).choices[0].message.content

    def tools():
        """A call, its result, and the answer to that."""
        for model in PROVIDERS:
            answer = ask(client, HELLO, model, tools=[TOOL], tool_choice="required")
            message = answer.choices[0].message
            call = message.tool_calls[0]
            assert json.loads(call.function.arguments)["city"] in CITIES
            results = [
                {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
                for made in message.tool_calls
            ]
            assert ask(client, [*HELLO, message.model_dump(), *results], model, tools=[TOOL])

    def effort():
        for model in PROVIDERS:
            assert ask(client, HELLO, model, reasoning_effort="low")

    def messages():
        options = {"model": "openai", "max_tokens": 100}
        first = claude.messages.create(messages=HELLO, **options)
        history = [*HELLO, {"role": "assistant", "content": first.model_dump()["content"]}, *HELLO]
        assert claude.messages.create(messages=history, **options).content[0].text

    def responses():
        first = client.responses.create(model="openai", input=QUESTION)
        history = [*HELLO, *[item.model_dump() for item in first.output], *HELLO]
        assert client.responses.create(model="openai", input=history).output_text

    return {
        "text": text, "image": image, "streaming": streaming, "tools": tools,
        "responses": responses, "second_turn": second_turn, "effort": effort, "messages": messages,
    }  # fmt: skip


with tempfile.TemporaryDirectory() as directory:
    port = free_port()
    proxy = start(directory, port)
    try:
        report_cells(**cells(f"http://127.0.0.1:{port}"))
    finally:
        proxy.terminate()
        proxy.wait()
