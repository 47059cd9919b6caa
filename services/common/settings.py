"""Settings of a service, which its `__main__` reads from the environment once.

No other file of a service reads the environment. An unknown, missing or malformed variable raises a
`SettingsError` with the variable's name.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from services.common.adapter_config import parse_adapters


class SettingsError(ValueError):
    """Raised if the settings are not valid. The message names each variable that is wrong."""


def traces_endpoint() -> str:
    """Returns the endpoint in OpenTelemetry's standard variables, or an empty string."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if endpoint := os.environ.get(name, "").strip():
            return endpoint
    return ""


def omp_num_threads() -> int:
    """Returns OpenMP's standard variable, which torch uses, or 0 if it is not set."""
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    return int(value) if value.isdecimal() else 0


def let_omp_threads_block() -> None:
    """Sets OpenMP's standard variable so that waiting threads block, unless it is set already."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def split_list(value: str) -> tuple[str, ...]:
    """Splits a comma-separated setting."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


class ServiceSettings(BaseModel):
    """Base of the settings of a service. With the prefix `GATEWAY_`, the field `port` is read from
    `GATEWAY_PORT`.
    """

    prefix: ClassVar[str]
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads the settings.

        Raises:
            SettingsError: a variable with the service's prefix is unknown, missing or malformed.
        """
        environment = os.environ if environment is None else environment
        prefix = cls.prefix
        given = {name: value for name, value in environment.items() if name.startswith(prefix)}
        known = {prefix + name.upper(): name for name in cls.model_fields}
        if unknown := sorted(set(given) - set(known)):
            near = [name for each in unknown for name in get_close_matches(each, known, 1)]
            hint = (
                f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
            )
            raise SettingsError(f"unknown variable {', '.join(unknown)}; {hint}")
        try:
            return cls.model_validate_strings({known[name]: value for name, value in given.items()})
        except ValidationError as error:
            found = ((e["loc"], e["msg"].removeprefix("Value error, ")) for e in error.errors())
            lines = [f"{prefix}{loc[0]}".upper() + f": {why}" if loc else why for loc, why in found]
            raise SettingsError("; ".join(lines)) from None


Port = Annotated[int, Field(ge=0, le=65535)]
_UNIX = "unix:"


def _checked_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (address.startswith(_UNIX) and len(address) > len(_UNIX)) and not (host and is_port):
        raise ValueError("an address must be host:port or unix:path")
    return address


Address = Annotated[str, AfterValidator(_checked_address)]


class PeerSettings(ServiceSettings):
    """Settings by which the services authenticate each other. They are equal in all services; see
    `credentials.py`.

    Attributes:
        peer_tls_directory: directory with `ca.crt`, `tls.crt` and `tls.key`. Calls between services
            are then encrypted, and both sides show a certificate.
        peer_token_file: file with one token per line. Each call between services shows the first
            token, and every token is accepted.
        peer_credentials: stage of turning the credentials on. `accepted`: calls with and without
            credentials are served, and own calls show no credentials yet. `shown`: own calls show
            them. `required`: calls without credentials are refused.
    """

    peer_tls_directory: Path | None = None
    peer_token_file: Path | None = None
    peer_credentials: Literal["accepted", "shown", "required"] = "required"


class EngineServiceSettings(PeerSettings):
    """Settings of both GPU services.

    Attributes:
        address: address of the gRPC server: `host:port` (port 0 is any free port, which is logged)
            or `unix:path`. Health and metrics are served on the same host.
        health_port: port of a server with gRPC health checks alone, without encryption and tokens,
            as the kubelet needs it. 0 disables it.
        metrics_port: port of the Prometheus endpoint. 0 disables it.
        model: directory of the checkpoint, in Hugging Face's layout.
        device: `cpu`, `cuda` or `cuda:N`. `auto` is CUDA if there is a GPU, else the CPU.
        dtype: data type of weights, KV cache and embeddings. `auto` is bfloat16 on a GPU and
            float32 on a CPU.
        merge_adapter: directory of a LoRA adapter that is folded into the weights while they are
            read. It is the same in all services.
        adapters: LoRA adapters that are served by name beside the base model, as
            `NAME=DIRECTORY,...`. An encoder needs adapters that change the vision tower, under the
            names that decoders know. It ignores adapters that change no tower.
        load_format: `auto` reads safetensors files; `dummy` creates random weights.
        memory_fraction: share of the device's memory that the service may use.
        redis_url: URL of the Redis in which encoders store embeddings. If it is empty, embeddings
            are not stored. A Redis that does not answer delays a request by at most 30 ms, once;
            the option `?socket_timeout=` of the URL sets another limit, in seconds.
        redis_directory: directory with `seal-keys`, which seal embeddings in Redis (see `seals`),
            and optionally `password`, the password of the URL's user. Both files are read again
            when they change. A Redis on another machine needs the directory: without seals, encoder
            and decoder trust what they read.
        shutdown_grace_s: seconds that running requests may take after SIGTERM.
        log_level: lowest level that is logged.
    """

    address: Address
    health_port: Port = 0
    metrics_port: Port
    model: Path
    merge_adapter: Path | None = None
    adapters: str = ""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    redis_url: str = ""
    redis_directory: Path | None = None
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @model_validator(mode="after")
    def _redis_is_sealed_or_here(self) -> Self:
        if self.redis_directory is None and not _is_on_this_machine(self.redis_url):
            raise ValueError(
                f"{self.prefix}REDIS_URL is on another machine, where others may write: set "
                f"{self.prefix}REDIS_DIRECTORY to a directory with the file seal-keys"
            )
        return self

    @field_validator("adapters")
    @classmethod
    def _adapters_have_names(cls, value: str) -> str:
        parse_adapters(value)
        return value

    @property
    def named_adapters(self) -> dict[str, Path]:
        """Directories of `adapters` by name."""
        return parse_adapters(self.adapters)

    @property
    def wanted_task(self) -> str:
        """Task of the checkpoint that the user has named. Empty if the files decide."""
        return ""

    @property
    def host(self) -> str:
        """Host of the address, or loopback if the address is a Unix socket."""
        if self.address.startswith(_UNIX):
            return "127.0.0.1"
        return self.address.rpartition(":")[0].strip("[]")


def _is_on_this_machine(redis_url: str) -> bool:
    parts = urlsplit(redis_url)
    host = parts.hostname or ""
    if parts.scheme in ("", "unix") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
