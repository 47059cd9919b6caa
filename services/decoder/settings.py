"""The decoder's settings, `DECODER_<FIELD>` in the environment."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from services.common.settings import Address, EngineServiceSettings, Port, split_list
from services.decoder.images.known_encoders import KnownEncoders


class DecoderSettings(EngineServiceSettings):
    """One frozen value, read at the start and passed to the engine process as JSON.

    Attributes:
        quantization: `fp8`: weights are quantized per output channel while they are read; empty:
            they are what the files hold.
        tensor_parallel: processes that share the model, each on a card of its own: the device and
            those after it. It divides the heads, the vocabulary and the sizes of MLPs and experts.
        kv_cache_dtype: `fp8` (or `fp8_e4m3`): keys and values are cached in 8 bits, which doubles
            the context; `auto`: in the model's precision, unless the checkpoint asks for FP8.
        kernels: overrides of the dispatch table: `operation=implementation,...`; `plain`: torch.
        max_num_sequences: sequences that run at once; default: 256 on a GPU, 64 on a CPU. Three
            times as many may wait; on a CPU, 1024 run or wait at least.
        step_ms: how long a step may last: prompts are cut to fit. Longer steps serve a little more,
            shorter ones keep answers flowing. At least twice what reading the weights takes.
        max_model_len: most tokens of prompt and completion; default: the model's.
        kv_cache_bytes: default: what `memory_fraction` leaves on a GPU, 512 MiB on a CPU. The arena
            of images' embeddings, in host memory, has 1 GiB, or a quarter of this if that is less.
        encoder_addresses: the encoders that this decoder fetches from, which gateways name:
            comma-separated, as the gateway's, or ranges of addresses, `10.0.0.0/8` or
            `10.0.0.0/8:50051`; empty: those on loopback.
    """

    prefix = "DECODER_"

    address: Address = "127.0.0.1:50052"
    metrics_port: Port = 9102
    quantization: Literal["", "fp8"] = ""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    kernels: str = ""
    max_num_sequences: Annotated[int, Field(ge=1, le=4096)] | None = None
    step_ms: Annotated[float, Field(ge=1)] = 40.0
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    kv_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    encoder_addresses: str = ""

    @property
    def encoders(self) -> tuple[str, ...]:
        return split_list(self.encoder_addresses)

    @field_validator("encoder_addresses")
    @classmethod
    def _addresses_have_a_known_form(cls, value: str) -> str:
        KnownEncoders(split_list(value))
        return value
