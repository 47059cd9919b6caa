"""The gateway's settings, `GATEWAY_<FIELD>` in the environment.

`__main__` reads them and hands them on; a variable that is unknown or malformed is a
`SettingsError`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.common.settings import PeerSettings, Port, split_list


class GatewaySettings(PeerSettings):
    """Read once, at start.

    Attributes:
        host: address to listen on.
        port: HTTP port.
        metrics_port: of Prometheus; 0: no endpoint.
        metrics_host: address of that port; default: `host`.
        shared_port: a second port on which several gateways of one machine listen; the kernel
            spreads connections over them. Each gateway also has its own `port`, for its probes.
        model: checkpoint directory; its JSON files and its chat template are read.
        served_model_name: what requests call the model; default: the directory's name.
        encoder_addresses: comma-separated `host:port` or `unix:path`, or `dns:///name:port`
            (`dns:name:port`), which is resolved periodically into one address per pod. Not used if
            the model takes text alone.
        decoder_addresses: of the same form; always needed.
        max_concurrent_requests: further requests get a 503.
        max_images_per_request: more images are a 400.
        max_image_bytes: size of one encoded image.
        max_source_pixels: width times height of one image as sent; not above the encoder's.
        memory_bytes: of the process, which bounds what requests hold; 0: the pod's limit.
        request_timeout_s: from arrival to the last token.
        allowed_media_dir: where `file:` URLs may point; default: nowhere.
        allow_private_media_hosts: whether image URLs may reach private and loopback addresses.
        api_keys: comma-separated; with none, and no file of them, requests need no key.
        api_keys_file: keys as digests, with their tenants and limits, see `tenancy/tenants.py`.
        other_gateways: comma-separated URLs of gateways that serve other models behind the same
            address; `GET /v1/models` lists theirs, too.
        redis_url: where gateways count tenants' limits together, and keep answers and images that
            clients name again; empty: limits are divided, and each keeps its own in memory.
        redis_password_file: password of the URL's user, read again at each connection; None: the
            URL's.
        replicas: the number of gateways, by which limits are divided until Redis has told it.
        allow_anonymous: serve without keys on an address that other machines reach.
        allowed_hosts: comma-separated names under which requests are answered, besides addresses;
            `.example.com`: all names under it. Empty: any name where keys are needed, else those
            of this machine (on loopback) or of a local network.
        unknown_fields: of requests: refuse them, or ignore them as the hints of docs/api.md.
        cors_allow_origins: comma-separated origins of web pages that may call, such as
            `https://example.com`, or `*`; empty: none.
        shutdown_grace_s: how long running requests may continue after SIGTERM.
        log_level: of the standard logging module.
    """

    model_config = SettingsConfigDict(env_prefix="GATEWAY_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: Port = 8000
    metrics_port: Port = 9103
    metrics_host: str = ""
    shared_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    model: Path
    served_model_name: Annotated[str, Field(max_length=256)] = ""
    encoder_addresses: str = ""
    decoder_addresses: Annotated[str, Field(min_length=1)]
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 512
    max_images_per_request: Annotated[int, Field(ge=0, le=1024)] = 32
    max_image_bytes: Annotated[int, Field(ge=1, le=60 << 20)] = 20 << 20
    max_source_pixels: Annotated[int, Field(ge=1)] = 40_000_000
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    request_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    allowed_media_dir: Path | None = None
    allow_private_media_hosts: bool = False
    api_keys: SecretStr = SecretStr("")
    api_keys_file: Path | None = None
    other_gateways: Annotated[str, Field(pattern=r"^(\s*https?://[^\s,]+\s*(,|$))*$")] = ""
    redis_url: str = ""
    redis_password_file: Path | None = None
    replicas: Annotated[int, Field(ge=1)] = 1
    allow_anonymous: bool = False
    allowed_hosts: str = ""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    cors_allow_origins: str = ""
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def encoders(self) -> tuple[str, ...]:
        """`encoder_addresses`, split."""
        return split_list(self.encoder_addresses)

    @property
    def decoders(self) -> tuple[str, ...]:
        """`decoder_addresses`, split."""
        return split_list(self.decoder_addresses)

    @property
    def keys(self) -> tuple[str, ...]:
        """`api_keys`, split."""
        return split_list(self.api_keys.get_secret_value())

    @property
    def served_hosts(self) -> tuple[str, ...]:
        """`allowed_hosts`, split."""
        return split_list(self.allowed_hosts.lower())

    @property
    def others(self) -> tuple[str, ...]:
        """`other_gateways`, split."""
        return split_list(self.other_gateways)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """`cors_allow_origins`, split."""
        return split_list(self.cors_allow_origins)
