"""The encoder's settings, `ENCODER_<FIELD>` in the environment."""

from pydantic import Field

from services.common.settings import Address, EngineServiceSettings, Port


class EncoderSettings(EngineServiceSettings):
    """One frozen value, read at the start and handed to the engine process as JSON.

    Below a `memory_fraction` of one half, the encoder assumes that other processes use the device,
    too: very large images then leave it to them half of the time.

    Attributes:
        kernels: `operation=implementation,...` of `services.encoder.operations.table`, or `plain`;
            empty: the fastest that run here. One that cannot run is refused at start.
        cache_bytes: of the arena that holds embeddings, pinned on CUDA.
    """

    prefix = "ENCODER_"

    address: Address = "127.0.0.1:50051"
    metrics_port: Port = 9101
    kernels: str = ""
    cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
