"""The gateway's settings, `GATEWAY_<FIELD>` in the environment.

`__main__` reads them at the start. A variable that is unknown or malformed is a `SettingsError`.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, SecretStr, field_validator

from services.common.images.image_header import MAX_SOURCE_PIXELS
from services.common.settings import PeerSettings, Port, split_list
from services.gateway.bounds import MAX_BODY_BYTES, Bounds

# Values of settings with a meaning of their own: requests need no keys; private addresses.
NO_KEYS = "none"
_PRIVATE = "private"
_FILE = "file:"
# Requests write names of other letters in Punycode, so the patterns allow no such letters.
_ORIGIN = re.compile(r"\*|[A-Za-z][\w+.-]*://[^/?#@*\s\x7F-\U0010FFFF]+/?")
_NAME = re.compile(r"[^/?#@*:\s\x7F-\U0010FFFF]+|\[?(?:[0-9A-Fa-f.]*:){2}[0-9A-Fa-f:.]*\]?")
_BOUNDS = Bounds()
_OWN_PORTS = {"http": ":80", "https": ":443"}


class GatewaySettings(PeerSettings):
    """The settings, which are read once at the start.

    Attributes:
        host: address on which the gateway listens.
        port: port of the HTTP API.
        metrics_port: port of the Prometheus endpoint. 0 disables it.
        model: directory of the checkpoint. The gateway reads its JSON files and its chat template,
            but no weights.
        task: task of the checkpoint: `generate` for text, `embed` for vectors of a search, `rank`
            for the scores of a reranker. `auto` is the task that the checkpoint's files name, or
            else `generate`. It is the same in the decoders.
        merge_adapter: directory of the LoRA adapter that encoders and decoders fold into the
            weights. The gateway reads it to know their fingerprint.
        served_model_name: comma-separated names by which requests may call the model. Answers have
            the first name. Defaults to the name of the model's directory.
        chat_template: file with a chat template (Jinja) that is used instead of the checkpoint's.
        default_chat_template_kwargs: JSON object of template variables for requests that do not set
            them, such as `{"enable_thinking": false}`.
        override_generation_config: JSON object whose entries replace those of the checkpoint's
            `generation_config.json`, such as `{"temperature": 0.2, "max_new_tokens": 2048}`.
        encoder_addresses: comma-separated addresses of encoders: `host:port`, `unix:path`, or
            `dns:///name:port` (also `dns:name:port`), which is resolved every few seconds into one
            address per pod. Not used if the model takes only text.
        decoder_addresses: addresses of decoders, in the same form. Always needed.
        request_timeout_s: time in seconds that a request may take, from its arrival to its last
            token.
        allowed_media: places from which images may be loaded beside public web addresses,
            comma-separated: an absolute directory, for `file:` URLs; `private`, for private and
            loopback addresses.
        api_keys: comma-separated API keys. An entry `file:PATH` names a file with the digests of
            keys, their tenants and their limits, see docs/api.md. If there is no key, the gateway
            may listen on loopback only, where requests then need none. `none` lets it listen on any
            address without keys.
        other_gateways: comma-separated URLs of gateways that serve other models behind the same
            address. `GET /v1/models` lists their models, too.
        redis_url: URL of the Redis in which gateways count tenants' use of their limits together,
            and store the responses and images that later requests name, and batches with their
            files. If it is empty, each gateway has an equal share of every limit, and stores these
            in its own memory.
        redis_password_file: file with the password of the URL's user, which is read again at each
            connection. If it is not set, the password is the URL's.
        replicas: number of gateways. While Redis does not answer, each gateway has this share of
            every limit.
        allowed_sites: comma-separated host names and origins. A request is served if its `Host` is
            an IP address or one of the host names; `.example.com` is every name below
            `example.com`. If there is no host name, every name is served where keys are needed, and
            otherwise names of this machine (if the gateway listens on loopback) or of local
            networks. Web pages of the origins, such as `https://example.com:8443`, may call the
            gateway; `*` is every origin.
        max_images: most images of a request. Each image is a call to an encoder, its bytes are in
            memory until the request ends, and its tokens take part of the context.
        max_image_pixels: most pixels of one image as sent, width times height. An encoder needs 7
            to 23 bytes per pixel while it decodes an image, and has at most a quarter of its pod's
            memory for that, see docs/tuning.md.
        max_image_bytes: most bytes of one image file. The gateway needs three times as many.
        max_videos: most videos of a request. Their files also take memory of an encoder.
        max_body_bytes: most bytes of a request's body. Until the request ends, it takes four times
            as many of the memory for requests, which is the pod's memory without 384 MiB.
        batch_bytes: most bytes of the files that a tenant may have at `/v1/files`. Results of its
            batches may take as many again. Without Redis the files are in the gateway's memory, and
            a tenant has at most one part in 32 of the memory for requests. 0 switches batches off.
        embeddings: switch that lets clients send embeddings of images (`image_embeds`).
        unknown_fields: `refuse` answers requests with unknown fields with an error; `ignore` leaves
            the fields out, like the hints of docs/api.md.
        shutdown_grace_s: seconds that running requests may take after SIGTERM.
        log_level: lowest level that is logged.
    """

    prefix = "GATEWAY_"

    host: str = "127.0.0.1"
    port: Port = 8000
    metrics_port: Port = 9103
    model: Path
    merge_adapter: Path | None = None
    task: Literal["auto", "generate", "embed", "rank"] = "auto"
    served_model_name: Annotated[str, Field(max_length=4096)] = ""
    chat_template: Path | None = None
    default_chat_template_kwargs: str = ""
    override_generation_config: str = ""
    encoder_addresses: str = ""
    decoder_addresses: Annotated[str, Field(min_length=1)]
    request_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    allowed_media: str = ""
    api_keys: SecretStr = SecretStr("")
    other_gateways: Annotated[str, Field(pattern=r"^(\s*https?://[^\s,]+\s*(,|$))*$")] = ""
    redis_url: str = ""
    redis_password_file: Path | None = None
    replicas: Annotated[int, Field(ge=1)] = 1
    allowed_sites: str = ""
    max_images: Annotated[int, Field(ge=0, le=1024)] = _BOUNDS.max_images_per_request
    max_image_pixels: Annotated[int, Field(ge=1, le=MAX_SOURCE_PIXELS)] = _BOUNDS.max_source_pixels
    max_image_bytes: Annotated[int, Field(ge=1024, le=60 << 20)] = _BOUNDS.max_image_bytes
    max_videos: Annotated[int, Field(ge=0, le=256)] = _BOUNDS.max_videos_per_request
    max_body_bytes: Annotated[int, Field(ge=1 << 20, le=512 << 20)] = MAX_BODY_BYTES
    batch_bytes: Annotated[int, Field(ge=0, le=16 << 30)] = 64 << 20
    embeddings: bool = False
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def bounds(self) -> Bounds:
        """The bounds of requests."""
        return Bounds(
            max_images_per_request=self.max_images,
            max_image_bytes=self.max_image_bytes,
            max_source_pixels=self.max_image_pixels,
            max_videos_per_request=self.max_videos,
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model in requests, without repetitions. Empty if there is no setting."""
        return tuple(dict.fromkeys(split_list(self.served_model_name)))

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Template variables for requests that do not set them."""
        return _json_object(self.default_chat_template_kwargs)

    @property
    def generation_overrides(self) -> dict[str, Any]:
        """Entries that replace those of `generation_config.json`."""
        return _json_object(self.override_generation_config)

    @property
    def encoders(self) -> tuple[str, ...]:
        return split_list(self.encoder_addresses)

    @property
    def decoders(self) -> tuple[str, ...]:
        return split_list(self.decoder_addresses)

    @property
    def keys(self) -> tuple[str, ...]:
        keys = () if self.is_open else split_list(self.api_keys.get_secret_value())
        return tuple(key for key in keys if not key.startswith(_FILE))

    @property
    def keys_file(self) -> Path | None:
        found = split_list(self.api_keys.get_secret_value())
        return next((Path(k.removeprefix(_FILE)) for k in found if k.startswith(_FILE)), None)

    @property
    def is_open(self) -> bool:
        """True if requests need no key on any address."""
        return self.api_keys.get_secret_value().strip() == NO_KEYS

    @property
    def served_hosts(self) -> tuple[str, ...]:
        return tuple(site.lower().strip("[]") for site in self._sites if not _is_origin(site))

    @property
    def others(self) -> tuple[str, ...]:
        return split_list(self.other_gateways)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        return tuple(_as_sent(site) for site in self._sites if _is_origin(site))

    @property
    def _sites(self) -> tuple[str, ...]:
        return split_list(self.allowed_sites)

    @property
    def media_directory(self) -> Path | None:
        return next((Path(p) for p in split_list(self.allowed_media) if p != _PRIVATE), None)

    @property
    def allows_private_media(self) -> bool:
        """True if image URLs may reach private and loopback addresses."""
        return _PRIVATE in split_list(self.allowed_media)

    @field_validator("default_chat_template_kwargs", "override_generation_config")
    @classmethod
    def _is_json_object(cls, value: str) -> str:
        _json_object(value)
        return value

    @field_validator("api_keys")
    @classmethod
    def _has_one_file(cls, value: SecretStr) -> SecretStr:
        if sum(key.startswith(_FILE) for key in split_list(value.get_secret_value())) > 1:
            raise ValueError(f"has more than one `{_FILE}`")
        return value

    @field_validator("allowed_sites")
    @classmethod
    def _are_names_and_origins(cls, value: str) -> str:
        for site in split_list(value):
            if not (_ORIGIN if _is_origin(site) else _NAME).fullmatch(site):
                raise ValueError(f"{site!r} is neither a name, without a port, nor an origin")
        return value

    @field_validator("allowed_media")
    @classmethod
    def _is_one_directory(cls, value: str) -> str:
        places = [place for place in split_list(value) if place != _PRIVATE]
        if len(places) > 1 or not all(place.startswith("/") for place in places):
            raise ValueError(f"is one absolute directory, `{_PRIVATE}`, or both")
        return value


def _json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. An empty text is an empty object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('is not a JSON object, such as {"name": 1}')
    return cast("dict[str, Any]", value)


def _is_origin(site: str) -> bool:
    return site == "*" or "://" in site


def _as_sent(origin: str) -> str:
    """Returns an origin as browsers write it: in lower case, without a slash at the end and without
    the default port of its scheme.
    """
    origin = origin.lower().removesuffix("/")
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix(_OWN_PORTS.get(scheme, "/"))
