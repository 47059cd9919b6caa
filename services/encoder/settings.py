"""The encoder's settings, `ENCODER_*`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings


class EncoderSettings(ServiceSettings):
    """What one encoder needs to know.

    Attributes:
        host: address to listen on.
        port: of gRPC; 0 takes a free one.
        metrics_port: of Prometheus; 0: no endpoint.
        model: a checkpoint directory in Hugging Face's layout.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: of weights and embeddings; `auto` is bfloat16 on CUDA and float32 elsewhere.
        load_format: `dummy` makes random weights and reads no file of them.
        kernels: `operation=implementation,...` of `services.encoder.kernels.table`, or `plain`;
            empty: the fastest that run here.
        max_batch_patches: budget of one batch, in patches before merging (4 per image token). More
            keep a device no busier, and images wait longer for each other.
        max_queued_patches: images beyond this are refused at once; also the largest image.
        max_source_pixels: larger images are refused before a pixel is decoded.
        cache_bytes: of the memory that holds embeddings, in this process and pinned on CUDA.
        redis_url: where embeddings are shared; empty: nowhere.
        redis_timeout_s: what a Redis that does not answer may cost a request, once.
        cache_ttl_s: how long an embedding lives in Redis.
        preprocess_workers: threads that decode and resize; 0: one per core.
        num_threads: of torch on the CPU; 0: torch's own choice.
        memory_fraction: share of the device's memory that this process may take. Below a half,
            another process is taken to use the device, too: very large images leave it idle half of
            the time.
        log_level: least level logged.
        shutdown_grace_s: how long running calls may go on after SIGTERM.
    """

    model_config = SettingsConfigDict(env_prefix="ENCODER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    metrics_port: int = Field(default=9101, ge=0, le=65535)
    model: Path
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    kernels: str = ""
    max_batch_patches: int = Field(default=12_288, ge=4)
    max_queued_patches: int = Field(default=1 << 20, ge=4)
    max_source_pixels: int = Field(default=89_478_485, ge=1)
    cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
    redis_url: str = ""
    redis_timeout_s: float = Field(default=0.03, gt=0.0)
    cache_ttl_s: int = Field(default=3600, ge=1)
    preprocess_workers: int = Field(default=0, ge=0)
    num_threads: int = Field(default=0, ge=0)
    memory_fraction: float = Field(default=0.9, gt=0.0, le=1.0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    shutdown_grace_s: float = Field(default=30.0, ge=0.0)
