"""The options of `triptych serve` and their defaults.

The command line reads the defaults, so this module imports only the standard library.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from triptych import ROOT

DEMONSTRATION_MODEL = ROOT / "demo" / "model"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
# Default share of a card's memory. The rest is for CUDA contexts and the desktop.
CARD_SHARE = 0.90


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `triptych serve`, as its help describes them.

    An option is None if the user has not set it. The corresponding variable of the services then
    applies if it is exported, or else the default in the help text.

    Attributes:
        model: directory of the checkpoint, or the model's name on the hub until it is downloaded.
        merge_adapter: directory of an adapter that is folded into the weights, or the adapter's
            name on the hub until the download. None for no adapter.
        adapters: adapters beside the base model, `NAME=DIR`, or `NAME=ORG/NAME` until they are
            downloaded.
        max_adapters: most loaded adapters.
        max_adapter_rank: largest rank of an adapter.
        layout: value of `--layout`, see `layout.read_layout`.
        encoders: number of encoders. None if the layout decides.
        decoders: number of decoders. None if the layout decides.
        tensor_parallel: number of cards of each decoder.
        grpc: connections between the services: `unix` or `tcp`.
        served_names: names of the model in requests; answers have the first. Defaults to its name
            on the hub, or else to the name of the directory.
        task: task of the checkpoint: `auto`, `generate`, `embed` or `rank`.
        chat_template: file with a chat template instead of the checkpoint's.
        template_defaults: JSON object of template variables for requests that do not set them.
        generation: JSON object whose entries replace those of generation_config.json.
        max_media: the most images and videos of a request, by kind: `image`, `video`.
        hub_name: name of the model on the hub. None if the model is a directory.
        memory_share: share of each card's memory to use.
        log_level: lowest level of the services' records that is shown.
        log_format: `text` or `json`, see `console.make_view`.
    """

    model: Path = DEMONSTRATION_MODEL
    merge_adapter: Path | None = None
    adapters: list[str] | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    host: str | None = None
    port: int | None = None
    metrics_host: str = LOOPBACK
    metrics_port: int = 0
    device: str = "auto"
    encoder_device: str | None = None
    decoder_device: str | None = None
    dtype: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    speculation: str | None = None
    speculation_head: Path | None = None
    speculation_tokens: int | None = None
    memory_share: float = CARD_SHARE
    layout: str = "auto"
    gateways: int | None = None
    encoders: int | None = None
    decoders: int | None = None
    tensor_parallel: int | None = None
    redis_url: str | None = None
    grpc: str = "unix"
    served_names: list[str] | None = None
    task: str | None = None
    chat_template: Path | None = None
    template_defaults: str | None = None
    generation: str | None = None
    max_media: dict[str, int] | None = None
    hub_name: str | None = None
    api_key: str | None = None
    log_level: str = "WARNING"
    log_format: str = "text"
    access_log: bool = False
