"""What the plugins for other systems' tests share: stand-ins for modules that the tests import, the
process of the scripted server, and the tokenizer of the model that it serves.
"""

import http.server
import importlib.abc
import importlib.machinery
import io
import os
import re
import socket
import subprocess
import sys
import threading
import types
from json import dumps, loads
from pathlib import Path
from unittest.mock import MagicMock

import openai
import PIL.Image
import requests
import transformers

VOCAB_SIZE = 1 << 16  # as the scripted server's
# Words of the scripted model's small vocabulary are a few tokens each.
_TOKENS_PER_WORD, _SHORT = 3, 4096
_PATIENCE_S = 30


class _StandIn(types.ModuleType):
    """A module in which every name is a mock."""

    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for modules and all that is below them.

    Args:
        names: the modules.
        real: modules below them that are imported from `folders`.
        folders: folder of each stand-in that has real modules below it, by its name.
    """

    def __init__(self, names, real=(), folders=None):
        self._names, self._real, self._folders = names, real, folders or {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if _is_below(name, self._names) and not _is_below(name, self._real):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        if folder := self._folders.get(module.__name__):
            module.__path__ = [str(folder)]


def _is_below(name, bases):
    return any(name == base or name.startswith(f"{base}.") for base in bases)


def scaled_length(length):
    """The context that the scripted model needs for what fits `length` tokens of another model."""
    return (_TOKENS_PER_WORD if int(length) <= _SHORT else 1) * int(length)


class ScriptedServer:
    """The scripted server in a process of its own.

    Args:
        name: name of the served model.
        options: more options of `scripted_server`.

    Attributes:
        url: the server's, without `/v1`.
        process: the process.
    """

    def __init__(self, name, *options):
        root = os.environ["TRIPTYCH_ROOT"]
        command = [
            os.environ["TRIPTYCH_PYTHON"], "-m", "tests.peers.scripted_server",
            "--served-model-name", name, *map(str, options),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": root},
        )  # fmt: skip
        line = self.process.stdout.readline()
        assert line.startswith("ready: "), line
        _, self.url, directory = line.split()
        Served.directory = directory

    def stop(self):
        self.process.terminate()
        self.process.wait(_PATIENCE_S)
        self.process.stdout.close()


class Served:
    """The model that is served, for cases that compare with its own tokenizer."""

    directory = ""

    @staticmethod
    def tokenizer(*_, **__):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{Served.directory}/tokenizer.json",
            chat_template=Path(Served.directory, "chat_template.jinja").read_text(),
            eos_token="<|im_end|>",
        )


class Assets:
    """A server of images that stand in for those of other servers: each name is of a colour."""

    def __init__(self):
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


def free_port():
    """A port on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def option(args, name):
    """The value of an option among `args`; of several, the last. None if it is not there."""
    found = None
    for index, arg in enumerate(args):
        if arg == name and index + 1 < len(args):
            found = args[index + 1]
        elif arg.startswith(f"{name}="):
            found = arg.partition("=")[2]
    return found


def replace_images(pattern):
    """Serves an image in place of each whose URL matches `pattern`, in what `requests` fetches and
    sends. Group 1 of the pattern is the image's name.
    """
    assets, send = Assets(), requests.Session.request

    def local(found):
        return assets.url_for(found[1])

    def request(self, method, url, *rest, json=None, **more):
        if json is not None:
            json = loads(re.sub(pattern, local, dumps(json)))
        return send(self, method, re.sub(pattern, local, url), *rest, json=json, **more)

    requests.Session.request = request


def change_requests(change):
    """Calls `change` with each request's URL and JSON before OpenAI's client sends it."""
    build = openai._base_client.BaseClient._build_request

    def _build_request(self, options, **more):
        if isinstance(options.json_data, dict):
            change(options.url, options.json_data)
        return build(self, options, **more)

    openai._base_client.BaseClient._build_request = _build_request
