"""A pytest plugin for vLLM's own test files: their servers are scripted ones of ours.

Modules of vLLM, and others that a test file imports but no server test needs, are stand-ins whose
every name is a mock. `tests.utils.RemoteOpenAIServer` starts `scripted_server` under the model's
name. Cases that ask no server are deselected.
"""

import base64
import io
import math
import os
import urllib.request
from types import SimpleNamespace
from typing import ClassVar

import anthropic
import openai
import PIL.Image
import pytest
import transformers
from shim import (
    VOCAB_SIZE,
    Assets,
    ScriptedServer,
    Served,
    StandIns,
    change_requests,
    option,
    scaled_length,
)

_STAND_INS = (
    "vllm", "torch", "huggingface_hub", "tblib", "schemathesis", "openai_harmony",
    "tests.utils", "tests.conftest", "peft", "av", "pybase64",
    "gpt_oss", "safetensors", "datasets", "tensorizer", "librosa", "soundfile", "lm_eval",
)  # fmt: skip


_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_FIELDS = {
    "--return-tokens-as-token-ids": ("return_tokens_as_token_ids", True),
    "--enable-per-request-metrics": ("include_stage_times", True),
    "--enable-force-include-usage": ("stream_options", _USAGE),
}


class RemoteOpenAIServer:
    """What vLLM's tests start, and ask for its URL and clients."""

    DUMMY_API_KEY = "token-abc123"
    model = ""
    fields: ClassVar[dict[str, object]] = {}

    def __init__(self, model, vllm_serve_args=(), *, env_dict=None, **_):
        args = [str(arg) for arg in vllm_serve_args]
        RemoteOpenAIServer.model = option(args, "--served-model-name") or model
        options = []
        if length := option(args, "--max-model-len"):
            options += ["--max-model-len", scaled_length(length)]
        # What is an option of vLLM's server and a field of our requests is in each of them.
        RemoteOpenAIServer.fields = {
            name: value for flag, (name, value) in _FIELDS.items() if flag in args
        }
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            options += ["--api-key", key]
        if option(args, "--reasoning-parser") and "function_calling" not in os.environ.get(
            "PYTEST_CURRENT_TEST", ""
        ):
            options.append("--thinks")
        self._server = ScriptedServer(RemoteOpenAIServer.model, *options)
        self.url_root = self._server.url
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port, self.uds = int(port), None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop()

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _options(self, options):
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60, **options}

    def get_client(self, **options):
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options):
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))


StandIns(_STAND_INS)
import tests.utils  # noqa: E402 - a stand-in

tests.utils.RemoteOpenAIServer = RemoteOpenAIServer
tests.utils.ROCM_EXTRA_ARGS = []
tests.utils.ROCM_ENV_OVERRIDES = {}


def pytest_collection_modifyitems(config, items):
    """Keeps cases with a server: of a fixture, or started by themselves."""
    kept, left = [], []
    for item in items:
        names = set(item.fixturenames)
        asks = any("client" in name or "server" in name for name in names)
        (kept if asks else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


class _Processor:
    """Qwen's processor, for cases that count tokens of images."""

    @staticmethod
    def processor(*_, **__):
        """Counts a prompt's tokens as Qwen's processor does: one for 32 x 32 pixels."""
        tokenizer = Served.tokenizer()

        def render(messages, **_):
            return messages[0]["content"].partition("|>\n")[2]

        def count(text, images, **_):
            parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
            message = {"role": "user", "content": parts}
            ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)
            ids = ids if isinstance(ids, list) else ids["input_ids"]
            total = len(ids) + sum(_image_tokens(image.size) - 1 for image in images)
            return SimpleNamespace(input_ids=SimpleNamespace(shape=(1, total)))

        count.tokenizer = SimpleNamespace(apply_chat_template=render)
        return count


def _image_tokens(size):
    lowest, highest, side = 65536, 1 << 20, 32
    width, height = (max(side, round(n / side) * side) for n in size)
    area = size[0] * size[1]
    if width * height > highest:
        scale = math.sqrt(area / highest)
        width, height = (max(side, math.floor(n / scale / side) * side) for n in size)
    elif width * height < lowest:
        scale = math.sqrt(lowest / area)
        width, height = (math.ceil(n * scale / side) * side for n in size)
    return width * height // side**2


def _encode_image_url(image, **_):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _fetch_image(url, **_):
    if url.startswith("data:"):
        return PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    with urllib.request.urlopen(url) as answer:
        return PIL.Image.open(io.BytesIO(answer.read()))


class _Bytes:
    """Nothing is an instance of it."""


import vllm.config  # noqa: E402
import vllm.model_executor.model_loader.weight_utils as weight_utils  # noqa: E402
import vllm.multimodal.media  # noqa: E402
import vllm.multimodal.utils  # noqa: E402
import vllm.tokenizers  # noqa: E402

vllm.tokenizers.get_tokenizer = Served.tokenizer
vllm.config.ModelConfig = lambda **_: SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE)
weight_utils.download_weights_from_hf = lambda name, **_: name
vllm.multimodal.utils.encode_image_url = _encode_image_url
vllm.multimodal.utils.fetch_image = _fetch_image
vllm.multimodal.media.MediaWithBytes = _Bytes
transformers.AutoTokenizer = SimpleNamespace(from_pretrained=Served.tokenizer)
transformers.AutoProcessor = SimpleNamespace(from_pretrained=_Processor.processor)


@pytest.fixture(scope="session")
def local_asset_server():
    return Assets()


@pytest.fixture
def image_url(request, local_asset_server):
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request, local_asset_server):
    return [local_asset_server.url_for(name) for name in request.param]


def _add_fields(url, body):
    """Requests have the fields that are options of vLLM's server."""
    if url.endswith("/completions"):
        for name, value in RemoteOpenAIServer.fields.items():
            body.setdefault(name, value)


change_requests(_add_fields)


def _counts_equal(self, other):
    """Usage by its three counts: ours has details, too."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return all(getattr(self, name) == getattr(other, name, None) for name in names)


openai.types.CompletionUsage.__eq__ = _counts_equal
