"""`triptych serve` with real services: it fetches a model, starts, answers, and leaves nothing
behind. What a killed supervisor leaves is a test of test_serve_video.py.
"""

import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from tests.e2e.serve_command import ServeCommand, serve_command
from tests.noise import PATIENCE_S, wait_until
from tests.unit.triptych import test_hub
from triptych import cli
from triptych.client import Server, question_message
from triptych.demo import SAMPLES
from triptych.options import DEMONSTRATION_MODEL

pytestmark = pytest.mark.e2e
_ENDLESS = {"stream": True, "ignore_eos": True, "max_tokens": 8000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that has the demonstration model as `org/tiny`."""
    files = {path.name: path.read_bytes() for path in DEMONSTRATION_MODEL.iterdir()}
    hub = test_hub._Hub(files)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
    yield
    hub.shutdown()
    hub.server_close()


@pytest.mark.usefixtures("hub")
def test_one_command_fetches_a_model_answers_says_what_it_does_and_ctrl_c_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["org/tiny", "--access-log", "--api-key", "sk-1"]
    options += ["--encoders", "2", "--gateways", "2"]
    with serve_command(tmp_path, options) as command:
        words = ["ask", str(SAMPLES / "shapes.png"), "What colour is the circle?"]
        assert cli.main([*words, "--url", command.url, "--api-key", "sk-1"]) == 0
        assert "red" in capsys.readouterr().out
        services = command.services()
        assert {"services.gateway", "services.decoder", "services.encoder"} <= services.keys()
        processes = psutil.Process(command.process.pid).children(recursive=True)
        gateways = [p for p in processes if "services.gateway" in p.cmdline()]
        assert len([p for p in gateways if not p.children()]) == 2
        # Between the services there are sockets that only this user reaches.
        links = [
            Path(c.laddr) for p in processes for c in p.net_connections("unix")
            if c.status == psutil.CONN_NONE and str(c.laddr).endswith("coder-0.sock")
        ]  # fmt: skip
        assert {path.name for path in links} == {"encoder-0.sock", "decoder-0.sock"}
        assert {path.parent.stat().st_mode & 0o777 for path in links} == {0o700}
        check_redis_logins(services)
        check_what_it_says(command)
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []


def check_redis_logins(services: dict[str, psutil.Process]) -> None:
    """No password is where other users see it, and the decoder's login cannot write."""
    urls = {
        kind: services[f"services.{kind}"].environ()[f"{kind.upper()}_REDIS_URL"]
        for kind in ("encoder", "decoder")
    }
    passwords = {urlsplit(url).password for url in urls.values()}
    assert len(passwords) == 2 and None not in passwords
    supervisor = services["services.gateway"].parent()
    assert supervisor is not None
    family = (supervisor, *supervisor.children(recursive=True))
    seen = b" ".join(Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in family)
    assert b"services.decoder" in seen and b"redis-server" in seen
    assert not any(str(password).encode() in seen for password in passwords)
    key = b"triptych:embedding:" + bytes(32)
    with redis.Redis.from_url(urls["encoder"]) as encoder:
        encoder.set(key, b"x")
    with redis.Redis.from_url(urls["decoder"]) as decoder:
        assert decoder.getrange(key, 0, 0) == b"x"
        for command in (("SET", key, "y"), ("DEL", key), ("FLUSHALL",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                decoder.execute_command(*command)


def check_what_it_says(command: ServeCommand) -> None:
    """The start, its room, each request, and what a stop waits for, which this one begins."""
    server = Server(command.url, "sk-1")
    assert server.first_model() == "org/tiny"

    def said() -> str:
        return command.log_path.read_text()

    loading = (
        "loading org/tiny: 8.0 M parameters (BF16), 15 MiB in 1 file; encoder 0 on cpu, encoder 1"
    )
    assert loading in said()
    for stage in ("decoder-0: weights, 0 of 1", "encoder-0: kernels", "decoder-0: timing steps"):
        assert f"triptych: {stage}" in said()
    room = r"decoder-0 on cpu in float32: weights \d+ MiB, KV cache 512 MiB = [\d,]+ tokens, 25 "
    assert re.search(room, said())
    addresses = re.search(r"API (\S+)/v1, page \S+/, metrics (\S+)", said())
    assert addresses and addresses[1] == command.url
    assert '"process": ' not in said()
    with urllib.request.urlopen(addresses[2], timeout=PATIENCE_S) as answer:
        metrics = answer.read().decode()
    for process in ("gateway", "encoder-0", "decoder-0"):
        assert f'process="{process}' in metrics
    body = {"model": "org/tiny", "messages": [question_message([], "What is red?")]}
    wait_until(lambda: "INFO GET /v1/models 200" in said(), "the access log's line")
    with server.request("POST", "/v1/chat/completions", body | _ENDLESS) as answer:
        assert answer.status == 200 and answer.readline().startswith(b"data:")
        command.process.send_signal(signal.SIGINT)
        wait_until(lambda: "1 request is running" in said(), "what the stop waits for")
        command.process.send_signal(signal.SIGINT)  # at once
    assert command.process.wait(PATIENCE_S) == 0
    assert "did not stop" not in said() and "Traceback" not in said()
