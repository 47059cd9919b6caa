"""What can be known before a process starts: a wrong turn ends here, within a second.

Each refusal is a `StackError` with one line that says what to do. What is not known here (a driver
that does not work, weights whose shapes are wrong) is found by the engine.
"""

import importlib.metadata
import importlib.util
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.model_spec import ModelSpec, longest_context
from services.common.process.pod_limits import memory_limit_bytes
from triptych.checkpoint import Checkpoint, read_checkpoint
from triptych.devices import Card, Placement, encoder_share
from triptych.fit import Need, decoder_need, dummy_bytes, gib, what_fits
from triptych.stack import StackError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A package of each extra.
_GATEWAY, _ENCODER, _DECODER, _CLI = ("fastapi",), ("PIL",), ("torch", "llguidance"), ("rich",)
_MAX_NUM_SEQS = 256  # the decoder's default on a GPU
_SPARE_BYTES = 256 << 20  # other processes' use of a card varies


def check_installed(*, images: bool) -> None:
    """Raises StackError if packages of a service that will run are not installed."""
    needed = (*_GATEWAY, *_DECODER, *_CLI, *(_ENCODER if images else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise StackError(
            f"{missing[0]} is not installed: pip install 'triptych[gateway,encoder,decoder,cli]'", 2
        )


def check_devices(devices: Sequence[str], gpus: int, environment: Mapping[str, str]) -> None:
    """Whether the machine has the cards that are asked for.

    Args:
        devices: as given: `cpu`, `cuda`, `cuda:N`, `auto`.

    Raises:
        StackError: it has not, or torch cannot use them.
    """
    for device in devices:
        if not device.startswith("cuda"):
            continue
        if not gpus:
            hidden = environment.get("CUDA_VISIBLE_DEVICES")
            why = "no /dev/nvidia*" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden}"
            raise StackError(
                f"--device {device}, but there is no GPU here ({why}): check the driver with "
                "nvidia-smi (a container needs --gpus all), or serve with --device cpu",
                2,
            )
        number = int(device.partition(":")[2] or 0)
        if number >= gpus:
            last = "only cuda:0 is" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1} are"
            raise StackError(f"--device {device}: {last} visible", 2)
    on_gpu = any(d.startswith("cuda") or (d == "auto" and gpus) for d in devices)
    if on_gpu and (build := importlib.metadata.version("torch")).endswith("+cpu"):
        raise StackError(
            f"torch {build} is built for CPUs: install its build for CUDA, "
            "or serve with --device cpu",
            2,
        )


def check_files(spec: ModelSpec, load_format: str) -> Checkpoint | None:
    """Tokenizer and weights; None: random weights.

    Raises:
        StackError: one is missing.
    """
    directory = spec.directory
    if not (directory / "tokenizer.json").is_file():
        other = [n for n in ("tokenizer.model", "vocab.json") if (directory / n).is_file()]
        have = f"; {other[0]} alone is not read" if other else ""
        raise StackError(f"no tokenizer at {directory}: it has no tokenizer.json{have}", 2)
    if not any((directory / n).is_file() for n in ("chat_template.jinja", "chat_template.json")):
        config = directory / "tokenizer_config.json"
        if not (config.is_file() and "chat_template" in config.read_text(errors="replace")):
            raise StackError(
                f"no chat template at {directory}: it has no chat_template.jinja, and "
                "tokenizer_config.json names none (a base model has none: copy that of its "
                "instruction-tuned sibling)",
                2,
            )
    return None if load_format == "dummy" else read_checkpoint(spec)


def check_length(spec: ModelSpec, max_model_len: int | None) -> None:
    """Raises StackError if the model has no such context."""
    try:
        longest_context(spec.text, max_model_len)
    except ValueError as error:
        raise StackError(f"{spec.name}: {error}", 2) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked of a decoder; `dtype` may be `auto`, None is the decoder's own choice.

    Attributes:
        tower_dtype: of the encoders.
    """

    dtype: str
    tower_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    fp8_cache: bool = False

    def caches_fp8(self, spec: ModelSpec) -> bool:
        """Whether keys and values have one byte, as they have, too, if the checkpoint says so."""
        stored = spec.checkpoint.quantization
        return self.fp8_cache or (stored is not None and stored.fp8_cache)

    def need(self, spec: ModelSpec, weights: int, itemsize: int) -> Need:
        """Of a decoder with weights of so many bytes."""
        running = self.max_num_seqs or _MAX_NUM_SEQS
        return decoder_need(spec.text, weights, itemsize, running, fp8_cache=self.caches_fp8(spec))


def fits_beside(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    cards: Mapping[str, Card],
    card_share: float,
    limits: Limits,
    ranks: int = 1,
) -> bool:
    """Whether a decoder of so many cards fits each one beside an encoder."""
    itemsize = _itemsize(limits.dtype, "cuda")
    need = limits.need(spec, _bytes_of(spec, checkpoint, itemsize)[0], itemsize)
    need = need.of_rank(ranks, spec.text.num_kv_heads)
    share = card_share - encoder_share(card_share)
    least = need.least(limits.max_model_len or 0)
    return all(least <= card.total_bytes * share for card in cards.values())


def check_memory(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    encoders: Sequence[Placement],
    decoders: Sequence[Placement],
    cards: Mapping[str, Card],
    limits: Limits,
) -> None:
    """Whether each process fits its share of a card, and all of them the machine.

    Args:
        checkpoint: None: random weights.
        cards: those whose memory is known.

    Raises:
        StackError: it does not, with what would fit.
    """
    on_cpu = 0
    wanted: dict[str, int] = defaultdict(int)
    for places, is_decoder in ((decoders, True), (encoders, False)):
        for place in places:
            dtype = limits.dtype if is_decoder else limits.tower_dtype
            itemsize = _itemsize(dtype, place.device)
            text, tower = _bytes_of(spec, checkpoint, itemsize)
            if place.device == "cpu":
                on_cpu += text if is_decoder else tower
                continue
            for device in place.devices:
                if (card := cards.get(device)) is None:
                    continue
                if not is_decoder:
                    wanted[device] += tower
                    continue
                need = limits.need(spec, text, itemsize)
                beside = sum(each.memory_fraction for each in encoders if each.device == device)
                alone = place.memory_fraction + beside
                _check_card(spec, need, place, card, limits, itemsize, len(cards), alone)
                part = need.of_rank(place.ranks, spec.text.num_kv_heads)
                wanted[device] += part.least(limits.max_model_len or 0)
    for device, needed in wanted.items():
        card = cards[device]
        if card.used_bytes + needed + _SPARE_BYTES > card.total_bytes:
            raise StackError(
                f"{spec.name} needs {gib(needed)} of {device} ({card.name}), and other processes "
                f"hold {gib(card.used_bytes)} of its {gib(card.total_bytes)}: nvidia-smi names "
                "them; CUDA_VISIBLE_DEVICES chooses another card",
                2,
            )
    _check_machine(spec, on_cpu, limits.dtype)


def _check_card(
    spec: ModelSpec, need: Need, place: Placement, card: Card, limits: Limits, itemsize: int,
    num_cards: int, alone: float,
) -> None:  # fmt: skip
    """Raises StackError if a decoder does not fit; `alone`: its share without an encoder."""
    have, whole, heads = card.total_bytes * place.memory_fraction, need, spec.text.num_kv_heads
    need, tokens = whole.of_rank(place.ranks, heads), limits.max_model_len
    if (least := need.least(tokens or 0)) <= have:
        return
    advice = what_fits(
        need, have, tokens, itemsize=itemsize,
        quantized=spec.checkpoint.quantization is not None, share=place.memory_fraction,
        fp8_cache=limits.caches_fp8(spec),
    )  # fmt: skip
    for ranks in (2, 4, 8):
        if place.ranks < ranks <= num_cards and whole.of_rank(ranks, heads).tokens_in(have):
            advice += f"; or --tensor-parallel {ranks}"
            break
    if least <= card.total_bytes * alone > have:
        advice += "; with two cards or more, a whole one: --layout split:E+D (cards of each)"
    request = ""
    if tokens:
        request = f", a request of {tokens:,} tokens {gib(tokens * need.token)}"
    states = f", {gib(need.states)} are recurrent states" if need.states else ""
    raise StackError(
        f"{spec.name} does not fit {place.device} ({card.name}, {gib(card.total_bytes)}), of which "
        f"a decoder may use {gib(have)}: weights take {gib(need.weights)}{states}{request}; "
        f"{advice}",
        2,
    )


def _check_machine(spec: ModelSpec, needed: int, dtype: str) -> None:
    """Memory of what runs on CPUs."""
    have = min(memory_limit_bytes(), _available_bytes())
    if needed <= have:
        return
    halve = "; --dtype bfloat16 needs half" if dtype in ("auto", "float32") else ""
    raise StackError(
        f"{spec.name} does not fit this machine: its weights take {gib(needed)} on CPUs, and "
        f"{gib(have)} of memory are free{halve}",
        2,
    )


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes_of(spec: ModelSpec, checkpoint: Checkpoint | None, itemsize: int) -> tuple[int, int]:
    quantization = spec.checkpoint.quantization
    if checkpoint is None:
        return dummy_bytes(spec, itemsize)
    if quantization is not None and quantization.at_load:
        return dummy_bytes(spec, itemsize)[0], checkpoint.vision.bytes_in(itemsize)
    return checkpoint.text.bytes_in(itemsize), checkpoint.vision.bytes_in(itemsize)


def _itemsize(dtype: str, device: str) -> int:
    """Bytes of a value; `auto`, and what the plan is about to refuse, is the device's own."""
    return _ITEM_BYTES.get(dtype, 4 if device == "cpu" else 2)
