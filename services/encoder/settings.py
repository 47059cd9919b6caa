"""The encoder's settings, `ENCODER_<FIELD>` in the environment."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import EngineServiceSettings, Port


class EncoderSettings(EngineServiceSettings):
    """One frozen value, read at the start and handed to the engine process as JSON.

    Below a `memory_fraction` of one half, the encoder assumes that other processes use the device,
    too: very large images then leave it to them half of the time.

    Attributes:
        kernels: `operation=implementation,...` of `services.encoder.operations.table`, or `plain`;
            empty: the fastest that run here. One that cannot run is refused at start.
        max_batch_patches: budget of one batch, in patches before merging (4 per image token). A
            larger one keeps a device no busier, and images wait longer for each other. On a CPU
            each image runs alone.
        max_queued_patches: images beyond this are refused at once; also the largest image.
        max_source_pixels: larger images are refused before a pixel is decoded.
        cache_bytes: of the arena that holds embeddings, pinned on CUDA.
        cache_ttl_s: how long an embedding lives in Redis.
        preprocess_workers: processes that decode, at least 2; 0: one per CPU that the pod may use,
            at most 16.
        decode_memory_bytes: of all images that are being decoded; 0: a quarter of the pod's memory.
    """

    model_config = SettingsConfigDict(env_prefix="ENCODER_", frozen=True, extra="forbid")

    port: Port = 50051
    metrics_port: Port = 9101
    kernels: str = ""
    max_batch_patches: int = Field(default=12_288, ge=4)
    max_queued_patches: int = Field(default=1 << 20, ge=4)
    max_source_pixels: int = Field(default=40_000_000, ge=1)
    cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
    cache_ttl_s: int = Field(default=3600, ge=1)
    preprocess_workers: int = Field(default=0, ge=0)
    decode_memory_bytes: int = Field(default=0, ge=0)
