"""The encoder's settings, `ENCODER_<FIELD>` in the environment."""

from pydantic import Field

from services.common.settings import Address, EngineServiceSettings, Port


class EncoderSettings(EngineServiceSettings):
    """The settings, read once at the start and passed to the engine process as JSON.

    A `memory_fraction` below one half means that other processes share the device. Large batches
    then take turns with decoders, and very large images leave the device idle half of the time.

    Attributes:
        address: address of the gRPC server.
        metrics_port: port of the metrics.
        kernels: overrides of the dispatch table in `services.encoder.operations.table`, as
            `operation=implementation,...`, or `plain` for the reference implementations. If empty,
            the fastest implementations for the device are used. The start fails if an
            implementation cannot run.
        cache_bytes: size of the arena for embeddings in bytes. It is pinned on CUDA.
    """

    prefix = "ENCODER_"

    address: Address = "127.0.0.1:50051"
    metrics_port: Port = 9101
    kernels: str = ""
    cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
