"""The plan of a stack: each variable is one that its service knows, and shares add up."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.common.credentials import Credentials
from services.decoder.settings import DecoderSettings
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from tests.tiny_tokenizer import write_model_directory, write_text_model_directory
from triptych.devices import count_gpus, place
from triptych.plan import Plan, RedisUrls, ServeOptions, plan_stack
from triptych.serve import make_links, redis_spec
from triptych.stack import StackError

REDIS = RedisUrls("redis://encoder@localhost", "redis://decoder@localhost")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    return write_text_model_directory(tmp_path / "text")


def plan(model: Path, environment: dict[str, str] | None = None, **options: object) -> Plan:
    chosen = ServeOptions(model=model, port=0, **options)  # type: ignore[arg-type]
    return plan_stack(chosen, REDIS, environment or {"CUDA_VISIBLE_DEVICES": ""}, 2, None)


def test_every_service_accepts_its_environment(model: Path) -> None:
    made = plan(model, encoders=2, decoders=2, dtype="bfloat16", load_format="dummy")
    settings = {"encoder": EncoderSettings, "decoder": DecoderSettings, "gateway": GatewaySettings}
    names = [child.name for child in made.children]
    assert names == ["encoder-0", "encoder-1", "decoder-0", "decoder-1", "gateway"]
    ports: set[int] = set()
    for child in made.children:
        value = settings[child.name.split("-")[0]].from_environment(child.environment)
        assert value.model == model
        assert value.log_level == "WARNING"
        ports.add(value.port)
        if isinstance(value, GatewaySettings):
            assert f"http://{value.host}:{value.port}" == made.url
            assert len(value.encoders) == len(value.decoders) == 2
            assert value.metrics_host == "127.0.0.1"
        else:
            assert (value.dtype, value.load_format) == ("bfloat16", "dummy")
            assert value.redis_url == REDIS.of(child.name.split("-")[0])
        assert made.metrics_urls[child.name].endswith(f":{value.metrics_port}/metrics")
        ports.add(value.metrics_port)
    assert len(ports) == 10


def test_the_gateway_is_given_the_ports_of_the_engines(model: Path) -> None:
    made = {child.name: child.environment for child in plan(model).children}
    assert made["gateway"]["GATEWAY_ENCODER_ADDRESSES"].endswith(made["encoder-0"]["ENCODER_PORT"])
    assert made["gateway"]["GATEWAY_DECODER_ADDRESSES"].endswith(made["decoder-0"]["DECODER_PORT"])


def test_services_meet_at_sockets_of_a_private_directory(model: Path, tmp_path: Path) -> None:
    links = make_links("unix", tmp_path)
    chosen = ServeOptions(model=model, port=0, encoders=2)
    made = plan_stack(chosen, None, {"CUDA_VISIBLE_DEVICES": ""}, 2, None, links)
    *encoders, decoder, gateway = (child.environment for child in made.children)
    settings = GatewaySettings.from_environment(gateway)
    paths = [EncoderSettings.from_environment(e).socket for e in encoders]
    assert settings.encoders == tuple(f"unix:{path}" for path in paths)
    assert {path.parent for path in paths if path} == {tmp_path}
    own = DecoderSettings.from_environment(decoder)
    assert settings.decoders == (f"unix:{own.socket}",)
    assert own.encoders == settings.encoders and own.reflection


@pytest.mark.parametrize("wanted", ["unix", "tcp"])
def test_where_a_socket_cannot_serve_a_token_of_this_start_does(
    model: Path, tmp_path: Path, wanted: str
) -> None:
    directory = tmp_path / ("d" * 100 if wanted == "unix" else "d")
    directory.mkdir()
    links = make_links(wanted, directory)
    assert links.sockets is None and links.token_file is not None
    assert links.token_file.stat().st_mode & 0o777 == 0o600
    chosen = ServeOptions(model=model, port=0)
    made = plan_stack(chosen, None, {"CUDA_VISIBLE_DEVICES": ""}, 2, None, links)
    encoder, decoder, gateway = (child.environment for child in made.children)
    found = [
        EncoderSettings.from_environment(encoder),
        DecoderSettings.from_environment(decoder),
        GatewaySettings.from_environment(gateway),
    ]
    tokens = {Credentials.from_settings(each).token.sent for each in found}  # type: ignore[union-attr]
    assert tokens == {links.token_file.read_text()}
    again = make_links(wanted, directory)
    assert again.token_file is not None and again.token_file.read_text() not in tokens
    assert all(each.health_port for each in found[:2])  # type: ignore[union-attr]


def test_gateways_share_the_port_and_have_one_each(model: Path) -> None:
    made = plan(model, gateways=3)
    gateways = [c for c in made.children if c.is_front]
    assert [c.name for c in gateways] == ["gateway-0", "gateway-1", "gateway-2"]
    settings = [GatewaySettings.from_environment(c.environment) for c in gateways]
    assert {f"http://{s.host}:{s.shared_port}" for s in settings} == {made.url}
    assert len({s.port for s in settings} | {settings[0].shared_port}) == 4
    for child, value in zip(gateways, settings, strict=True):
        assert made.metrics_urls[child.name] == f"http://127.0.0.1:{value.metrics_port}/metrics"


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 4)])
def test_gateways_are_as_many_as_the_cores_can_feed(model: Path, cpus: int, count: int) -> None:
    made = plan_stack(ServeOptions(model=model, port=0), None, {}, cpus, None)
    assert sum(child.is_front for child in made.children) == count


def test_a_text_model_has_no_encoder_and_the_decoder_the_whole_card(text_model: Path) -> None:
    made = plan(text_model, {"CUDA_VISIBLE_DEVICES": "0"}, decoders=1)
    assert [child.name for child in made.children] == ["decoder-0", "gateway"]
    decoder = DecoderSettings.from_environment(made.children[0].environment)
    assert (decoder.device, decoder.memory_fraction) == ("cuda:0", 0.9)
    gateway = GatewaySettings.from_environment(made.children[1].environment)
    assert gateway.encoders == ()
    assert gateway.decoders == (f"127.0.0.1:{decoder.port}",)


@pytest.mark.parametrize("options", [{"encoders": 1}, {"encoder_device": "cpu"}])
def test_encoders_for_a_text_model_are_refused(text_model: Path, options: dict) -> None:
    with pytest.raises(StackError, match="takes no images"):
        plan(text_model, **options)


def test_a_model_that_is_not_served_is_named(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["UnknownForCausalLM"]}')
    with pytest.raises(StackError, match="UnknownForCausalLM") as refused:
        plan(model)
    assert refused.value.status == 2


def test_no_redis_means_none_for_all(model: Path) -> None:
    made = plan_stack(ServeOptions(model=model, port=0), None, {}, 2, None)
    assert made.children[0].environment["ENCODER_REDIS_URL"] == ""
    assert made.children[1].environment["DECODER_REDIS_URL"] == ""


def test_a_log_level_that_the_user_exported_is_kept(model: Path) -> None:
    made = plan(model, {"DECODER_LOG_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": ""})
    levels = [v for c in made.children for k, v in c.environment.items() if "LOG_LEVEL" in k]
    assert levels == ["WARNING", "DEBUG", "WARNING"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no config\.json"):
        plan(tmp_path)


def test_a_port_in_use_is_refused(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StackError, match=f"cannot listen on 127.0.0.1:{port}"):
            plan_stack(ServeOptions(model=model, port=port), None, {}, 2, None)


def test_one_gpu_is_shared_and_not_filled() -> None:
    encoders, decoders = place("auto", "auto", encoders=1, decoders=1, gpus=1, cpus=16)
    assert {p.device for p in encoders + decoders} == {"cuda:0"}
    assert 0.8 < sum(p.memory_fraction for p in encoders + decoders) <= 0.9
    assert encoders[0].memory_fraction < decoders[0].memory_fraction


@pytest.mark.parametrize(("encoders", "decoders", "gpus"), [(1, 3, 2), (2, 2, 3), (4, 4, 4)])
def test_no_card_is_promised_twice(encoders: int, decoders: int, gpus: int) -> None:
    first, second = place("auto", "auto", encoders=encoders, decoders=decoders, gpus=gpus, cpus=8)
    placements = first + second
    assert len(placements) == encoders + decoders
    for card in {p.device for p in placements}:
        assert sum(p.memory_fraction for p in placements if p.device == card) <= 0.9001


def test_two_cards_for_two_processes_are_not_shared() -> None:
    encoders, decoders = place("auto", "auto", encoders=1, decoders=1, gpus=2, cpus=8)
    assert (encoders[0].device, decoders[0].device) == ("cuda:1", "cuda:0")
    assert encoders[0].memory_fraction == decoders[0].memory_fraction == 0.9


def test_cpu_threads_are_divided() -> None:
    encoders, decoders = place("auto", "auto", encoders=1, decoders=1, gpus=0, cpus=8)
    assert [p.num_threads for p in encoders + decoders] == [4, 4]
    encoders, decoders = place("cpu", "cuda:0", encoders=1, decoders=1, gpus=1, cpus=8)
    assert (encoders[0].num_threads, decoders[0].num_threads) == (8, 0)
    assert decoders[0].memory_fraction == 0.9


def test_gpus_are_counted_by_the_environment_first(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({}, tmp_path / "none") == 0


def test_a_redis_of_our_own_listens_only_on_its_socket(tmp_path: Path) -> None:
    made = redis_spec(tmp_path, tmp_path / "redis.log")
    assert made is not None
    spec, urls = made
    users = (tmp_path / "users.acl").read_text()
    for kind in ("encoder", "decoder"):
        url = urlsplit(urls.of(kind))
        assert (url.scheme, url.username, url.path) == ("unix", kind, f"{tmp_path}/redis.sock")
        assert url.password and url.password not in users
        assert not any(url.password in word for word in spec.command)
    options = dict(zip(spec.command[1::2], spec.command[2::2], strict=True))
    assert options["--port"] == "0"
    assert options["--save"] == ""
    assert options["--maxmemory-policy"] == "allkeys-lru"
    assert os.path.isabs(options["--unixsocket"])
