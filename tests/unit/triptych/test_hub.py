"""Models by their names, against a stand-in of the hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from triptych import ROOT

SHA = {"main": "a" * 40, "v2": "b" * 40}
# The weights are more than two of the pieces that the client writes.
FILES = {
    "config.json": b"{}", "model.safetensors": bytes(range(256)) * (24 << 12), "x.bin": b"no",
    "consolidated.safetensors": b"no", "onnx/config.json": b"no",
    "README.md": b"---\npipeline_tag: text-ranking\n---\n", "1_Pooling/config.json": b'{"a": 1}',
    "2_Dense/model.safetensors": b"no",
}  # fmt: skip
CODE = """
import sys
from pathlib import Path
from triptych.hub import resolve_model
from triptych.stack import StackError
try:
    print(*resolve_model(Path("org/tiny"), sys.argv[1] if sys.argv[1:] else None))
except StackError as error:
    sys.exit(f"refused: {error}")
"""


@cache  # A hub says the sums of its files in each answer.
def _sum(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


class _Hub(ThreadingHTTPServer):
    def __init__(self, files: Mapping[str, bytes] = FILES) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.gets: list[tuple[str, str | None]] = []
        self.num_cuts = 0  # further transfers of large files that break off halfway
        self.token: str | None = None


class _Handler(BaseHTTPRequestHandler):
    server: _Hub  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.reply(b"{}", 401)
        if "/revision/" in path or path == "/api/models/org/tiny":
            sha = SHA.get(path.rsplit("/", 1)[1] if "/revision/" in path else "main")
            if sha is None:
                return self.reply(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            return self.reply(json.dumps({"id": "org/tiny", "sha": sha}).encode())
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": _sum(b)}
                for n, b in hub.files.items()
            ]
            return self.reply(json.dumps(tree).encode())
        sha, _, name = path.partition("/resolve/")[2].partition("/")
        if name not in hub.files:  # what the client asks besides the model
            return self.reply(b"{}", 404)
        body = hub.files[name]
        more = {"ETag": f'"{_sum(body)}"', "X-Repo-Commit": sha}
        wanted = self.headers.get("Range")
        if self.command == "GET":
            hub.gets.append((name, wanted))
        first = int(wanted[6:].split("-")[0]) if wanted else 0
        status = 206 if wanted else 200
        if wanted:
            more["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        return self.reply(body[first:], status, more)

    def reply(self, body: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cut = self.server.num_cuts > 0 and len(body) > 100_000
            self.server.num_cuts -= cut
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = True


@pytest.fixture
def hub() -> Iterator[_Hub]:
    server = _Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def resolve(hub: _Hub, home: Path, *revision: str, **more: str) -> str:
    environment = os.environ | more | {
        "HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE, *revision],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_download_then_cache_then_offline(hub: _Hub, tmp_path: Path) -> None:
    directory, name = resolve(hub, tmp_path).split()
    assert name == "org/tiny"
    for file in ("config.json", "model.safetensors"):
        assert (Path(directory) / file).read_bytes() == FILES[file]
    assert {path.name for path in Path(directory).iterdir()} == {
        "config.json", "model.safetensors", "README.md", "1_Pooling",
    }  # fmt: skip
    file = "1_Pooling/config.json"
    assert (Path(directory) / file).read_bytes() == FILES[file]
    count = len(hub.gets)
    assert resolve(hub, tmp_path).split()[0] == directory
    assert resolve(hub, tmp_path, HF_HUB_OFFLINE="1").split()[0] == directory
    assert len(hub.gets) == count


def test_the_job_that_fills_a_volume_downloads_the_same(hub: _Hub, tmp_path: Path) -> None:
    documents = yaml.safe_load_all((ROOT / "deploy/k8s/components/model-job/job.yaml").read_text())
    (job,) = (document for document in documents if document["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "checkpoint").mkdir()
    script = container["args"][0].replace("/models", str(tmp_path))
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": "org/tiny", "REVISION": "main",
    }  # fmt: skip
    subprocess.run([*container["command"], script], env=environment, check=True, timeout=100)
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names - {".cache"} == {
        ".complete", "config.json", "model.safetensors", "README.md", "1_Pooling",
    }  # fmt: skip


def test_a_revision_is_served_or_refused(hub: _Hub, tmp_path: Path) -> None:
    assert SHA["v2"] in resolve(hub, tmp_path, "v2")
    assert resolve(hub, tmp_path, "v3").endswith("has no revision v3")


def test_offline_without_a_cache_is_a_line(hub: _Hub, tmp_path: Path) -> None:
    line = resolve(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "cannot download org/tiny: HF_HUB_OFFLINE is set, and the model is not in the" in line


def test_a_hub_that_is_not_reached_is_named(hub: _Hub, tmp_path: Path) -> None:
    hub.shutdown()  # its thread may begin only now
    hub.server_close()
    host = f"127.0.0.1:{hub.server_address[1]}"
    line = resolve(hub, tmp_path)
    assert f"cannot download org/tiny: there is no connection to {host}, and the model is" in line


def test_a_model_that_the_hub_does_not_have_is_a_line(hub: _Hub, tmp_path: Path) -> None:
    hub.token = "right"
    line = resolve(hub, tmp_path)
    assert "cannot download org/tiny: " in line and "HF_TOKEN" in line


def test_a_refused_token_is_a_line(hub: _Hub, tmp_path: Path) -> None:
    hub.token = "right"
    assert "HF_TOKEN" in resolve(hub, tmp_path, HF_TOKEN="hf_wrong")
    assert SHA["main"] in resolve(hub, tmp_path, HF_TOKEN="right")


def test_after_a_broken_transfer_whole_files_are_kept(hub: _Hub, tmp_path: Path) -> None:
    hub.num_cuts = 100
    assert "the download broke off" in resolve(hub, tmp_path)
    hub.num_cuts = 0
    hub.gets.clear()
    directory = resolve(hub, tmp_path).split()[0]
    assert (Path(directory) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert {name for name, _ in hub.gets} <= {"model.safetensors"}


def test_a_transfer_that_breaks_off_is_resumed_where_it_broke(hub: _Hub, tmp_path: Path) -> None:
    hub.num_cuts = 1
    directory = resolve(hub, tmp_path).split()[0]
    body = FILES["model.safetensors"]
    assert (Path(directory) / "model.safetensors").read_bytes() == body
    asked = [wanted for name, wanted in hub.gets if name == "model.safetensors"]
    assert len(asked) == 2 and asked[0] is None and asked[1] is not None
    assert 0 < int(asked[1].removeprefix("bytes=").removesuffix("-")) <= len(body) // 2
