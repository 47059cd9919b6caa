"""What `triptych serve` is asked for, and where the package's own files lie. Nothing is imported
but the standard library: the command line reads its defaults here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from triptych import ROOT

DEMONSTRATION_MODEL = ROOT / "demo" / "model"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
CARD_SHARE = 0.90  # of a card's memory; the rest is for CUDA contexts and the desktop


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `triptych serve`, as its help describes them.

    None: not given. Then the services' variable of that meaning applies if it is exported, and
    else the default that the help names.

    Attributes:
        model: a directory, or the name of a model of the hub until that is resolved.
        layout: of cards, as `layout.read_layout` takes it.
        encoders: None: by the layout, or none for a model that takes text alone.
        decoders: None: by the layout.
        tensor_parallel: cards of each decoder.
        grpc: between the services: `unix` or `tcp`.
        served_name: `model` of requests; None: the hub's name, else the directory's.
        hub_name: of a model that came from the hub.
        memory_share: of each card.
        log_level: the least that is shown of the services' logs.
    """

    model: Path = DEMONSTRATION_MODEL
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
    memory_share: float = CARD_SHARE
    layout: str = "auto"
    gateways: int | None = None
    encoders: int | None = None
    decoders: int | None = None
    tensor_parallel: int | None = None
    redis_url: str | None = None
    grpc: str = "unix"
    served_name: str | None = None
    hub_name: str | None = None
    api_key: str | None = None
    log_level: str = "WARNING"
    access_log: bool = False
