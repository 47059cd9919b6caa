"""Checks the installation, the devices, the model's files and the memory before a process starts.

A failed check raises `StackError` within a second, with one line that says what to do. Faults that
cannot be seen here, such as a broken driver or weights of a wrong shape, are found by the engine.
"""

import importlib.metadata
import importlib.util
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.model_spec import ModelSpec, longest_context, undivided_size
from services.common.process.pod_limits import memory_limit_bytes
from triptych.checkpoint import Checkpoint, read_checkpoint
from triptych.devices import Card, Placement, encoder_share
from triptych.fit import Need, decoder_need, dummy_bytes, gib, what_fits
from triptych.options import ServeOptions
from triptych.stack import StackError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Packages that show that an extra of this project is installed.
_GATEWAY, _ENCODER, _DECODER, _CLI = ("fastapi",), ("PIL",), ("torch", "llguidance"), ("rich",)
_MAX_RANKS = 16  # the largest number that error messages suggest
_MAX_NUM_SEQS = 256  # the decoder's default on a GPU
_SPARE_BYTES = 256 << 20  # other processes' use of a card varies


def check_installed(*, images: bool) -> None:
    """Raises StackError if packages of a service that will run are not installed."""
    needed = (*_GATEWAY, *_DECODER, *_CLI, *(_ENCODER if images else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise StackError(
            f"{missing[0]} is not installed: pip install 'triptych[all]', or on a machine "
            "with NVIDIA GPUs 'triptych[cuda]'",
            2,
        )


def check_devices(devices: Sequence[str], gpus: int, environment: Mapping[str, str]) -> None:
    """Checks that the machine has the requested cards.

    Args:
        devices: requested devices: `cpu`, `cuda`, `cuda:N` or `auto`.
        gpus: number of visible cards.
        environment: variables of the environment.

    Raises:
        StackError: a card does not exist, or torch is a build without CUDA.
    """
    for device in devices:
        if not device.startswith("cuda"):
            continue
        if not gpus:
            hidden = environment.get("CUDA_VISIBLE_DEVICES")
            why = "no /dev/nvidia*" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden}"
            raise StackError(
                f"{device} was requested, but there is no GPU here ({why}): check the driver with "
                "nvidia-smi (a container needs --gpus all), or serve with --device cpu",
                2,
            )
        number = int(device.partition(":")[2] or 0)
        if number >= gpus:
            last = "only cuda:0 is" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1} are"
            raise StackError(f"{device}: {last} visible", 2)
    on_gpu = any(d.startswith("cuda") or (d == "auto" and gpus) for d in devices)
    if on_gpu and (build := importlib.metadata.version("torch")).endswith("+cpu"):
        raise StackError(
            f"torch {build} is built for CPUs: install its build for CUDA, "
            "or serve with --device cpu",
            2,
        )


def check_files(
    spec: ModelSpec, load_format: str, template: Path | None = None
) -> Checkpoint | None:
    """Checks that the model has a tokenizer, a chat template and weights.

    Args:
        template: file with a chat template that is used instead of the model's.

    Returns:
        Sizes of the weights. None if random weights are used.

    Raises:
        StackError: a file is missing or damaged.
    """
    directory = spec.directory
    if not (directory / "tokenizer.json").is_file():
        other = [n for n in ("tokenizer.model", "vocab.json") if (directory / n).is_file()]
        have = f" ({other[0]} is not supported)" if other else ""
        raise StackError(f"no tokenizer at {directory}: it has no tokenizer.json{have}", 2)
    if template is not None:
        if not template.is_file():
            raise StackError(f"--chat-template: there is no file {template}", 2)
    elif not any((directory / n).is_file() for n in ("chat_template.jinja", "chat_template.json")):
        config = directory / "tokenizer_config.json"
        if not (config.is_file() and "chat_template" in config.read_text(errors="replace")):
            raise StackError(
                f"no chat template at {directory}: it has no chat_template.jinja, and no "
                "chat_template in tokenizer_config.json (a base model has none: copy the file from "
                "the instruction-tuned model, or give one with --chat-template)",
                2,
            )
    return None if load_format == "dummy" else read_checkpoint(spec)


def check_ranks(spec: ModelSpec, ranks: int) -> None:
    """Raises StackError if a decoder's GPUs cannot share the model equally."""
    if size := undivided_size(spec.text, ranks):
        *most, last = [n for n in range(1, _MAX_RANKS + 1) if not undivided_size(spec.text, n)]
        possible = f"{', '.join(map(str, most))} or {last}" if most else "1"
        raise StackError(
            f"--tensor-parallel {ranks}: the model's {size} cannot be divided among {ranks} GPUs; "
            f"possible: {possible}",
            2,
        )


def check_length(spec: ModelSpec, max_model_len: int | None) -> None:
    """Raises StackError if the model does not support a context of `max_model_len` tokens."""
    try:
        longest_context(spec.text, max_model_len)
    except ValueError as error:
        raise StackError(f"{spec.name}: {error}", 2) from error


def _free_bytes() -> int:
    """Bytes of the machine's memory that new processes may use."""
    return min(memory_limit_bytes(), _available_bytes())


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Checks that the memory is large enough for a model and its options.

    Attributes:
        spec: spec of the model.
        checkpoint: sizes of the weights. None if random weights are used.
        cards: cards whose memory is known, by device name.
        dtype, tower_dtype: data types of decoders and encoders, which may be `auto`.
        max_model_len, max_num_seqs: requested limits. None if the decoder chooses.
        fp8_cache: True if the user wants an FP8 KV cache. The checkpoint may require it as well.
        free_bytes: bytes of the machine's memory that processes may still use. Defaults to what
            the kernel and the container's limit leave.
    """

    spec: ModelSpec
    checkpoint: Checkpoint | None
    cards: Mapping[str, Card]
    dtype: str
    tower_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    fp8_cache: bool = False
    free_bytes: int = field(default_factory=_free_bytes)

    @classmethod
    def requested(
        cls,
        options: ServeOptions,
        environment: Mapping[str, str],
        spec: ModelSpec,
        checkpoint: Checkpoint | None,
        cards: Mapping[str, Card],
    ) -> "Memory":
        """Builds the check of what the user asks for with options and exported variables."""
        given = options.dtype
        caches = options.kv_cache_dtype or environment.get("DECODER_KV_CACHE_DTYPE", "auto")
        return cls(
            spec=spec,
            checkpoint=checkpoint,
            # A user who sets the cache's size intends to exceed the shares of the cards.
            cards={} if "DECODER_KV_CACHE_BYTES" in environment else cards,
            dtype=given or environment.get("DECODER_DTYPE", "auto"),
            tower_dtype=given or environment.get("ENCODER_DTYPE", "auto"),
            max_model_len=options.max_model_len or number(environment, "DECODER_MAX_MODEL_LEN"),
            max_num_seqs=options.max_num_seqs or number(environment, "DECODER_MAX_NUM_SEQUENCES"),
            fp8_cache=caches != "auto",
        )

    def fits_beside(self, card_share: float, ranks: int = 1) -> bool:
        """Returns whether a decoder of `ranks` cards fits every card beside an encoder."""
        least = self._least(self._need("cuda"), ranks)
        share = card_share - encoder_share(card_share)
        return all(least <= card.total_bytes * share for card in self.cards.values())

    def check(self, encoders: Sequence[Placement], decoders: Sequence[Placement]) -> None:
        """Checks the memory: each process's share of a card, and the machine as a whole.

        Raises:
            StackError: the memory is too small. The message suggests what would fit.
        """
        on_cpu = 0
        wanted: dict[str, int] = defaultdict(int)
        for place in decoders:
            need = self._need(place.device)
            if place.device == "cpu":
                on_cpu += need.weights
            for device in place.devices:
                if (card := self.cards.get(device)) is not None:
                    beside = sum(each.memory_fraction for each in encoders if each.device == device)
                    self._check_card(need, place, card, place.memory_fraction + beside)
                    wanted[device] += self._least(need, place.ranks)
        for place in encoders:
            tower = self._weights(_itemsize(self.tower_dtype, place.device))[1]
            if place.device == "cpu":
                on_cpu += tower
            elif place.device in self.cards:
                wanted[place.device] += tower
        for device, needed in wanted.items():
            card = self.cards[device]
            if card.used_bytes + needed + _SPARE_BYTES > card.total_bytes:
                raise StackError(
                    f"{self.spec.name} needs {gib(needed)} of {device} ({card.name}), and other "
                    f"processes hold {gib(card.used_bytes)} of its {gib(card.total_bytes)}: "
                    "nvidia-smi names them; CUDA_VISIBLE_DEVICES chooses another card",
                    2,
                )
        self._check_machine(on_cpu)

    def _check_card(self, whole: Need, place: Placement, card: Card, alone: float) -> None:
        """Raises StackError if a decoder does not fit a card.

        Args:
            whole: need of the decoder, if it were on one card.
            place: placement of the decoder.
            card: the card.
            alone: share of the card that the decoder would get without an encoder.
        """
        have, heads = card.total_bytes * place.memory_fraction, self.spec.text.num_kv_heads
        need, tokens = whole.of_rank(place.ranks, heads), self.max_model_len
        if (least := need.least(tokens or 0)) <= have:
            return
        advice = what_fits(
            need,
            have,
            tokens,
            itemsize=_itemsize(self.dtype, place.device),
            quantized=self.spec.checkpoint.quantization is not None,
            share=place.memory_fraction,
            fp8_cache=self._caches_fp8,
        )
        for ranks in (2, 4, 8):
            if place.ranks < ranks <= len(self.cards) and (
                whole.of_rank(ranks, heads).tokens_in(have)
            ):
                advice += f"; or --tensor-parallel {ranks}"
                break
        if least <= card.total_bytes * alone > have:
            advice += (
                "; or, with two cards or more, a card without an encoder: --layout split:E+D "
                "(E cards of encoders, D of decoders)"
            )
        request = ""
        if tokens:
            request = f", a request of {tokens:,} tokens {gib(tokens * need.token)}"
        states = f", {gib(need.states)} are recurrent states" if need.states else ""
        raise StackError(
            f"{self.spec.name} does not fit {place.device} ({card.name}, {gib(card.total_bytes)}), "
            f"of which a decoder may use {gib(have)}: weights take {gib(need.weights)}{states}"
            f"{request}; {advice}",
            2,
        )

    def _check_machine(self, needed: int) -> None:
        """Raises StackError if the machine has less than `needed` bytes of memory."""
        if needed > self.free_bytes:
            halves = self.dtype in ("auto", "float32")
            raise StackError(
                f"{self.spec.name} does not fit this machine: its weights take {gib(needed)} on "
                f"CPUs, and {gib(self.free_bytes)} of memory are free"
                + "; --dtype bfloat16 needs half"
                * halves,
                2,
            )

    @property
    def _caches_fp8(self) -> bool:
        stored = self.spec.checkpoint.quantization
        return self.fp8_cache or (stored is not None and stored.fp8_cache)

    def _need(self, device: str) -> Need:
        """Memory that a decoder needs on a device such as `cuda:0` or `cpu`."""
        itemsize, running = _itemsize(self.dtype, device), self.max_num_seqs or _MAX_NUM_SEQS
        text, _ = self._weights(itemsize)
        return decoder_need(self.spec.text, text, itemsize, running, fp8_cache=self._caches_fp8)

    def _least(self, need: Need, ranks: int) -> int:
        """Least memory that one of the decoder's cards needs."""
        return need.of_rank(ranks, self.spec.text.num_kv_heads).least(self.max_model_len or 0)

    def _weights(self, itemsize: int) -> tuple[int, int]:
        """Bytes of the weights of the language model and of the vision tower."""
        spec, files = self.spec, self.checkpoint
        if files is None:
            return dummy_bytes(spec, itemsize)
        text, quantization = files.text.bytes_in(itemsize), spec.checkpoint.quantization
        if quantization is not None and quantization.at_load:
            text, _ = dummy_bytes(spec, itemsize)
        return text, files.vision.bytes_in(itemsize)


def number(environment: Mapping[str, str], name: str) -> int | None:
    """Reads an exported number. None if the variable is not set or not a number.

    The plan refuses a value that is not a number.
    """
    return int(environment[name]) if environment.get(name, "").isdecimal() else None


def _itemsize(dtype: str, device: str) -> int:
    """Bytes of a value of a data type. `auto` and unknown types have the device's default size."""
    return _ITEM_BYTES.get(dtype, 4 if device == "cpu" else 2)
