"""The plan of a stack: each variable is one that its service knows, and shares add up."""

import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.common.security.credentials import Credentials
from services.decoder.settings import DecoderSettings
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from tests.tiny_tokenizer import write_model_directory, write_text_model_directory
from triptych.devices import Placement, count_gpus, how_many, place
from triptych.layout import Layout
from triptych.options import ServeOptions
from triptych.plan import Links, Plan, RedisUrls, plan_stack, read_model
from triptych.serve import make_links, redis_spec
from triptych.stack import StackError

LINKS = Links(token_file=Path("/run/triptych/token"))
REDIS = {kind: f"redis://{kind}@localhost" for kind in ("encoder", "decoder", "gateway")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    return write_text_model_directory(tmp_path / "text")


def plan(model: Path, environment: dict[str, str] | None = None, **options: Any) -> Plan:
    return planned(model, REDIS, environment, **options)


def planned(
    model: Path,
    redis: RedisUrls | None,
    environment: dict[str, str] | None = None,
    cpus: int = 2,
    links: Links = LINKS,
    *,
    fits_beside: bool = True,
    **options: object,
) -> Plan:
    chosen = ServeOptions(**{"model": model, "port": 0} | options)  # type: ignore[arg-type]
    environment = environment or {"CUDA_VISIBLE_DEVICES": ""}
    return plan_stack(
        chosen, read_model(model), redis, environment, cpus, links, fits_beside=fits_beside
    )


def test_every_service_accepts_its_environment(model: Path) -> None:
    made = plan(model, encoders=2, decoders=2, dtype="bfloat16", load_format="dummy")
    settings = {"encoder": EncoderSettings, "decoder": DecoderSettings, "gateway": GatewaySettings}
    names = [child.name for child in made.children]
    assert names == ["encoder-0", "encoder-1", "decoder-0", "decoder-1", "gateway"]
    ports: set[int] = set()
    for child in made.children:
        value = settings[child.name.split("-")[0]].from_environment(child.environment)
        assert value.model == model
        # Engines say at INFO how their start goes; what is shown is the console's to decide.
        assert value.log_level == ("WARNING" if child.is_front else "INFO")
        assert made.log_levels[child.name] == "WARNING"
        if isinstance(value, GatewaySettings):
            ports.add(value.port)
            assert f"http://{value.host}:{value.port}" == made.url
            assert len(value.encoders) == len(value.decoders) == 2
            assert child.command[-2:] == ["--metrics-host", "127.0.0.1"]
        else:
            ports.add(int(value.address.removeprefix("127.0.0.1:")))
            assert (value.dtype, value.load_format) == ("bfloat16", "dummy")
            assert value.redis_url == REDIS[child.name.split("-")[0]]
        assert made.metrics_urls[child.name].endswith(f":{value.metrics_port}/metrics")
        ports.add(value.metrics_port)
    assert len(ports) == 10


def test_quantization_is_the_decoders(model: Path) -> None:
    made = plan(model, quantization="fp8")
    found = {child.name: child.environment.get("DECODER_QUANTIZATION") for child in made.children}
    assert found == {"encoder-0": None, "decoder-0": "fp8", "gateway": None}
    spec = read_model(model, "fp8")
    assert spec.checkpoint.quantization is not None and spec.checkpoint.quantization.at_load
    with pytest.raises(
        StackError, match="--quantization 'int4' is not supported; supported: 'fp8'"
    ):
        read_model(model, "int4")


def test_a_named_task_is_that_of_gateway_and_decoder(model: Path) -> None:
    made = plan(model, task="embed")
    found = {
        child.name: {n: v for n, v in child.environment.items() if n.endswith("_TASK")}
        for child in made.children
    }
    assert found == {
        "encoder-0": {}, "decoder-0": {"DECODER_TASK": "embed"},
        "gateway": {"GATEWAY_TASK": "embed"},
    }  # fmt: skip
    assert read_model(model, task="embed").task == "embed"
    with pytest.raises(StackError, match='needs the tokens "yes" and "no"'):
        read_model(model, task="rank")


def test_the_gateway_is_given_the_ports_of_the_engines(model: Path) -> None:
    made = {child.name: child.environment for child in plan(model).children}
    for kind in ("encoder", "decoder"):
        address = made[f"{kind}-0"][f"{kind.upper()}_ADDRESS"]
        assert made["gateway"][f"GATEWAY_{kind.upper()}_ADDRESSES"] == address


def test_services_meet_at_sockets_of_a_private_directory(model: Path, tmp_path: Path) -> None:
    links = make_links("unix", tmp_path)
    made = planned(model, None, links=links, encoders=2)
    *encoders, decoder, gateway = (child.environment for child in made.children)
    settings = GatewaySettings.from_environment(gateway)
    addresses = [EncoderSettings.from_environment(e).address for e in encoders]
    assert settings.encoders == tuple(addresses)
    assert {Path(each.removeprefix("unix:")).parent for each in addresses} == {tmp_path}
    own = DecoderSettings.from_environment(decoder)
    assert settings.decoders == (own.address,)
    assert own.encoders == settings.encoders


@pytest.mark.parametrize("wanted", ["unix", "tcp"])
def test_where_a_socket_cannot_serve_a_token_of_this_start_does(
    model: Path, tmp_path: Path, wanted: str
) -> None:
    directory = tmp_path / ("d" * 100 if wanted == "unix" else "d")
    directory.mkdir()
    links = make_links(wanted, directory)
    assert links.sockets is None and links.token_file is not None
    assert links.token_file.stat().st_mode & 0o777 == 0o600
    made = planned(model, None, links=links)
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
    shared = {c.command[c.command.index("--shared-port") + 1] for c in gateways}
    assert {f"http://{settings[0].host}:{port}" for port in shared} == {made.url}
    assert len({str(s.port) for s in settings} | shared) == 4
    for child, value in zip(gateways, settings, strict=True):
        assert made.metrics_urls[child.name] == f"http://127.0.0.1:{value.metrics_port}/metrics"


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 4)])
def test_gateways_are_as_many_as_the_cores_can_feed(model: Path, cpus: int, count: int) -> None:
    made = planned(model, None, cpus=cpus)
    assert sum(child.is_front for child in made.children) == count


def test_a_text_model_has_no_encoder_and_the_decoder_the_whole_card(text_model: Path) -> None:
    made = plan(text_model, {"CUDA_VISIBLE_DEVICES": "0"}, decoders=1)
    assert [child.name for child in made.children] == ["decoder-0", "gateway"]
    decoder = DecoderSettings.from_environment(made.children[0].environment)
    assert (decoder.device, decoder.memory_fraction) == ("cuda:0", 0.9)
    gateway = GatewaySettings.from_environment(made.children[1].environment)
    assert gateway.encoders == ()
    assert gateway.decoders == (decoder.address,)


@pytest.mark.parametrize("options", [{"encoders": 1}, {"encoder_device": "cpu"}])
def test_encoders_for_a_text_model_are_refused(text_model: Path, options: dict) -> None:
    with pytest.raises(StackError, match="is a text model"):
        plan(text_model, **options)


def test_a_model_that_is_not_served_is_named(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["UnknownForCausalLM"]}')
    with pytest.raises(StackError, match="UnknownForCausalLM") as refused:
        plan(model)
    assert refused.value.status == 2


def test_several_gateways_count_limits_together_and_one_by_itself(model: Path) -> None:
    for count, expected in ((1, ("", 1)), (3, (REDIS["gateway"], 3))):
        made = plan(model, gateways=count)
        gateways = [child for child in made.children if child.name.startswith("gateway")]
        assert len(gateways) == count
        for child in gateways:
            settings = GatewaySettings.from_environment(child.environment)
            assert (settings.redis_url, settings.replicas) == expected


def test_no_redis_means_none_for_all(model: Path) -> None:
    made = planned(model, None)
    assert made.children[0].environment["ENCODER_REDIS_URL"] == ""
    assert made.children[1].environment["DECODER_REDIS_URL"] == ""


def test_a_log_level_that_the_user_exported_is_kept(model: Path) -> None:
    made = plan(model, {"DECODER_LOG_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": ""})
    levels = [v for c in made.children for k, v in c.environment.items() if "LOG_LEVEL" in k]
    assert levels == ["INFO", "DEBUG", "WARNING"]
    assert list(made.log_levels.values()) == ["WARNING", "DEBUG", "WARNING"]
    assert made.notes == []


def test_exported_variables_apply_where_no_option_says_otherwise(model: Path) -> None:
    exported = {
        "CUDA_VISIBLE_DEVICES": "", "GATEWAY_SERVED_MODEL_NAME": "theirs",
        "DECODER_DTYPE": "float16",
        "GATEWAY_SHUTDOWN_GRACE_S": "20", "DECODER_MEMORY_FRACTION": "0.5",
        "DECODER_MAX_MODEL_LEN": "99", "GATEWAY_HOST": "localhost", "DECODER_METRICS_PORT": "0",
    }  # fmt: skip
    made = plan(model, exported, gateways=1)
    assert made.notes == []
    assert (made.model_name, made.grace_s) == ("theirs", 20)
    assert made.url.startswith("http://localhost:")
    assert "decoder-0" not in made.metrics_urls and "encoder-0" in made.metrics_urls
    environments = {c.name: exported | dict(c.environment) for c in made.children}
    decoder = DecoderSettings.from_environment(environments["decoder-0"])
    assert (decoder.dtype, decoder.memory_fraction, decoder.max_model_len) == ("float16", 0.5, 99)
    assert [p.memory_fraction for p in made.decoders] == [0.5]


def test_limits_of_images_and_videos_reach_the_gateway(model: Path, tmp_path: Path) -> None:
    made = planned(
        model, REDIS, {"CUDA_VISIBLE_DEVICES": "", "GATEWAY_MAX_VIDEOS": "3"},
        links=make_links("unix", tmp_path), device="cpu", max_media={"image": 4},
    )  # fmt: skip
    (gateway,) = [c.environment for c in made.children if c.name.startswith("gateway")]
    settings = GatewaySettings.from_environment({"GATEWAY_MAX_VIDEOS": "3", **gateway})
    assert (settings.max_images, settings.max_videos) == (4, 3)


def test_an_exported_variable_that_gives_way_is_named(model: Path, tmp_path: Path) -> None:
    exported = {
        "CUDA_VISIBLE_DEVICES": "", "GATEWAY_SERVED_MODEL_NAME": "theirs",
        "DECODER_DTYPE": "float16",
        "DECODER_ADDRESS": "h:5", "GATEWAY_DECODER_ADDRESSES": "elsewhere:1",
        "ENCODER_DTYPE": "float32", "DECODER_DEVICE": "cuda", "ENCODER_DEVICE": "auto",
    }  # fmt: skip
    links = make_links("unix", tmp_path)
    made = planned(
        model, REDIS, exported, links=links, device="cpu", dtype="float32", served_names=["ours"],
        api_key="k",
    )  # fmt: skip
    assert made.notes == [
        "DECODER_ADDRESS of the environment is overridden by triptych serve",
        "DECODER_DEVICE of the environment is overridden by --device",
        "DECODER_DTYPE of the environment is overridden by --dtype",
        "GATEWAY_DECODER_ADDRESSES of the environment is overridden by triptych serve",
        "GATEWAY_SERVED_MODEL_NAME of the environment is overridden by --served-model-name",
    ]
    assert made.model_name == "ours"


def test_options_reach_the_settings_that_they_are_named_after(model: Path) -> None:
    made = plan(
        model, {"CUDA_VISIBLE_DEVICES": "0"}, max_model_len=512, max_num_seqs=7, memory_share=0.5,
        api_key="sk-x", served_names=["m"], host="0.0.0.0", access_log=True,
    )  # fmt: skip
    *_, decoder, gateway = made.children
    own = DecoderSettings.from_environment(decoder.environment)
    assert (own.max_model_len, own.max_num_sequences) == (512, 7)
    assert own.memory_fraction == pytest.approx(0.35)
    front = GatewaySettings.from_environment(gateway.environment)
    assert (front.keys, front.served_model_name, front.host) == (("sk-x",), "m", "0.0.0.0")
    assert front.log_level == "INFO"  # its line for each request
    assert made.log_levels["gateway"] == "WARNING"
    assert made.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DECODER_MAX_MODEL_LEN", "8k", "DECODER_MAX_MODEL_LEN: .*integer"),
        ("GATEWAY_PROT", "9", "unknown variable GATEWAY_PROT"),
        ("GATEWAY_PORT", "99999", "GATEWAY_PORT: '99999' is not a port"),
        ("ENCODER_DTYPE", "int8", "ENCODER_DTYPE: "),
    ],
)
def test_a_malformed_variable_is_named_before_anything_starts(
    model: Path, name: str, value: str, said: str
) -> None:
    with pytest.raises(StackError, match=said) as refused:
        plan(model, {"CUDA_VISIBLE_DEVICES": "", name: value}, port=None)
    assert refused.value.status == 2


def test_an_address_that_others_reach_needs_a_key(model: Path) -> None:
    none = {"CUDA_VISIBLE_DEVICES": ""}
    for host in ("0.0.0.0", "::", "example.invalid"):
        with pytest.raises(StackError, match="give --api-key KEY"):
            plan(model, none, host=host)
    assert plan(model, none | {"GATEWAY_API_KEYS": "none"}, host="0.0.0.0").children
    assert plan(model, none, host="::1").url.startswith("http://[::1]:")
    assert plan(model, none, host="::", api_key="k").url.startswith("http://[::1]:")  # no IPv4


def test_metrics_of_all_have_one_port(model: Path) -> None:
    made = plan(model, metrics_port=0)
    assert made.metrics_url == f"http://127.0.0.1:{made.metrics_port}/metrics"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StackError, match=f"cannot listen on 127.0.0.1:{port}"):
            plan(model, metrics_port=port)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no config\.json"):
        plan(tmp_path)


def test_a_port_in_use_is_refused(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StackError, match=f"cannot listen on 127.0.0.1:{port}"):
            planned(model, None, port=port)


def placed(
    encoders: int, decoders: int, gpus: int, device: str = "auto", cpus: int = 8
) -> tuple[list[Placement], list[Placement]]:
    return place(device, device, encoders=encoders, decoders=decoders, gpus=gpus, cpus=cpus)


def test_one_gpu_is_shared_and_not_filled() -> None:
    encoders, decoders = placed(1, 1, 1)
    assert {p.device for p in encoders + decoders} == {"cuda:0"}
    assert 0.8 < sum(p.memory_fraction for p in encoders + decoders) <= 0.9
    assert encoders[0].memory_fraction < decoders[0].memory_fraction


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("encoders", "decoders", "gpus"), [(1, 3, 2), (2, 2, 3), (4, 4, 4)])
def test_no_card_is_promised_twice(encoders: int, decoders: int, gpus: int, device: str) -> None:
    first, second = placed(encoders, decoders, gpus, device)
    placements = first + second
    assert len(placements) == encoders + decoders
    assert len({p.device for p in placements}) == gpus
    for card in {p.device for p in placements}:
        assert sum(p.memory_fraction for p in placements if p.device == card) <= 0.9001


def test_two_cards_for_two_processes_are_not_shared() -> None:
    encoders, decoders = placed(1, 1, 2)
    assert (encoders[0].device, decoders[0].device) == ("cuda:1", "cuda:0")
    assert encoders[0].memory_fraction == decoders[0].memory_fraction == 0.9


@pytest.mark.parametrize(
    ("gpus", "ranks", "layout", "counts"),
    [
        (1, 1, Layout(0, 1), (1, 1)),
        (2, 1, Layout(0, 2), (2, 2)),
        (4, 1, Layout(1, 3), (1, 3)),
        (8, 2, Layout(2, 6), (2, 3)),
        (8, 4, Layout(0, 8), (8, 2)),
    ],
)
def test_all_cards_are_used(gpus: int, ranks: int, layout: Layout, counts: tuple[int, int]) -> None:
    assert how_many(None, None, layout, images=True, gpus=gpus, ranks=ranks) == counts
    first, second = place(
        "cuda", "cuda", encoders=counts[0], decoders=counts[1], gpus=gpus, cpus=8, ranks=ranks
    )
    used = [device for p in first + second for device in p.devices]
    assert sorted(set(used)) == [f"cuda:{n}" for n in range(gpus)]
    assert all(p.ranks == ranks and len(p.devices) == ranks for p in second)
    both = not layout.encoder_cards
    assert len(used) == (2 * gpus if both else gpus)
    assert {p.memory_fraction for p in second} == {0.75 if both else 0.9}


def test_a_text_model_uses_all_cards() -> None:
    assert how_many(None, None, None, images=False, gpus=4) == (0, 4)
    assert how_many(None, None, None, images=False, gpus=4, ranks=2) == (0, 2)
    assert how_many(None, None, None, images=False, gpus=0) == (0, 1)
    assert how_many(None, None, None, images=True, gpus=0) == (1, 1)


def test_a_number_that_is_given_is_kept() -> None:
    layout = Layout(0, 4)
    assert how_many(2, None, layout, images=True, gpus=4) == (2, 2)
    assert how_many(None, 3, layout, images=True, gpus=4) == (1, 3)
    assert how_many(None, 4, layout, images=True, gpus=4) == (4, 4)
    assert how_many(None, 1, layout, images=True, gpus=4, ranks=2) == (2, 1)
    assert how_many(3, 5, None, images=True, gpus=0) == (3, 5)


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def places(made: Plan) -> tuple[list[str], list[str]]:
    return [p.device for p in made.encoders], [p.device for p in made.decoders]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_visible_card_has_a_process(model: Path, text_model: Path, device: str) -> None:
    cards = [f"cuda:{n}" for n in range(4)]
    made = plan(model, FOUR, device=device, layout="both")
    assert places(made) == (cards, cards) and made.layout == ""
    variables = {k: v for c in made.children for k, v in c.environment.items()}
    assert variables["DECODER_DEVICE"] == "cuda:3"
    made = plan(model, FOUR, device=device, layout="split:1+3")
    assert places(made) == (cards[3:], cards[:3])
    chosen = plan(model, FOUR, device=device)
    assert chosen.layout.startswith("layout ") and "of the work" in chosen.layout
    assert set(cards) == {d for kind in places(chosen) for d in kind}
    assert places(plan(text_model, FOUR, device=device)) == ([], cards)


def test_a_named_card_is_the_only_one(model: Path) -> None:
    named = plan(model, FOUR, device="cuda:2")
    assert places(named) == (["cuda:2"], ["cuda:2"]) and named.layout == ""
    with pytest.raises(StackError, match="0 cards visible; it needs cards"):
        plan(model, FOUR, device="cuda:2", layout="both")


def test_a_model_that_fits_only_a_whole_card_has_one(model: Path) -> None:
    made = planned(model, REDIS, FOUR, fits_beside=False)
    encoders, decoders = places(made)
    assert not set(encoders) & set(decoders)
    assert "does not fit a card beside an encoder" in made.layout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "split:2+3"}, "4 cards visible; what fits: both, split:1\\+3, split:2\\+2"),
        ({"layout": "split"}, "is not auto, both or split:E\\+D"),
        ({"layout": "both", "decoders": 2}, "leave out --encoders"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(model: Path, options: Any, said: str) -> None:
    with pytest.raises(StackError, match=said) as caught:
        plan(model, FOUR, **options)
    assert caught.value.status == 2


def test_a_text_model_has_no_layout(text_model: Path) -> None:
    with pytest.raises(StackError, match="a text model has no encoder"):
        plan(text_model, FOUR, layout="both")


def test_cpu_threads_are_divided() -> None:
    encoders, decoders = placed(1, 1, 0)
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
    # CUDA's rule: what follows the first invalid one is hidden.
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0, 1,-1,2"}, tmp_path) == 2
    assert count_gpus({}, tmp_path / "none") == 0


def test_a_redis_of_our_own_listens_only_on_its_socket(tmp_path: Path) -> None:
    made = redis_spec(tmp_path)
    assert made is not None
    spec, urls = made
    users = (tmp_path / "users.acl").read_text()
    for kind in ("encoder", "decoder", "gateway"):
        url = urlsplit(urls[kind])
        assert (url.scheme, url.username, url.path) == ("unix", kind, f"{tmp_path}/redis.sock")
        assert url.password and url.password not in users
        assert not any(url.password in word for word in spec.command)
    options = dict(zip(spec.command[1::2], spec.command[2::2], strict=True))
    assert options["--port"] == "0"
    assert options["--save"] == ""
    assert options["--maxmemory-policy"] == "volatile-lru"
    assert os.path.isabs(options["--unixsocket"])


@pytest.mark.parametrize(
    ("gpus", "ranks", "decoders", "encoders", "expected"),
    [
        (2, 2, 1, 1, (["cuda:0"], ["cuda:0"])),
        (4, 2, 1, 1, (["cuda:0"], ["cuda:2"])),
        (8, 4, 2, 1, (["cuda:0", "cuda:4"], ["cuda:0"])),
        (3, 2, 2, 1, (["cuda:0", "cuda:0"], ["cuda:1"])),
    ],
)
def test_ranks_have_neighbouring_cards(gpus, ranks, decoders, encoders, expected):
    """All of them exist, and a card's processes share its memory."""
    first, second = place(
        "auto", "auto", encoders=encoders, decoders=decoders, gpus=gpus, cpus=8, ranks=ranks
    )
    assert ([p.device for p in second], [p.device for p in first]) == expected
    shares = Counter[str]()
    for placement in (*first, *second):
        for device in placement.devices:
            assert int(device.removeprefix("cuda:")) < gpus
            shares[device] += placement.memory_fraction
    assert all(p.ranks == ranks and len(p.devices) == ranks for p in second)
    assert max(shares.values()) <= 0.9001


def test_a_decoder_of_several_ranks_is_told_so(model: Path) -> None:
    made = plan(model, {"CUDA_VISIBLE_DEVICES": "0,1"}, tensor_parallel=2)
    (decoder,) = [child for child in made.children if child.name.startswith("decoder")]
    assert decoder.environment["DECODER_TENSOR_PARALLEL"] == "2"
    assert decoder.environment["DECODER_DEVICE"] == "cuda:0"
    assert [placement.ranks for placement in made.decoders] == [2]
    exported = {"CUDA_VISIBLE_DEVICES": "0,1", "DECODER_TENSOR_PARALLEL": "2"}
    assert [placement.ranks for placement in plan(model, exported).decoders] == [2]
    with pytest.raises(StackError, match="--tensor-parallel 4: only 2 cards are visible"):
        plan(model, {"CUDA_VISIBLE_DEVICES": "0,1"}, tensor_parallel=4)


def test_all_ranks_of_a_decoder_on_a_named_card_exist(model: Path) -> None:
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    (place,) = plan(model, four, decoder_device="cuda:2", tensor_parallel=2).decoders
    assert place.devices == ["cuda:2", "cuda:3"]
    said = "--tensor-parallel 2: only 1 card is visible from cuda:3 on"
    with pytest.raises(StackError, match=said):
        plan(model, four, decoder_device="cuda:3", tensor_parallel=2)
    on_cpu = plan(model, {"CUDA_VISIBLE_DEVICES": "0"}, device="cpu", tensor_parallel=2)
    assert [place.devices for place in on_cpu.decoders] == [["cpu", "cpu"]]
