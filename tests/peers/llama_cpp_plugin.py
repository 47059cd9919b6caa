"""A pytest plugin for llama.cpp's own server tests: their servers are scripted ones of ours.

llama.cpp's server takes any `model`, and has OpenAI's paths without /v1, too: requests get the
name that is served, and /v1. Words and numbers of tokens of its model are not compared.
"""

import os
import re
from unittest.mock import ANY

from shim import (
    ScriptedServer,
    StandIns,
    change_requests,
    free_port,
    replace_images,
    scaled_length,
)

StandIns(("wget",))
import utils  # noqa: E402 - llama.cpp's

os.environ["PORT"] = str(free_port())

_MODEL = "scripted"
_PATHS = re.compile(r"^/(chat/completions|embeddings|models|responses)\b")
# A pattern that is words of another model's answer, such as "(going|bed)+".
_WORDS = re.compile(r"[\w|()+ ',.*^$!?]*")
_COUNTS = ("n_prompt",)

_match_regex = utils.match_regex
_make_request = utils.ServerProcess.make_request
_make_stream_request = utils.ServerProcess.make_stream_request


class _Running:
    """The server of the cases before, which the next case uses if it wants the same."""

    server, wanted = None, ()

    @classmethod
    def start(cls, name, *options):
        wanted = (name, *options)
        # A case about a cache needs one that is empty.
        if cls.wanted != wanted or "cache" in os.environ.get("PYTEST_CURRENT_TEST", ""):
            cls.stop()
            cls.server, cls.wanted = ScriptedServer(name, *options), wanted

    @classmethod
    def stop(cls):
        if cls.server is not None:
            cls.server.stop()
        cls.server, cls.wanted = None, ()


def _start(self, timeout_seconds=0):
    options = ["--port", self.server_port]
    if self.n_ctx:
        options += ["--max-model-len", scaled_length(self.n_ctx // (self.n_slots or 1))]
    if self.api_key:
        options += ["--api-key", self.api_key]
    _Running.start(self.model_alias or _MODEL, *options)
    utils.server_instances.add(self)
    self.ready = True


def _stop(self):
    utils.server_instances.discard(self)


def pytest_sessionfinish():
    _Running.stop()


def _named(url, body):
    """A request names the model that is served."""
    if "model" in body or url.endswith(("/completions", "/messages", "/responses")):
        body["model"] = _Running.wanted[0]


def _request(self, method, path, data=None, *rest, **more):
    return _make_request(self, method, *_changed(method, path, data), *rest, **more)


def _stream_request(self, method, path, data=None, *rest, **more):
    return _make_stream_request(self, method, *_changed(method, path, data), *rest, **more)


def _changed(method, path, data):
    path = _PATHS.sub(r"/v1/\1", path)
    if method == "POST" and isinstance(data, dict) and path.startswith("/v1/"):
        data = dict(data)
        _named(path, data)
    return path, data


def _matches(regex, text):
    if _WORDS.fullmatch(regex):
        return isinstance(text, str)
    return _match_regex(regex, text)


utils.ServerProcess.start = _start
utils.ServerProcess.stop = _stop
utils.ServerProcess.make_request = _request
utils.ServerProcess.make_stream_request = _stream_request
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = _matches
replace_images(r"https://huggingface\.co/[^\"]*/([\w.]+\.png)")
change_requests(_named)


def pytest_collection_modifyitems(items):
    """Numbers of another model's tokens are equal to any."""
    for item in items:
        if callspec := getattr(item, "callspec", None):
            callspec.params.update({name: ANY for name in _COUNTS if name in callspec.params})
