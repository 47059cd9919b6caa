"""A pytest plugin for vLLM's own test files: their servers are scripted ones of ours.

Modules of vLLM, and others that a test file imports but no server test needs, are stand-ins whose
every name is a mock. `tests.utils.RemoteOpenAIServer` starts `scripted_server` under the model's
name. Cases that ask no server are deselected.
"""

import base64
import http.server
import importlib.abc
import importlib.machinery
import io
import math
import os
import subprocess
import sys
import threading
import types
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import anthropic
import openai
import PIL.Image
import pytest
import transformers

_STAND_INS = (
    "vllm", "torch", "huggingface_hub", "tblib", "schemathesis", "openai_harmony",
    "tests.utils", "tests.conftest", "peft", "av", "pybase64",
    "gpt_oss", "safetensors", "datasets", "tensorizer", "librosa", "soundfile", "lm_eval",
)  # fmt: skip


_VOCAB_SIZE = 1 << 16  # as the scripted server's
_TOKENS_PER_WORD, _SHORT = 3, 4096
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_FIELDS = {
    "--return-tokens-as-token-ids": ("return_tokens_as_token_ids", True),
    "--enable-per-request-metrics": ("include_stage_times", True),
    "--enable-force-include-usage": ("stream_options", _USAGE),
}


class _StandIn(types.ModuleType):
    """A module in which every name is a mock."""

    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == base or name.startswith(f"{base}.") for base in _STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


class RemoteOpenAIServer:
    """What vLLM's tests start, and ask for its URL and clients."""

    DUMMY_API_KEY = "token-abc123"
    model = ""
    fields: ClassVar[dict[str, object]] = {}

    def __init__(self, model, vllm_serve_args=(), *, env_dict=None, **_):
        args = [str(arg) for arg in vllm_serve_args]
        RemoteOpenAIServer.model = _option(args, "--served-model-name") or model
        command = [
            os.environ["TRIPTYCH_PYTHON"], "-m", "tests.peers.scripted_server",
            "--served-model-name", RemoteOpenAIServer.model,
        ]  # fmt: skip
        if length := _option(args, "--max-model-len"):
            # Words of the scripted model's small vocabulary are a few tokens each.
            scale = _TOKENS_PER_WORD if int(length) <= _SHORT else 1
            command += ["--max-model-len", str(scale * int(length))]
        # What is an option of vLLM's server and a field of our requests is in each of them.
        RemoteOpenAIServer.fields = {
            name: value for option, (name, value) in _FIELDS.items() if option in args
        }
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            command += ["--api-key", key]
        if _option(args, "--reasoning-parser") and "function_calling" not in os.environ.get(
            "PYTEST_CURRENT_TEST", ""
        ):
            command.append("--thinks")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=os.environ["TRIPTYCH_ROOT"],
            env={**os.environ, "PYTHONPATH": os.environ["TRIPTYCH_ROOT"]},
        )  # fmt: skip
        line = self._process.stdout.readline()
        assert line.startswith("ready: "), line
        _, self.url_root, directory = line.split()
        Served.directory = directory
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port, self.uds = int(port), None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(30)

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


def _option(args, name):
    """Of several, the last."""
    found = None
    for index, arg in enumerate(args):
        if arg == name and index + 1 < len(args):
            found = args[index + 1]
        elif arg.startswith(f"{name}="):
            found = arg.partition("=")[2]
    return found


sys.meta_path.insert(0, _Finder())
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


class Served:
    """The model that is served, for cases that compare with its own tokenizer and processor."""

    directory = ""

    @staticmethod
    def tokenizer(*_, **__):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{Served.directory}/tokenizer.json",
            chat_template=Path(Served.directory, "chat_template.jinja").read_text(),
            eos_token="<|im_end|>",
        )

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


class _Assets:
    """Images under the names of vLLM's, of which the hub has the real ones."""

    def __init__(self):
        self._port = None
        assets = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = assets.data(self.path.rpartition("/")[2])
                self.send_response(200)
                self.send_header("Content-Type", "image/png")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def get_image_asset(self, name):
        shade = sum(name.encode()) % 256
        return PIL.Image.new("RGB", (320, 240), (shade, 255 - shade, 128))

    def data(self, name):
        buffer = io.BytesIO()
        self.get_image_asset(name).save(buffer, "PNG")
        return buffer.getvalue()

    def url_for(self, name):
        return f"http://127.0.0.1:{self._server.server_port}/{name}"


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
vllm.config.ModelConfig = lambda **_: SimpleNamespace(get_vocab_size=lambda: _VOCAB_SIZE)
weight_utils.download_weights_from_hf = lambda name, **_: name
vllm.multimodal.utils.encode_image_url = _encode_image_url
vllm.multimodal.utils.fetch_image = _fetch_image
vllm.multimodal.media.MediaWithBytes = _Bytes
transformers.AutoTokenizer = SimpleNamespace(from_pretrained=Served.tokenizer)
transformers.AutoProcessor = SimpleNamespace(from_pretrained=Served.processor)


@pytest.fixture(scope="session")
def local_asset_server():
    return _Assets()


@pytest.fixture
def image_url(request, local_asset_server):
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request, local_asset_server):
    return [local_asset_server.url_for(name) for name in request.param]


def _with_fields(build):
    """Requests have the fields that are options of vLLM's server."""

    def _build_request(self, options, **more):
        if isinstance(options.json_data, dict) and options.url.endswith("/completions"):
            for name, value in RemoteOpenAIServer.fields.items():
                options.json_data.setdefault(name, value)
        return build(self, options, **more)

    return _build_request


openai._base_client.BaseClient._build_request = _with_fields(
    openai._base_client.BaseClient._build_request
)


def _counts_equal(self, other):
    """Usage by its three counts: ours has details, too."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return all(getattr(self, name) == getattr(other, name, None) for name in names)


openai.types.CompletionUsage.__eq__ = _counts_equal
