"""What a service refuses at its start, and what it allocates."""

import gc
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.families import read_spec
from services.common.model_spec import ModelSpecError
from services.common.process.service_process import (
    _serve_health,
    create_service_server,
    run_service,
    serve,
)
from services.decoder.__main__ import DECODER
from services.decoder.settings import DecoderSettings
from services.encoder.__main__ import ENCODER
from services.encoder.settings import EncoderSettings
from tests.fakes import FakeDecoder
from tests.ports import free_port
from tests.tiny_tokenizer import write_text_model_directory

DEMO_MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model_directory(tmp_path_factory.mktemp("text") / "tiny-text")


def test_an_encoder_refuses_a_text_model_by_name(text_model: Path):
    with pytest.raises(ModelSpecError, match=r"tiny-text.*text model"):
        ENCODER.front.arena_bytes(EncoderSettings(model=text_model), read_spec(text_model))


def test_a_text_models_decoder_has_no_room_for_images(text_model: Path):
    settings = DecoderSettings(model=text_model)
    assert DECODER.front.arena_bytes(settings, read_spec(text_model)) == 4096


def test_the_arena_of_images_goes_with_the_kv_cache():
    for kv_cache_bytes, arena_bytes in ((None, 1 << 30), (1 << 33, 1 << 30), (8 << 20, 2 << 20),
                                        (1000, 1 << 20)):  # fmt: skip
        settings = DecoderSettings(model=DEMO_MODEL, kv_cache_bytes=kv_cache_bytes)
        assert DECODER.front.arena_bytes(settings, read_spec(DEMO_MODEL)) == arena_bytes


def start(service: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ENCODER_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-m", f"services.{service}"],
        env=environment | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_refused_model_or_setting_is_status_2_and_one_line(text_model: Path):
    refused = start("encoder", ENCODER_MODEL=str(text_model))
    assert refused.returncode == 2
    assert "tiny-text" in refused.stderr and "Traceback" not in refused.stderr
    unknown = start("decoder", DECODER_MODEL=str(text_model), DECODER_PROT="1")
    assert unknown.returncode == 2 and "DECODER_PROT" in unknown.stderr


@pytest.mark.parametrize(
    "url", ["http://localhost", "redis://localhost:port", "redis://localhost?socket_timeout=short"]
)
def test_a_url_of_redis_is_refused_before_a_model_is_loaded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("DECODER_MODEL", str(tmp_path / "absent"))
    monkeypatch.setenv("DECODER_REDIS_URL", url)
    assert run_service(DECODER) == 2
    assert "DECODER_REDIS_URL is not a URL of Redis" in capsys.readouterr().err


def test_a_checkpoint_that_the_engine_refuses_is_status_2(tmp_path: Path, text_model: Path):
    """Also by one whose interpreter would take long to end, as torch's does on a busy machine."""
    for path in text_model.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())  # no weights
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys, time\n"
        "if 'services.decoder.engine_main' in sys.orig_argv: atexit.register(time.sleep, 20)"
    )
    ended = start("decoder", DECODER_MODEL=str(tmp_path), DECODER_DEVICE="cpu",
                  DECODER_ADDRESS="127.0.0.1:0", DECODER_METRICS_PORT="0",
                  PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path)))  # fmt: skip
    assert ended.returncode == 2
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert any("before it was ready" in line["message"] for line in lines)


def test_a_port_of_the_gateways_metrics_that_is_taken_is_status_2_and_named(text_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = start("gateway", **{
            "GATEWAY_MODEL": str(text_model), "GATEWAY_METRICS_PORT": port,
            "GATEWAY_DECODER_ADDRESSES": "127.0.0.1:1",
        })  # fmt: skip
    assert ended.returncode == 2
    assert f"no metrics on 127.0.0.1:{port}: Address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["ADDRESS", "HEALTH_PORT", "METRICS_PORT"])
def test_a_taken_port_is_status_2_and_named_before_a_model_is_loaded(
    name: str,
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        variables = {
            "MODEL": str(text_model), "ADDRESS": "127.0.0.1:0", "METRICS_PORT": "0",
            "DEVICE": "cuda:9",  # an engine would fail in another way
            name: f"127.0.0.1:{port}" if name == "ADDRESS" else str(port),
        }  # fmt: skip
        for variable, value in variables.items():
            monkeypatch.setenv(f"DECODER_{variable}", value)
        assert run_service(DECODER) == 2
    expected = f"decoder: DECODER_{name}: the service cannot listen on 127.0.0.1:{port}: Address"
    assert capsys.readouterr().err.startswith(expected)


async def test_an_engine_that_fails_at_start_is_status_1(text_model: Path):
    settings = DecoderSettings(model=text_model, address="127.0.0.1:0", metrics_port=0)
    absent = replace(DECODER, engine_module="services.decoder.absent")
    assert await serve(absent, settings, 4096) == 1
    gc.collect()  # an end of a link that nobody has closed is an error here


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe, suppress(OSError):
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_health_is_served_on_an_ipv6_address(text_model: Path):
    settings = DecoderSettings(model=text_model, address="[::1]:0")
    _, servicer = await create_service_server(FakeDecoder())
    port = free_port()
    health = await _serve_health(servicer, settings.host, port)
    async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = await stub.Check(health_pb2.HealthCheckRequest())
    await health.stop(None)
    assert found.status == health_pb2.HealthCheckResponse.SERVING
