"""The decoder's settings, `DECODER_<FIELD>` in the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings


class DecoderSettings(ServiceSettings):
    """One frozen value, read at the door and handed to the engine process as JSON.

    Attributes:
        host: address to listen on.
        port: gRPC port; 0: any, which the log names.
        metrics_port: Prometheus' port; 0: no metrics.
        model: checkpoint directory.
        device: `cpu`, `cuda` or `cuda:N`; `auto`: cuda if there is one.
        dtype: of weights, cache and embeddings; `auto`: bfloat16 on a GPU, float32 on a CPU.
        load_format: `auto`: safetensors; `dummy`: random weights.
        attention_backend: `auto`: the fastest for the device.
        kernels: overrides of the dispatch table: `operation=implementation,...`; `plain`: torch.
        num_threads: of the engine's CPU maths; 0: torch's choice.
        max_num_sequences: sequences that run at once; as many again times `QUEUE_FACTOR` may wait.
        max_batched_tokens: most tokens of a step.
        max_model_len: most tokens of prompt and completion; default: the model's.
        kv_cache_bytes: default: what `memory_fraction` leaves on a GPU, the runner's on a CPU.
        memory_fraction: share of the card that this process may use.
        embedding_cache_bytes: of images' embeddings, in shared memory.
        shared_memory: read embeddings out of the memory of an encoder on this machine; false: all
            come over gRPC.
        redis_url: where the encoders store embeddings; empty: nowhere.
        redis_timeout_s: what a Redis that does not answer may cost a request, once.
        shutdown_grace_s: how long running sequences may go on after SIGTERM.
        log_level: of the standard logging module.
    """

    model_config = SettingsConfigDict(env_prefix="DECODER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 50052
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9102
    model: Path
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    attention_backend: Literal["auto", "sdpa", "flashinfer"] = "auto"
    kernels: str = ""
    num_threads: Annotated[int, Field(ge=0)] = 0
    max_num_sequences: Annotated[int, Field(ge=1, le=4096)] = 256
    max_batched_tokens: Annotated[int, Field(ge=1)] = 8192
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    kv_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    embedding_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    shared_memory: bool = True
    redis_url: str = ""
    redis_timeout_s: Annotated[float, Field(gt=0)] = 0.03
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @model_validator(mode="after")
    def _a_step_advances_each_sequence(self) -> "DecoderSettings":
        if self.max_batched_tokens < self.max_num_sequences:
            raise ValueError("max_batched_tokens must not be less than max_num_sequences")
        return self
