"""Settings: one frozen value per service, read from the environment once, by its `__main__`.

No other file of a service reads the environment. An unknown, missing or malformed variable is a
`SettingsError` that names it.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator


class SettingsError(ValueError):
    """The environment does not describe a service; the message names each bad variable."""


def traces_endpoint() -> str:
    """Where OpenTelemetry's standard variables send traces; empty: nowhere."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if endpoint := os.environ.get(name, "").strip():
            return endpoint
    return ""


def omp_num_threads() -> int:
    """OpenMP's standard variable, which torch obeys; 0: it says nothing."""
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    return int(value) if value.isdecimal() else 0


def split_list(value: str) -> tuple[str, ...]:
    """The parts of a comma-separated setting."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


class ServiceSettings(BaseModel):
    """Base of a service's settings. A field `port` of prefix `GATEWAY_` is `GATEWAY_PORT`."""

    prefix: ClassVar[str]
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads the settings.

        Raises:
            SettingsError: a variable with the service's prefix is unknown, missing or of the wrong
                form.
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
        raise ValueError("an address is host:port or unix:path")
    return address


Address = Annotated[str, AfterValidator(_checked_address)]


class PeerSettings(ServiceSettings):
    """How the services know each other; the same for all three, see `credentials.py`.

    Attributes:
        peer_tls_directory: with `ca.crt`, `tls.crt` and `tls.key`: calls between services are
            encrypted, and both sides show a certificate.
        peer_token_file: a token a line: each call between services shows the first, and any is
            accepted.
        peer_credentials: how far they are turned on. `accepted`: calls with and without them are
            served, own calls show none yet. `shown`: own calls show them. `required`: calls
            without are refused.
    """

    peer_tls_directory: Path | None = None
    peer_token_file: Path | None = None
    peer_credentials: Literal["accepted", "shown", "required"] = "required"


class EngineServiceSettings(PeerSettings):
    """What both GPU services are told.

    Attributes:
        address: to listen on, of gRPC: `host:port` (0: any free port, which the log names), or
            `unix:path`. Health and metrics are served on the same host.
        health_port: of gRPC health checks alone, without encryption or token, as the kubelet needs
            them; 0: no such port.
        metrics_port: of Prometheus; 0: no endpoint.
        model: checkpoint directory, in Hugging Face's layout.
        device: `cpu`, `cuda` or `cuda:N`; `auto`: CUDA if there is one.
        dtype: of weights, cache and embeddings; `auto`: bfloat16 on a GPU, float32 on a CPU.
        load_format: `auto`: safetensors; `dummy`: random weights.
        memory_fraction: share of the device's memory that the service may use.
        redis_url: where the encoders store embeddings; empty: nowhere. An unresponsive Redis delays
            a request by 30 ms at most, once; `?socket_timeout=` says otherwise, in seconds.
        redis_directory: with `seal-keys`, which seal embeddings in Redis (see `seals`), and perhaps
            `password`, of the URL's user; both are read again when they change. A Redis on another
            machine needs it: without it, encoder and decoder believe what they read there.
        shutdown_grace_s: how long running requests may continue after SIGTERM.
        log_level: the least level that is logged.
    """

    address: Address
    health_port: Port = 0
    metrics_port: Port
    model: Path
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
                f"{self.prefix}REDIS_DIRECTORY, with seal-keys in it"
            )
        return self

    @property
    def host(self) -> str:
        """Of the address; loopback, if that is a socket."""
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
