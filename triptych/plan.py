"""Resolves the options of `triptych serve` into processes and their environments.

Nothing is started here, so tests can check every variable against the services' settings. `serve`
and `demo` pass the plan to `stack`. Options that cannot be served raise `StackError`.

A service's variable that the user has exported reaches the service, unless an option or the plan
(addresses, sockets) overrides it. The plan then has a note about the overridden variable.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from services.common.families import read_spec
from services.common.model_spec import ModelSpec, ModelSpecError
from services.common.quantization import quantized_at_load
from triptych import ROOT
from triptych.devices import Placement, count_gpus, how_many, place
from triptych.layout import Layout, choose, layouts, read_layout, share_of_encoding
from triptych.options import DEFAULT_PORT, DEMONSTRATION_MODEL, DEVICE, LOOPBACK, ServeOptions
from triptych.ports import Ports
from triptych.probes import gateway_ready, grpc_ready
from triptych.stack import ChildSpec, StackError

# URL of Redis, with credentials, by kind of service. Empty if the service uses no Redis.
RedisUrls = Mapping[str, str]
GRPC_SERVICES = {"encoder": "triptych.v1.Encoder", "decoder": "triptych.v1.Decoder"}
# A gateway uses at most one core. Encoders need the others to decode JPEGs (benchmarks/LOG.md).
_CORES_PER_GATEWAY = 4
_MAX_GATEWAYS = 4
# Default time in seconds for which running requests may continue after a signal.
_GRACE_S = 2.5
PREFIXES = ("GATEWAY_", "ENCODER_", "DECODER_")
# Address at which a client reaches a wildcard address. A socket on `::` does not accept IPv4 here.
_WILDCARDS = {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}
# Option that overrides a variable. Other overridden variables are chosen by the plan itself.
_OPTIONS = {
    "SERVED_MODEL_NAME": "--served-model-name",
    "TASK": "--task",
    "CHAT_TEMPLATE": "--chat-template",
    "DEFAULT_CHAT_TEMPLATE_KWARGS": "--default-chat-template-kwargs",
    "OVERRIDE_GENERATION_CONFIG": "--override-generation-config",
    "MAX_IMAGES": "--limit-mm-per-prompt",
    "MAX_VIDEOS": "--limit-mm-per-prompt",
    "API_KEYS": "--api-key",
    "DTYPE": "--dtype",
    "LOAD_FORMAT": "--load-format",
    "QUANTIZATION": "--quantization",
    "MAX_MODEL_LEN": "--max-model-len",
    "TENSOR_PARALLEL": "--tensor-parallel",
    "KV_CACHE_DTYPE": "--kv-cache-dtype",
    "MAX_NUM_SEQUENCES": "--max-num-seqs",
    "SPECULATION": "--speculation",
    "SPECULATION_HEAD": "--speculation-head",
    "SPECULATION_TOKENS": "--speculation-tokens",
    "ADAPTERS": "--adapter",
    "MAX_ADAPTERS": "--max-adapters",
    "MAX_ADAPTER_RANK": "--max-adapter-rank",
    "MERGE_ADAPTER": "--merge-adapter",
    "DEVICE": "--device",
    "HOST": "--host",
    "PORT": "--port",
    "REDIS_URL": "--redis-url",
    "MODEL": "the model that is served",
}


# Child processes import neither from the current directory nor from another `services` package.
_OWN_PACKAGES = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "PYTHONSAFEPATH": "1",
}


@dataclass(frozen=True, slots=True)
class Links:
    """Private connections between the services on one machine. One of both attributes is set.

    Attributes:
        sockets: private directory for Unix sockets. None if TCP on loopback is used.
        token_file: file with a token that services show each other over TCP, because every user of
            the machine can connect to loopback. None if Unix sockets are used.
    """

    sockets: Path | None = None
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of a stack.

    Attributes:
        url: URL of the HTTP API for a client on this machine.
        model_name: name of the model in requests.
        children: processes to run.
        metrics_urls: Prometheus endpoints of the children, by child name.
        metrics_host: address of the Prometheus endpoint for all processes.
        metrics_port: port of the Prometheus endpoint for all processes.
        log_levels: lowest level that is shown of each child's log, by child name.
        encoders, decoders: placements of the engines.
        grace_s: seconds for which running requests may continue after a signal.
        notes: messages about exported variables that are overridden.
        ports: reservation of the ports against other stacks, as long as the object exists.
        layout: message about the layout that `auto` chose, with the reason. Empty if there was no
            choice.
    """

    url: str
    model_name: str
    children: list[ChildSpec]
    metrics_urls: dict[str, str]
    metrics_host: str
    metrics_port: int
    log_levels: dict[str, str]
    encoders: list[Placement]
    decoders: list[Placement]
    grace_s: float
    notes: list[str]
    ports: Ports
    layout: str = ""

    @property
    def metrics_url(self) -> str:
        """URL of the metrics of all processes, for a client on this machine."""
        host = _WILDCARDS.get(self.metrics_host, self.metrics_host)
        return f"http://{_bracketed(host)}:{self.metrics_port}/metrics"


def read_model(directory: Path, quantization: str = "", task: str = "") -> ModelSpec:
    """Reads the spec of a checkpoint directory.

    Args:
        directory: the checkpoint.
        quantization: see `quantized_at_load`.
        task: task that the user has named. Empty if the files decide.

    Raises:
        StackError: the directory has no model, or the model cannot be served.
    """
    try:
        return quantized_at_load(read_spec(directory, task), quantization)
    except ModelSpecError as error:
        raise StackError(str(error), 2) from error


def devices_of(options: ServeOptions, environment: Mapping[str, str]) -> tuple[str, str]:
    """Requested devices of the encoders and of the decoders.

    Raises:
        StackError: a variable is not the name of a device.
    """
    return (
        options.encoder_device or _given(options, environment, "ENCODER_DEVICE"),
        options.decoder_device or _given(options, environment, "DECODER_DEVICE"),
    )


def _given(options: ServeOptions, environment: Mapping[str, str], name: str) -> str:
    if options.device != "auto":
        return options.device
    if not DEVICE.fullmatch(given := environment.get(name, "auto")):
        raise StackError(f"{name}: {given!r} is not auto, cpu, cuda or cuda:N", 2)
    return given


def plan_stack(
    options: ServeOptions,
    spec: ModelSpec,
    redis: RedisUrls | None,
    environment: Mapping[str, str],
    cpus: int,
    links: Links,
    *,
    fits_beside: bool = True,
) -> Plan:
    """Plans the processes that serve `options`.

    Args:
        redis: URLs of Redis. None if embeddings are cached in memory only.
        environment: variables of the services and of CUDA.
        cpus: number of CPU cores, which are divided among the processes.
        links: connections between the services.
        fits_beside: True if a decoder fits a card beside an encoder.

    Raises:
        StackError: the model cannot be served with these options, or the port is in use.
    """
    host = options.host or environment.get("GATEWAY_HOST") or LOOPBACK
    wanted = _port(options, environment)
    _check_keys(options, environment, host, wanted)
    encoders, decoders, layout = _places(options, spec, environment, cpus, fits_beside)
    names = _model_names(options, environment)
    with contextlib.closing(Ports()) as ports:
        port = ports.claim(host, wanted)
        metrics_port = ports.claim(options.metrics_host, options.metrics_port)
        engines = _engines(options, redis, ports, links, encoders, decoders)
        common = {
            "MODEL": str(options.model.resolve()),
            "HOST": host,
            "SERVED_MODEL_NAME": names,
            **_server_defaults(options),
            **_adapters(options),
            "ENCODER_ADDRESSES": _addresses(engines, "encoder"),
            "DECODER_ADDRESSES": _addresses(engines, "decoder"),
            **_token(links),
            **({"REDIS_URL": redis["gateway"]} if redis is not None and redis["gateway"] else {}),
            **({"API_KEYS": options.api_key} if options.api_key is not None else {}),
        }
        gateways = _gateways(options, common, port, cpus, ports)
    services = [service.resolved(environment) for service in (*engines, *gateways)]
    if options.redis_url or any(name.startswith(PREFIXES) for name in environment):
        _validate(services, environment)
    client_host = _WILDCARDS.get(host, host)
    notes = dict.fromkeys(note for service in services for note in service.notes(environment))
    return Plan(
        url=f"http://{_bracketed(client_host)}:{port}",
        model_name=names.partition(",")[0],
        children=[service.spec(client_host) for service in services],
        metrics_urls={
            s.name: s.metrics_url for s in services if s.variables["METRICS_PORT"] != "0"
        },
        metrics_host=options.metrics_host,
        metrics_port=metrics_port,
        log_levels={
            s.name: environment.get(f"{s.kind.upper()}_LOG_LEVEL", options.log_level)
            for s in services
        },
        encoders=[s.placement for s in services if s.kind == "encoder"],
        decoders=[s.placement for s in services if s.kind == "decoder"],
        grace_s=max(float(s.variables["SHUTDOWN_GRACE_S"]) for s in services),
        notes=list(notes),
        ports=ports,
        layout=layout,
    )


def _port(options: ServeOptions, environment: Mapping[str, str]) -> int:
    if options.port is not None:
        return options.port
    given = environment.get("GATEWAY_PORT", str(DEFAULT_PORT))
    if not given.isdecimal() or int(given) > 65535:
        raise StackError(f"GATEWAY_PORT: {given!r} is not a port (0 to 65535)", 2)
    return int(given)


def _check_keys(
    options: ServeOptions, environment: Mapping[str, str], host: str, port: int
) -> None:
    """Raises StackError if other machines could send requests and there is no API key.

    The gateway checks the same when it starts.
    """
    if options.api_key or environment.get("GATEWAY_API_KEYS"):
        return
    with contextlib.suppress(ValueError):
        if host == "localhost" or ip_address(host).is_loopback:
            return
    raise StackError(
        f"without an API key, anyone who can connect to {host}:{port} could use the model: give "
        "--api-key KEY, or export GATEWAY_API_KEYS=file:PATH (`triptych key` makes keys), or "
        "GATEWAY_API_KEYS=none to allow this",
        2,
    )


def _server_defaults(options: ServeOptions) -> dict[str, str]:
    """Returns the gateway's variables for the options that change the defaults of requests."""
    template, media = options.chat_template, options.max_media or {}
    given = {
        "TASK": options.task,
        "CHAT_TEMPLATE": None if template is None else str(template.resolve()),
        "DEFAULT_CHAT_TEMPLATE_KWARGS": options.template_defaults,
        "MAX_IMAGES": media.get("image"),
        "MAX_VIDEOS": media.get("video"),
        "OVERRIDE_GENERATION_CONFIG": options.generation,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _model_names(options: ServeOptions, environment: Mapping[str, str]) -> str:
    """Returns the comma-separated names of the model in requests."""
    if options.served_names:
        return ",".join(options.served_names)
    if given := environment.get("GATEWAY_SERVED_MODEL_NAME"):
        return given
    is_demo = options.model.resolve() == DEMONSTRATION_MODEL
    return options.hub_name or ("triptych-demo" if is_demo else options.model.resolve().name)


def _places(
    options: ServeOptions,
    spec: ModelSpec,
    environment: Mapping[str, str],
    cpus: int,
    fits_beside: bool,
) -> tuple[list[Placement], list[Placement], str]:
    """Places the encoders and the decoders.

    Returns:
        Placements of the encoders and of the decoders, and a message about the chosen layout.

    Raises:
        StackError: the options do not fit the model or the cards.
    """
    if spec.vision is None and (options.encoders or options.encoder_device):
        raise StackError(
            f"no encoder can be started: the model at {options.model} is a text model", 2
        )
    devices, images = devices_of(options, environment), spec.vision is not None
    gpus, ranks = count_gpus(environment), ranks_of(options, environment)
    first = int(devices[1].partition(":")[2] or 0)
    if gpus and devices[1] != "cpu" and ranks > max(1, left := gpus - first):
        count = "1 card is" if left == 1 else f"{left} cards are"
        where = f" from {devices[1]} on" if first else ""
        raise StackError(f"--tensor-parallel {ranks}: only {count} visible{where}", 2)
    # For a text model only the decoders' device counts, since there is no encoder.
    wanted = devices if images else devices[1:]
    spread = gpus if all(device in ("auto", "cuda") for device in wanted) else 0
    layout, line = _layout(options, spec, spread, ranks, fits_beside)
    encoders, decoders = how_many(
        options.encoders, options.decoders, layout, images=images, gpus=spread, ranks=ranks
    )
    placed = place(
        *devices,
        encoders=encoders,
        decoders=decoders,
        gpus=gpus,
        cpus=cpus,
        card_share=options.memory_share,
        ranks=ranks,
    )
    return *placed, line


def _layout(
    options: ServeOptions, spec: ModelSpec, cards: int, ranks: int, fits_beside: bool
) -> tuple[Layout | None, str]:
    """Returns the requested or chosen layout, and a message about the choice.

    The layout is None if the numbers of processes are given, or without an encoder or cards.

    Raises:
        StackError: the requested layout does not fit the cards or the other options.
    """
    if options.layout != "auto" and (options.encoders or options.decoders):
        raise StackError(
            "--layout sets the numbers of encoders and decoders: leave out --encoders and "
            "--decoders",
            2,
        )
    if options.layout != "auto" and spec.vision is None:
        raise StackError("--layout needs a model with images: a text model has no encoder", 2)
    if (layout := read_layout(options.layout, cards, ranks)) is not None:
        return layout, ""
    if spec.vision is None or options.encoders or options.decoders or not layouts(cards, ranks):
        return None, ""
    layout, line = choose(share_of_encoding(spec), cards, ranks, beside=fits_beside)
    return layout, line if cards > 1 else ""


def ranks_of(options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Number of cards of each decoder.

    An exported variable that is not a number counts as 1 here. `_validate` refuses it later.
    """
    exported = environment.get("DECODER_TENSOR_PARALLEL", "1")
    return options.tensor_parallel or (int(exported) if exported.isdecimal() else 1) or 1


def _validate(services: "list[_Service]", environment: Mapping[str, str]) -> None:
    """Checks each service's environment with the service's settings class.

    The import of these classes takes a third of a second.

    Raises:
        StackError: a variable is unknown or malformed.
    """
    from services.common.settings import SettingsError
    from services.decoder.settings import DecoderSettings
    from services.encoder.settings import EncoderSettings
    from services.gateway.settings import GatewaySettings

    kinds = {"gateway": GatewaySettings, "encoder": EncoderSettings, "decoder": DecoderSettings}
    for service in services:
        try:
            kinds[service.kind].from_environment({**environment, **service.environment})
        except SettingsError as error:
            raise StackError(str(error), 2) from error


@dataclass(frozen=True, slots=True)
class _Service:
    """A process of a service.

    Attributes:
        kind: `gateway`, `encoder` or `decoder`.
        name: name of the process, such as `encoder-0`.
        variables: settings that the plan decides, by upper-case field name without the prefix.
        defaults: settings that an exported variable replaces, in the same form. After `resolved`,
            the settings that the plan decides.
        shared_port: port on which several gateways listen together. None if there is none.
        num_threads: CPU threads for tensor operations. 0 if torch chooses.
        ranks: number of cards of the engine.
    """

    kind: str
    name: str
    variables: Mapping[str, str]
    defaults: Mapping[str, str]
    shared_port: int | None = None
    num_threads: int = 0
    ranks: int = 1

    def resolved(self, environment: Mapping[str, str]) -> "_Service":
        """Returns the process with the user's variables in place of its defaults."""
        found = {
            field: environment.get(f"{self.kind.upper()}_{field}", value)
            for field, value in self.defaults.items()
        }
        return replace(self, variables={**found, **self.variables}, defaults=self.variables)

    @property
    def environment(self) -> dict[str, str]:
        return {f"{self.kind.upper()}_{field}": value for field, value in self.variables.items()}

    def notes(self, environment: Mapping[str, str]) -> Iterator[str]:
        """Yields messages about the exported variables that a resolved service overrides."""
        decided = set(self.defaults)
        if self.kind != "gateway":
            decided.add("HEALTH_PORT")
        for field in sorted(decided):
            exported = environment.get(f"{self.kind.upper()}_{field}")
            chosen = self.variables.get(field, "")
            if field == "PORT" and self.shared_port is not None:
                chosen = str(self.shared_port)
            if exported is None or exported == chosen:
                continue
            # A device of `auto` or `cuda` is not overridden: the plan chooses one of its cards.
            if field != "DEVICE" or exported not in ("auto", chosen.partition(":")[0]):
                by = _OPTIONS.get(field)
                name = f"{self.kind.upper()}_{field}"
                yield f"{name} of the environment is overridden by {by or 'triptych serve'}"

    @property
    def placement(self) -> Placement:
        fields = self.variables
        share = float(fields["MEMORY_FRACTION"])
        return Placement(fields["DEVICE"], share, self.num_threads, self.ranks)

    @property
    def health_address(self) -> str:
        if "HEALTH_PORT" in self.variables:
            return f"{LOOPBACK}:{self.variables['HEALTH_PORT']}"
        return self.variables["ADDRESS"]

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.variables['METRICS_PORT']}/metrics"

    def spec(self, client_host: str) -> ChildSpec:
        command = [sys.executable, "-m", f"services.{self.kind}"]
        front = self.kind == "gateway"
        if front:
            is_ready = functools.partial(gateway_ready, client_host, int(self.variables["PORT"]))
            command += ["--metrics-host", LOOPBACK]
        else:
            service = GRPC_SERVICES[self.kind]
            is_ready = functools.partial(grpc_ready, self.health_address, service)
        if self.shared_port is not None:
            command += ["--shared-port", str(self.shared_port)]
        environment = self.environment | _OWN_PACKAGES
        if self.num_threads and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(self.num_threads)
        return ChildSpec(self.name, command, environment, is_ready, is_front=front)


def _engines(
    options: ServeOptions,
    redis: RedisUrls | None,
    ports: Ports,
    links: Links,
    encoders: list[Placement],
    decoders: list[Placement],
) -> list[_Service]:
    """Plans the encoders and then the decoders."""
    decided = {"MODEL": str(options.model.resolve()), **_token(links), **_adapters(options)}
    given = {"DTYPE": options.dtype, "LOAD_FORMAT": options.load_format}
    decided |= {field: value for field, value in given.items() if value is not None}
    defaults = {
        "SHUTDOWN_GRACE_S": f"{_GRACE_S:g}",
        # The console needs the records about the progress of the start, which are logged at INFO.
        "LOG_LEVEL": "DEBUG" if options.log_level == "DEBUG" else "INFO",
    }
    limits = {
        "TASK": options.task,
        "MAX_MODEL_LEN": options.max_model_len,
        "MAX_NUM_SEQUENCES": options.max_num_seqs,
        "QUANTIZATION": options.quantization,
        "TENSOR_PARALLEL": options.tensor_parallel,
        "KV_CACHE_DTYPE": options.kv_cache_dtype,
        "SPECULATION": options.speculation,
        "SPECULATION_HEAD": options.speculation_head,
        "SPECULATION_TOKENS": options.speculation_tokens,
        "ADAPTERS": ",".join(options.adapters) if options.adapters else None,
        "MAX_ADAPTERS": options.max_adapters,
        "MAX_ADAPTER_RANK": options.max_adapter_rank,
    }
    found: list[_Service] = []
    for kind, places in (("encoder", encoders), ("decoder", decoders)):
        for index, placement in enumerate(places):
            name = f"{kind}-{index}"
            variables = {
                **decided,
                **_listening(name, links, ports),
                "REDIS_URL": redis[kind] if redis else "",
                "DEVICE": placement.device,
            }
            own = {
                **defaults,
                "MEMORY_FRACTION": f"{placement.memory_fraction:g}",
            }
            # An exported port can only be used if there is one process of the kind.
            alone = len(places) == 1
            (own if alone else variables)["METRICS_PORT"] = str(ports.claim(LOOPBACK, 0))
            if kind == "encoder" and options.adapters:
                variables["ADAPTERS"] = ",".join(options.adapters)
            if kind == "decoder":
                variables["ENCODER_ADDRESSES"] = _addresses(found, "encoder")
                variables |= {k: str(v) for k, v in limits.items() if v is not None}
            threads, ranks = placement.num_threads, placement.ranks
            found.append(_Service(kind, name, variables, own, num_threads=threads, ranks=ranks))
    return found


def _adapters(options: ServeOptions) -> dict[str, str]:
    """Returns the variable of all services for the adapter that is folded into the weights."""
    found = options.merge_adapter
    return {} if found is None else {"MERGE_ADAPTER": str(found.resolve())}


def _listening(name: str, links: Links, ports: Ports) -> dict[str, str]:
    """Variables for the addresses on which an engine's front listens."""
    if links.sockets is not None:
        return {"ADDRESS": f"unix:{links.sockets / name}.sock"}
    return {
        "ADDRESS": f"{LOOPBACK}:{ports.claim(LOOPBACK, 0)}",
        "HEALTH_PORT": str(ports.claim(LOOPBACK, 0)),
    }


def _token(links: Links) -> dict[str, str]:
    return {} if links.token_file is None else {"PEER_TOKEN_FILE": str(links.token_file)}


def _gateways(
    options: ServeOptions, common: Mapping[str, str], port: int, cpus: int, ports: Ports
) -> list[_Service]:
    """Plans one gateway on the port, or several that share the port.

    Each of several gateways also has a port of its own.
    """
    count = options.gateways or max(1, min(_MAX_GATEWAYS, cpus // _CORES_PER_GATEWAY))
    # A single gateway enforces tenants' limits without Redis.
    shared = {"REPLICAS": str(count)} if count > 1 else {}
    common = common if shared else {k: v for k, v in common.items() if k != "REDIS_URL"}
    level = "INFO" if options.access_log and options.log_level != "DEBUG" else options.log_level
    found: list[_Service] = []
    for index in range(count):
        own = str(ports.claim(common["HOST"], 0) if shared else port)
        metrics = {"METRICS_PORT": str(ports.claim(LOOPBACK, 0))}
        defaults = {
            "SHUTDOWN_GRACE_S": f"{_GRACE_S:g}",
            "LOG_LEVEL": level,
        }
        variables = {**common, **shared, "PORT": own}
        (variables if shared else defaults).update(metrics)
        name = f"gateway-{index}" if shared else "gateway"
        shared_port = port if shared else None
        found.append(_Service("gateway", name, variables, defaults, shared_port=shared_port))
    return found


def _addresses(services: list[_Service], kind: str) -> str:
    return ",".join(each.variables["ADDRESS"] for each in services if each.kind == kind)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
