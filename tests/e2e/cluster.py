"""Real services as real processes, each of which a test may kill, freeze or restart."""

import asyncio
import base64
import io
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
from PIL import Image

from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.redis_server import RedisServer
from triptych.probes import gateway_ready
from triptych.serve import REDIS_RULES

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "demo" / "model"
_READY_TIMEOUT_S = 120.0


class Service:
    """One `python -m services.<kind>` with its settings.

    Attributes:
        host: where it listens.
        wrapper: a command that runs the service's.
        log: its output.
    """

    def __init__(self, kind: str, log: Path, **settings: object) -> None:
        self.kind = kind
        self.host = "127.0.0.1"
        self.wrapper: list[str] = []
        self.port = free_port()
        self.metrics_port = free_port()
        self.log = log
        self._settings: dict[str, str] = {}
        self.set(**settings, metrics_port=self.metrics_port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def set(self, **settings: object) -> bool:
        """Settings of its next start; returns whether that changes any."""
        prefix, before = self.kind.upper() + "_", dict(self._settings)
        self._settings |= {prefix + name.upper(): str(v) for name, v in settings.items()}
        return self._settings != before

    def start(self) -> None:
        prefix = self.kind.upper() + "_"
        place = {f"{prefix}ADDRESS": self.address}
        if self.kind == "gateway":
            place = {f"{prefix}HOST": self.host, f"{prefix}PORT": str(self.port)}
        environment = {**os.environ, **self._settings, **place, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", f"services.{self.kind}"],
                env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the front."""
        assert self._process is not None
        return self._process.pid

    def session(self) -> list[int]:
        """Its processes that live, also those that have lost their front."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, _, _, session = (
                        (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    )
                    if int(session) == self.pid and state != "Z":
                        found.append(int(entry.name))
        return found

    def signal_front(self, number: int) -> None:
        os.kill(self.pid, number)

    def signal(self, number: int) -> None:
        """To the whole process group: front and engine alike."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM to the front alone, as Kubernetes does; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits until the front has ended; returns its exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def engine_pid(self) -> int:
        """Of the front's child that owns the device."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        (pid,) = (
            child for child in children
            if b".engine_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        )  # fmt: skip
        return int(pid)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self.is_running():
            self.signal(signal.SIGCONT)
            self.kill()

    def answers(self) -> bool:
        try:
            self.metric("process_start_time_seconds")
        except OSError:
            return False
        return True

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that carry all `labels`; 0 where there is none."""
        url = f"http://{self.host}:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"{name} ", f"{name}{{")) and all(w in line for w in wanted)
        )


class Cluster:
    """Redis, encoders, decoders and a gateway. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        encoders: int = 1,
        decoders: int = 1,
        model: Path = DEMO_MODEL,
        encoder: dict[str, object] | None = None,
        decoder: dict[str, object] | None = None,
        gateway: dict[str, object] | None = None,
    ) -> None:
        users, seal_keys = directory / "users.acl", directory / "seal-keys"
        rules = {"default": "~* +@all", **REDIS_RULES}  # tests may do everything
        users.write_text("".join(f"user {u} on nopass {r}\n" for u, r in rules.items()))
        seal_keys.write_text(secrets.token_hex(32))
        self.redis = RedisServer(
            "--aclfile", str(users), "--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru"
        )
        common = {
            "model": model, "device": "cpu", "dtype": "float32", "redis_directory": directory,
        }  # fmt: skip
        # A machine that is busy with something else must not make Redis look slow.
        urls = {k: f"{self.redis.url_of(k)}?socket_timeout=5" for k in ("encoder", "decoder")}
        encoder = {**common, "redis_url": urls["encoder"], **(encoder or {})}
        decoder = {**common, "redis_url": urls["decoder"], **(decoder or {})}
        self.encoders = [
            Service("encoder", directory / f"encoder-{i}.log", **encoder) for i in range(encoders)
        ]
        self.decoders = [
            Service("decoder", directory / f"decoder-{i}.log", **decoder) for i in range(decoders)
        ]
        self.gateway = Service(
            "gateway",
            directory / "gateway.log",
            model=model,
            served_model_name="demo",
            encoder_addresses=",".join(e.address for e in self.encoders),
            decoder_addresses=",".join(d.address for d in self.decoders),
            **(gateway or {}),
        )

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    @property
    def services(self) -> tuple[Service, ...]:
        return (*self.encoders, *self.decoders, self.gateway)

    def __enter__(self) -> "Cluster":
        self.redis.start()
        try:
            self.restore()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self.services):
            service.stop()
        self.redis.stop()

    def restore(self) -> None:
        """Starts what has ended, thaws what is frozen, and waits until all of it serves. A front
        that is about to exit, because its engine has ended, is started once it has.
        """
        for service in self.services:
            if service.is_running():
                service.thaw()
        num_starts: Counter[Service] = Counter()

        def is_whole() -> bool:
            for service in self.services:
                if not service.is_running() and num_starts[service] < 2:
                    num_starts[service] += 1
                    service.start()
            return self.is_whole()

        wait_until(is_whole, _READY_TIMEOUT_S, "the cluster is whole", period_s=0.1)

    def restart(self, *services: Service) -> None:
        """Kills these, which empties their memories, and restores the cluster."""
        for service in services:
            service.kill()
        self.restore()

    def is_whole(self) -> bool:
        """Each service answers, each front has its engine, and the gateway knows each."""
        return (
            all(service.answers() for service in self.services)
            and all(len(front.session()) > 1 for front in (*self.encoders, *self.decoders))
            and all(
                self.gateway.metric("triptych_gateway_healthy_pods", service=kind) == len(services)
                for kind, services in (("encoder", self.encoders), ("decoder", self.decoders))
            )
            and asyncio.run(gateway_ready("127.0.0.1", self.gateway.port))
        )

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S, **options
        )

    def ask(self, question: str, *images: bytes, **fields: Any) -> str:
        """The whole greedy answer."""
        with self.client() as client:
            answer = client.chat.completions.create(
                model="demo",
                messages=[message(question, *images)],
                **{"temperature": 0, "max_tokens": 24, **fields},
            )
        return answer.choices[0].message.content or ""

    def num_encodes(self) -> float:
        return sum(e.metric("triptych_encoder_images_encoded_total") for e in self.encoders)

    def used_blocks(self) -> float:
        return sum(d.metric("triptych_decoder_kv_blocks_used") for d in self.decoders)


def message(question: str, *images: bytes) -> Any:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def png(seed: int, height: int = 192, width: int = 192) -> bytes:
    """A PNG that no other seed gives: big coloured cells."""
    cells = np.random.default_rng(seed).integers(0, 255, (height // 32, width // 32, 3), np.uint8)
    image = Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, *, period_s: float = 0.02
) -> float:
    """Polls until true; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(period_s)
    return time.monotonic() - start
