"""`triptych serve` with real services: it starts, answers, and leaves nothing behind."""

import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from tests.e2e.serve_command import serve_command
from tests.noise import PATIENCE_S, least
from triptych import cli
from triptych.demo import SAMPLES

pytestmark = pytest.mark.e2e


def test_one_command_answers_about_an_image_and_ctrl_c_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(SAMPLES / "shapes.png")

    def seconds_to_end() -> float:
        with serve_command(tmp_path, ["--encoders", "2", "--gateways", "2"]) as command:
            words = ["ask", image, "What colour is the circle?", "--url", command.url]
            assert cli.main(words) == 0
            assert "red" in capsys.readouterr().out
            services = command.services()
            assert {"services.gateway", "services.decoder", "services.encoder"} <= services.keys()
            processes = psutil.Process(command.process.pid).children(recursive=True)
            gateways = [p for p in processes if p.cmdline()[-1:] == ["services.gateway"]]
            assert len([p for p in gateways if not p.children()]) == 2
            # Between the services there are sockets that only this user reaches.
            links = [
                Path(c.laddr) for p in processes for c in p.net_connections("unix")
                if c.status == psutil.CONN_NONE and str(c.laddr).endswith("coder-0.sock")
            ]  # fmt: skip
            assert {path.name for path in links} == {"encoder-0.sock", "decoder-0.sock"}
            assert {path.parent.stat().st_mode & 0o777 for path in links} == {0o700}
            check_redis_logins(services)
            start = time.monotonic()
            command.process.send_signal(signal.SIGINT)
            assert command.process.wait(PATIENCE_S) == 0
            taken = time.monotonic() - start
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
        return taken

    assert least(seconds_to_end, 5) < 5


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


def test_a_dead_engine_ends_the_stack_and_is_named(tmp_path: Path) -> None:
    with serve_command(tmp_path, ["--grpc", "tcp"]) as command:
        command.services()["services.decoder.engine_main"].kill()
        assert command.process.wait(PATIENCE_S) != 0
        assert "decoder-0 ended while serving" in command.log_path.read_text()


def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    with serve_command(tmp_path) as command:
        processes = psutil.Process(command.process.pid).children(recursive=True)
        assert len(processes) >= 5
        command.process.kill()
        command.process.wait(5)
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
