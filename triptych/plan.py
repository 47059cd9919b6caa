"""What `triptych serve` runs: the options resolved into processes and their environments.

Nothing is started here, so tests can check every variable against the services' settings. `serve`
and `demo` hand the plan to `stack`. What cannot be served is a `StackError`.
"""

import contextlib
import functools
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.families import read_spec
from services.common.model_spec import ModelSpecError
from triptych.devices import count_gpus, place
from triptych.probes import gateway_ready, grpc_ready
from triptych.stack import STOP_TIMEOUT_S, ChildSpec, StackError

DEMONSTRATION_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
ENCODER_SERVICE = "triptych.v1.Encoder"
DECODER_SERVICE = "triptych.v1.Decoder"
_LOOPBACK = "127.0.0.1"
# A gateway uses one core at most; encoders need the others to decode JPEGs. See benchmarks/LOG.md.
_CORES_PER_GATEWAY = 4
_MAX_GATEWAYS = 4
# Running requests may continue this long after a signal; the rest of the time is for cleanup.
_GRACE_S = f"{STOP_TIMEOUT_S - 2:g}"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `triptych serve`, as its help describes them.

    Attributes:
        gateways: None: one per four cores, at most four.
        encoders: None: one, or none for a model that takes text alone.
        grpc: between the services: `unix` or `tcp`.
        served_name: None: the directory's name.
    """

    model: Path = DEMONSTRATION_MODEL
    host: str = _LOOPBACK
    port: int = 8000
    device: str = "auto"
    encoder_device: str | None = None
    decoder_device: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    gateways: int | None = None
    encoders: int | None = None
    decoders: int = 1
    redis_url: str | None = None
    grpc: str = "unix"
    served_name: str | None = None


@dataclass(frozen=True, slots=True)
class Links:
    """How services on one machine reach each other, and nobody else does.

    Attributes:
        sockets: a private directory for Unix sockets; None: TCP on loopback.
        token_file: for TCP, which every user of the machine reaches.
    """

    sockets: Path | None = None
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class RedisUrls:
    """Redis, as each service logs in; empty: it does without."""

    encoder: str
    decoder: str

    def of(self, kind: str) -> str:
        """Of a service: `encoder` or `decoder`."""
        return self.encoder if kind == "encoder" else self.decoder


@dataclass(frozen=True, slots=True)
class Plan:
    """The services of a stack.

    Attributes:
        url: of the HTTP API, for a client on this machine.
        model_name: the `model` of requests.
        children: the processes.
        metrics_urls: Prometheus endpoint of each child, by its name.
    """

    url: str
    model_name: str
    children: list[ChildSpec]
    metrics_urls: dict[str, str]


def takes_images(model: Path) -> bool:
    """Whether a checkpoint directory holds a model with vision.

    Raises:
        StackError: there is no model, or it cannot be served.
    """
    if not (model / "config.json").is_file():
        raise StackError(f"no model at {model}: it has no config.json", 2)
    try:
        return read_spec(model).vision is not None
    except ModelSpecError as error:
        raise StackError(str(error), 2) from error


def plan_stack(
    options: ServeOptions,
    redis: RedisUrls | None,
    environment: Mapping[str, str],
    cpus: int,
    log_directory: Path | None,
    links: Links | None = None,
) -> Plan:
    """The processes that serve `options`.

    Args:
        options: of the command line.
        redis: None: the encoders cache in memory only.
        environment: says which GPUs may be used.
        cpus: divided among the processes.
        log_directory: for one file per child; None: standard error.
        links: between the services; None: TCP that asks for no token.

    Raises:
        StackError: the model cannot be served, or not with these options, or the port is taken.
    """
    encoders = 1 if options.encoders is None else options.encoders
    if not takes_images(options.model):
        if options.encoders or options.encoder_device:
            raise StackError(
                f"no encoder can be started: the model at {options.model} takes no images", 2
            )
        encoders = 0
    ports = _Ports()
    port = ports.claim(options.host, options.port)
    links = links or Links()
    engines = _engines(options, encoders, redis, environment, cpus, ports, links)
    model_name = options.served_name or options.model.resolve().name
    if options.model.resolve() == DEMONSTRATION_MODEL:
        model_name = "triptych-demo"
    common = {
        "MODEL": str(options.model.resolve()),
        "HOST": options.host,
        "SHUTDOWN_GRACE_S": _GRACE_S,
        "SERVED_MODEL_NAME": model_name,
        "ENCODER_ADDRESSES": _addresses(engines, "encoder"),
        "DECODER_ADDRESSES": _addresses(engines, "decoder"),
        **_token(links),
    }
    gateways = _gateways(options, common, port, cpus, ports)
    ports.release()
    client_host = _LOOPBACK if options.host in ("0.0.0.0", "::", "") else options.host
    return Plan(
        url=f"http://{client_host}:{port}",
        model_name=model_name,
        children=[
            service.spec(environment, client_host, log_directory)
            for service in (*engines, *gateways)
        ],
        metrics_urls={
            service.name: f"http://{_LOOPBACK}:{service.variables['METRICS_PORT']}/metrics"
            for service in (*engines, *gateways)
        },
    )


@dataclass(frozen=True, slots=True)
class _Service:
    kind: str  # gateway, encoder or decoder
    name: str
    variables: Mapping[str, str]  # settings fields, upper-cased, without the prefix

    @property
    def address(self) -> str:
        if "SOCKET" in self.variables:
            return f"unix:{self.variables['SOCKET']}"
        return f"{_LOOPBACK}:{self.variables['PORT']}"

    @property
    def health_address(self) -> str:
        """The address of the health endpoint."""
        if "HEALTH_PORT" in self.variables:
            return f"{_LOOPBACK}:{self.variables['HEALTH_PORT']}"
        return self.address

    def spec(
        self, environment: Mapping[str, str], client_host: str, log_directory: Path | None
    ) -> ChildSpec:
        """The process; variables that the user exported apply unless the plan sets them."""
        own = {f"{self.kind.upper()}_{field}": value for field, value in self.variables.items()}
        log_level = f"{self.kind.upper()}_LOG_LEVEL"
        own.setdefault(log_level, environment.get(log_level, "WARNING"))
        match self.kind:
            case "gateway":
                port = int(self.variables["PORT"])
                is_ready = functools.partial(gateway_ready, client_host, port)
            case "encoder":
                is_ready = functools.partial(grpc_ready, self.health_address, ENCODER_SERVICE)
            case _:
                is_ready = functools.partial(grpc_ready, self.health_address, DECODER_SERVICE)
        command = [sys.executable, "-m", f"services.{self.kind}"]
        log_path = log_directory / f"{self.name}.log" if log_directory else None
        front = self.kind == "gateway"
        return ChildSpec(self.name, command, own, is_ready, log_path, is_front=front)


def _engines(
    options: ServeOptions,
    encoders: int,
    redis: RedisUrls | None,
    environment: Mapping[str, str],
    cpus: int,
    ports: "_Ports",
    links: Links,
) -> list[_Service]:
    """The encoders, then the decoders."""
    encoder_places, decoder_places = place(
        options.encoder_device or options.device,
        options.decoder_device or options.device,
        encoders=encoders,
        decoders=options.decoders,
        gpus=count_gpus(environment),
        cpus=cpus,
    )
    common = {
        "MODEL": str(options.model.resolve()),
        "HOST": _LOOPBACK,
        "DTYPE": options.dtype,
        "LOAD_FORMAT": options.load_format,
        "SHUTDOWN_GRACE_S": _GRACE_S,
        "REFLECTION": "true",
    }
    common |= _token(links)
    found: list[_Service] = []
    for kind, places in (("encoder", encoder_places), ("decoder", decoder_places)):
        for index, placement in enumerate(places):
            name = f"{kind}-{index}"
            variables = {
                **common,
                **_listening(name, links, ports),
                "REDIS_URL": redis.of(kind) if redis else "",
                "METRICS_PORT": str(ports.claim(_LOOPBACK, 0)),
                "DEVICE": placement.device,
                "MEMORY_FRACTION": f"{placement.memory_fraction:g}",
                "NUM_THREADS": str(placement.num_threads),
            }
            if kind == "decoder":
                variables["ENCODER_ADDRESSES"] = _addresses(found, "encoder")
            found.append(_Service(kind, name, variables))
    return found


def _listening(name: str, links: Links, ports: "_Ports") -> dict[str, str]:
    """Where an engine's service listens."""
    if links.sockets is not None:
        return {"SOCKET": str(links.sockets / f"{name}.sock")}
    listening = {"PORT": str(ports.claim(_LOOPBACK, 0))}
    if links.token_file is not None:
        listening["HEALTH_PORT"] = str(ports.claim(_LOOPBACK, 0))
    return listening


def _token(links: Links) -> dict[str, str]:
    return {} if links.token_file is None else {"PEER_TOKEN_FILE": str(links.token_file)}


def _gateways(
    options: ServeOptions, common: Mapping[str, str], port: int, cpus: int, ports: "_Ports"
) -> list[_Service]:
    """One gateway on the port, or several that share it and have a port of their own each."""
    count = options.gateways or max(1, min(_MAX_GATEWAYS, cpus // _CORES_PER_GATEWAY))
    shared = {"SHARED_PORT": str(port)} if count > 1 else {}
    return [
        _Service(
            "gateway",
            f"gateway-{index}" if shared else "gateway",
            {
                **common,
                **shared,
                "PORT": str(ports.claim(options.host, 0) if shared else port),
                "METRICS_HOST": _LOOPBACK,
                "METRICS_PORT": str(ports.claim(_LOOPBACK, 0)),
            },
        )
        for index in range(count)
    ]


def _addresses(services: list[_Service], kind: str) -> str:
    return ",".join(service.address for service in services if service.kind == kind)


class _Ports:
    """Finds free ports; keeps each bound until all are known, so that all differ.

    Those that it chooses lie below the ones that the kernel gives to clients
    (`ip_local_port_range`), since a child takes seconds to bind its own. They begin at a random
    one, so that two stacks that start at once choose different ones.
    """

    _FIRST, _NUM = 21_000, 11_000

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._next = random.randrange(self._NUM)

    def claim(self, host: str, port: int) -> int:
        """The port, or any free one for 0.

        Raises:
            StackError: another process listens there, or no port is free.
        """
        if port:
            return self._bind(host, port)
        for _ in range(self._NUM):
            self._next = (self._next + 1) % self._NUM
            with contextlib.suppress(StackError):
                return self._bind(host, self._FIRST + self._next)
        raise StackError(f"no port of {host} is free", 2)

    def _bind(self, host: str, port: int) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            held.close()
            raise StackError(f"cannot listen on {host}:{port}: {error.strerror}", 2) from error
        self._held.append(held)
        return port

    def release(self) -> None:
        """Closes the sockets, so that the children can bind the ports."""
        for held in self._held:
            held.close()
        self._held.clear()
