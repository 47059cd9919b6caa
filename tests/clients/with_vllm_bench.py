"""The request functions of `vllm bench serve`; VLLM_SOURCE is an unpacked source distribution."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import aiohttp
from cells import IMAGE_ANSWER, IMAGE_QUESTION, IMAGE_URL, MODEL, QUESTION, URL, report

path = Path(os.environ["VLLM_SOURCE"]) / "vllm/benchmarks/lib/endpoint_request_func.py"
spec = importlib.util.spec_from_file_location("endpoint_request_func", path)
bench = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = bench
spec.loader.exec_module(bench)


def ask(backend, endpoint, prompt=QUESTION, **fields):
    async def send():
        async with aiohttp.ClientSession() as session:
            request = bench.RequestFuncInput(
                prompt=prompt, api_url=f"{URL}{endpoint}", prompt_len=8, output_len=24, model=MODEL,
                ignore_eos=True, **fields,
            )  # fmt: skip
            return await bench.ASYNC_REQUEST_FUNCS[backend](request, session)

    output = asyncio.run(send())
    assert output.success, output.error
    assert output.output_tokens == 24
    assert output.ttft > 0 and len(output.itl) > 1
    return output.generated_text


def text():
    assert ask("openai-chat", "/v1/chat/completions")


def image():
    image_part = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    answer = ask(
        "openai-chat", "/v1/chat/completions", IMAGE_QUESTION, multi_modal_content=image_part
    )
    assert IMAGE_ANSWER in answer


def responses():
    assert ask("openai-responses", "/v1/responses")


def completions():
    assert ask("vllm", "/v1/completions")


report(text=text, image=image, streaming=text, responses=responses, completions=completions)
