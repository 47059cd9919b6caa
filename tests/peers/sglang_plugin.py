"""A pytest plugin for SGLang's own test files: their servers are scripted ones of ours.

Modules of SGLang are stand-ins whose every name is a mock, but for the kits, which are cases that
several files share. `popen_launch_server` starts `scripted_server` under the model's name.
"""

import ast
import base64
import os
import sys
import unittest
from pathlib import Path

from shim import (
    ScriptedServer,
    Served,
    StandIns,
    free_port,
    option,
    replace_images,
)

_SOURCE = Path(os.environ["PEER_SOURCE"])
_TESTS = _SOURCE / "python/sglang/test"

StandIns(
    ("sglang", "torch"),
    real=("sglang.test.kits",),
    folders={"sglang.test": _TESTS},
)
import sglang.srt.utils  # noqa: E402 - a stand-in
import sglang.srt.utils.hf_transformers_utils  # noqa: E402
import sglang.test.test_utils  # noqa: E402

sys.modules["pybase64"] = base64  # of which it is a faster twin

replace_images(r"https://raw\.githubusercontent\.com/[^\"]*/([\w.]+\.png)")

_servers = {}  # by the process id


def _constants(file):
    """Names and values of a module's constants."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                yield target.id, node.value.value


def _launch(model, base_url, timeout, api_key=None, other_args=(), **_):
    args = [str(arg) for arg in other_args or ()]
    options = ["--port", base_url.rpartition(":")[2]]
    if api_key or (api_key := option(args, "--api-key")):
        options += ["--api-key", api_key]
    for name in ("--context-length", "--context-len"):
        if length := option(args, name):
            options += ["--max-model-len", length]
    if option(args, "--reasoning-parser"):
        options.append("--thinks")
    server = ScriptedServer(option(args, "--served-model-name") or model, *options)
    _servers[server.process.pid] = server
    return server.process


def _kill(pid, *_, **__):
    if server := _servers.pop(pid, None):
        server.stop()


for name, value in _constants(_TESTS / "test_utils.py"):
    setattr(sglang.test.test_utils, name, value)
sglang.test.test_utils.DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{free_port()}"
sglang.test.test_utils.CustomTestCase = unittest.TestCase
sglang.test.test_utils.popen_launch_server = _launch
sglang.test.test_utils.is_in_ci = sglang.test.test_utils.is_in_amd_ci = lambda: False
sglang.srt.utils.kill_process_tree = _kill
sglang.srt.utils.hf_transformers_utils.get_tokenizer = Served.tokenizer
sglang.srt.utils.get_bool_env_var = lambda *_, **__: False


def pytest_runtest_teardown(nextitem):
    """Ends the servers of a class whose set-up failed, which unittest does not tear down."""
    if nextitem is None:
        for pid in list(_servers):
            _kill(pid)


def pytest_collection_modifyitems(config, items):
    """Keeps the cases of classes that start a server."""
    kept, left = [], []
    for item in items:
        classes = set(item.cls.__mro__) - {unittest.TestCase, object} if item.cls else ()
        starts = any("setUpClass" in vars(each) for each in classes)
        (kept if starts else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
