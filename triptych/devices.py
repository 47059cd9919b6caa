"""Finds the machine's cards and assigns processes and shares of memory to them, without torch.

`plan` calls `how_many` and `place`. `layout` decides which cards encode, and `fit` computes what
fits on a card.
"""

import itertools
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.layout import Layout
from triptych.options import CARD_SHARE

_ENCODER_SHARE_BESIDE_DECODER = 0.15
_QUERY = "index,uuid,name,memory.total,memory.used"
_QUERY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of an engine and its share of the machine.

    Attributes:
        device: `cpu` or `cuda:N`. With several ranks, the device of the first rank.
        memory_fraction: share of each card's memory. 1.0 on the CPU, where it is not used.
        num_threads: CPU threads for tensor operations. 0 if there is no limit because the engine
            runs on a GPU.
        ranks: number of cards of the engine. Their numbers follow that of `device`.
    """

    device: str
    memory_fraction: float
    num_threads: int
    ranks: int = 1

    @property
    def devices(self) -> Sequence[str]:
        return _neighbours(self.device, self.ranks)


@dataclass(frozen=True, slots=True)
class Card:
    """A visible card as nvidia-smi describes it, with memory in bytes."""

    name: str
    total_bytes: int
    used_bytes: int


def count_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that this process may use, by the environment or by device files."""
    visible = _visible_names(environment)
    if visible is not None:
        return len(visible)
    if (dev / "dxg").exists():  # WSL has one device file for all GPUs
        return len(visible_cards(environment))
    return sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())


def visible_cards(environment: Mapping[str, str]) -> dict[str, Card]:
    """Visible cards by their names in torch, `cuda:N`.

    MIG instances, which nvidia-smi does not list as cards, are left out. Without nvidia-smi the
    result is empty.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return {}
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
        found = [
            (index, uuid, Card(name, int(total) << 20, int(used) << 20))
            for index, uuid, name, total, used in rows
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    visible = _visible_names(environment)
    names = [index for index, _, _ in found] if visible is None else visible
    cards: dict[str, Card] = {}
    for number, name in enumerate(names):
        for index, uuid, card in found:
            if name == index or uuid.startswith(name):
                cards[f"cuda:{number}"] = card
    return cards


def _visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """Indices or UUIDs in CUDA_VISIBLE_DEVICES up to the first invalid entry, as CUDA reads it.

    None if the variable is not set.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def how_many(
    encoders: int | None,
    decoders: int | None,
    layout: Layout | None,
    *,
    images: bool,
    gpus: int,
    ranks: int = 1,
) -> tuple[int, int]:
    """Chooses the numbers of encoders and decoders so that all cards are used.

    Args:
        encoders, decoders: numbers that the user has set. None if the cards decide.
        layout: layout of the cards, used if the user has set neither number. None if there are no
            cards to divide.
        images: True if the model has a vision tower.
        gpus: number of cards over which the processes are spread. 0 if they run on CPUs, or on a
            card that the user has named.
        ranks: number of cards of each decoder.
    """
    if not images:
        return 0, decoders or max(1, gpus // ranks)
    if encoders is None and decoders is None and layout is not None:
        return layout.encoder_cards or layout.decoder_cards, layout.decoder_cards // ranks
    if encoders is None:
        used = (decoders or 1) * ranks
        encoders = max(1, gpus - used if gpus > used else gpus)
    return encoders, decoders or max(1, (gpus - encoders) // ranks)


def place(
    encoder_device: str,
    decoder_device: str,
    *,
    encoders: int,
    decoders: int,
    gpus: int,
    cpus: int,
    card_share: float = CARD_SHARE,
    ranks: int = 1,
) -> tuple[list[Placement], list[Placement]]:
    """Assigns devices, and divides memory and CPU threads.

    `cuda` stands for all cards, and `auto` for all cards or, without any, the CPU. Decoders take
    the first cards and encoders the next cards, starting over if there are more processes than
    cards. If a device is named, all processes of the kind run on it. Without encoders, decoders get
    whole cards.

    Args:
        encoder_device, decoder_device: device of the kind: `auto`, `cpu`, `cuda` or `cuda:N`.
        encoders, decoders: number of processes of the kind.
        gpus: number of visible cards.
        cpus: number of CPU cores.
        card_share: share of a card's memory that all its processes together may use.
        ranks: number of cards of each decoder.

    Returns:
        The placements of the encoders and of the decoders.
    """
    first = _spread(decoder_device, decoders, first=0, gpus=gpus, ranks=ranks)
    second = _spread(encoder_device, encoders, first=decoders * ranks, gpus=gpus)
    beside = encoder_share(card_share)
    return (
        _share(second, first, card_share, beside, cpus),
        _share(first, second, card_share, card_share - beside, cpus),
    )


def encoder_share(card_share: float = CARD_SHARE) -> float:
    """Share of a card's memory for an encoder beside a decoder; together they get `card_share`."""
    return min(_ENCODER_SHARE_BESIDE_DECODER, card_share / 2)


def _spread(
    device: str, count: int, *, first: int, gpus: int, ranks: int = 1
) -> list[Sequence[str]]:
    """The devices of each of `count` processes."""
    if device not in ("auto", "cuda"):
        return [_neighbours(device, ranks)] * count
    if not gpus:
        return [["cpu"] * ranks] * count
    places = max(1, gpus // ranks)
    return [_neighbours(f"cuda:{(first + i) % places * ranks}", ranks) for i in range(count)]


def _neighbours(device: str, ranks: int) -> Sequence[str]:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return [device] * ranks
    return [f"{kind}:{int(number or 0) + rank}" for rank in range(ranks)]


def _share(
    mine: Sequence[Sequence[str]],
    others: Sequence[Sequence[str]],
    whole: float,
    beside: float,
    cpus: int,
) -> list[Placement]:
    """Gives equal shares of their cards to the processes of one kind.

    A process with several cards has the share of its fullest card, because all ranks hold the same.

    Args:
        mine: devices of each process of this kind.
        others: devices of each process of the other kind.
        whole: share of a card that has no process of the other kind.
        beside: share of a card that also has processes of the other kind.
        cpus: number of CPU cores.
    """
    counts = Counter(device for devices in mine for device in devices)
    taken = Counter(device for devices in others for device in devices)
    cpu_processes = counts["cpu"] + taken["cpu"]
    placements: list[Placement] = []
    for devices in mine:
        ranks = len(devices)
        if devices[0] == "cpu":
            threads = max(1, ranks * cpus // max(1, cpu_processes))
            placements.append(Placement("cpu", 1.0, threads, ranks))
            continue
        share = min((beside if d in taken else whole) / counts[d] for d in devices)
        placements.append(Placement(devices[0], round(share, 3), 0, ranks))
    return placements
