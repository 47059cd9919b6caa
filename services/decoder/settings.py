"""The decoder's settings, which are environment variables `DECODER_<FIELD>`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.settings import Address, EngineServiceSettings, Port, split_list
from services.decoder.images.known_encoders import KnownEncoders


class DecoderSettings(EngineServiceSettings):
    """The settings, which are read at the start and passed to the engine process as JSON.

    Attributes:
        quantization: format to which weights are quantized while they are read. `fp8` has one scale
            per output channel. If empty, weights stay as the files hold them.
        task: task of the checkpoint: `generate` for text, `embed` for vectors of a search, `rank`
            for the scores of a reranker. `auto` is the task that the checkpoint's files name, or
            else `generate`. It is the same in the gateway.
        tensor_parallel: number of processes that share the model, each with a device of its own:
            the configured device and the devices after it. This number must divide the numbers of
            heads, the vocabulary and the sizes of MLPs and experts.
        kv_cache_dtype: data type of cached keys and values. `fp8` (or `fp8_e4m3`) doubles the
            number of tokens that fit. `auto` is the model's data type, unless the checkpoint asks
            for FP8.
        kernels: overrides of the kernel dispatch table, as `operation=implementation,...`. The
            implementation `plain` is torch.
        max_num_sequences: largest number of sequences that run at once. Defaults to 256 on a GPU
            and to 64 on a CPU. Three times as many may wait. A CPU accepts at least 1024 in all.
        step_ms: longest time that a step should take, in milliseconds. Prompts are cut into chunks
            that fit. Longer steps give a little more throughput and sooner first tokens under load,
            and shorter steps give sooner later tokens. A step may take at least twice the time of
            reading the weights. Defaults to 40. If reading the weights takes more than 10, the
            default is five times as long as that, but at most 80. Behind contexts of tens of
            thousands of tokens, a step of the default length may take half as long again.
        speculation: source of drafts, which are guesses of a sequence's next tokens that are
            verified together in one step. `lookup` copies them from the request's own text, and
            from a `prediction` in the request. `mtp` makes them with the model's own layer for
            multi-token prediction. `off` uses none. `auto` is `mtp` on a GPU if the checkpoint has
            the layer and `kv_host_bytes` is 0, and `lookup` otherwise. Drafts change no answer.
        speculation_head: directory of a model whose layer for multi-token prediction is read, for a
            fine-tuned model that has lost its own. It has to have the same sizes.
        speculation_tokens: largest number of drafts of a sequence in a step. Defaults to 15, or to
            8 with `mtp` or recurrent states.
        max_model_len: largest number of prompt and completion tokens of a sequence. Defaults to
            the model's limit.
        kv_cache_bytes: size of the KV cache. Defaults to the memory that `memory_fraction` leaves
            on a GPU, and to 512 MiB on a CPU. The arena for images' embeddings, in host memory, has
            1 GiB, or a quarter of this size if that is less.
        kv_host_bytes: memory of the host for KV blocks and recurrent states that leave the memory
            of a card, for each card. They are copied back when a prompt begins as before. If this
            memory is larger than the KV cache, blocks are copied ahead of time.
        max_adapters: largest number of loaded adapters. Adapters beyond those of `adapters` can be
            loaded while the decoder runs. Defaults to the number of `adapters`.
        max_adapter_rank: largest rank of an adapter, up to 256. Defaults to that of `adapters`, and
            to at least 16.
        encoder_addresses: encoders that this decoder may fetch from, separated by commas.
            Gateways name the encoder of each image. An entry is an address as in the gateway's
            setting, or a range of addresses such as `10.0.0.0/8` or `10.0.0.0/8:50051`. If empty,
            encoders on loopback are accepted.
    """

    prefix = "DECODER_"

    address: Address = "127.0.0.1:50052"
    metrics_port: Port = 9102
    quantization: Literal["", "fp8"] = ""
    task: Literal["auto", "generate", "embed", "rank"] = "auto"
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    kernels: str = ""
    max_num_sequences: Annotated[int, Field(ge=1, le=4096)] | None = None
    step_ms: Annotated[float, Field(ge=1)] | None = None
    speculation: Literal["auto", "off", "lookup", "mtp"] = "off"
    speculation_head: Path | None = None
    speculation_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    kv_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    kv_host_bytes: Annotated[int, Field(ge=0)] = 0
    max_adapters: Annotated[int, Field(ge=0, le=256)] | None = None
    max_adapter_rank: Annotated[int, Field(ge=1, le=256)] | None = None
    encoder_addresses: str = ""

    @property
    def num_slots(self) -> int:
        """Number of slots for adapters."""
        return max(len(self.named_adapters), self.max_adapters or 0)

    @model_validator(mode="after")
    def _speculation_fits(self) -> Self:
        if self.speculation_head is not None and self.speculation != "mtp":
            raise ValueError("speculation_head is only used with speculation mtp")
        if self.kv_host_bytes and self.speculation == "mtp":
            raise ValueError(
                "kv_host_bytes does not go with speculation mtp, whose hidden states at checkpoints"
                " are not copied to the host"
            )
        return self

    @property
    def wanted_task(self) -> str:
        return self.task

    @property
    def encoders(self) -> tuple[str, ...]:
        """Entries of `encoder_addresses`."""
        return split_list(self.encoder_addresses)

    @field_validator("encoder_addresses")
    @classmethod
    def _addresses_have_a_known_form(cls, value: str) -> str:
        KnownEncoders(split_list(value))
        return value
