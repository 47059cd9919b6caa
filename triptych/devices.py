"""The machine's cards; which process runs on which, and its share of the memory. Without torch.

`plan` calls `how_many` and `place`; what fits on a card is in `fit`.
"""

import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.options import CARD_SHARE

_ENCODER_SHARE_BESIDE_DECODER = 0.15
# An encoder on a card of its own feeds as many decoders, see benchmarks/LOG.md.
_CARDS_PER_ENCODER = 4
_QUERY = "index,uuid,name,memory.total,memory.used"
_QUERY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one engine runs.

    Attributes:
        device: `cpu` or `cuda:N`.
        memory_fraction: of the card's memory; 1.0 on the CPU, where it is not used.
        num_threads: CPU threads for tensor work; 0: no limit, because a GPU does it.
    """

    device: str
    memory_fraction: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Card:
    """One visible card, as the driver's own tool describes it; memory in bytes."""

    name: str
    total_bytes: int
    used_bytes: int


def count_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """NVIDIA devices that this process may use, by the environment, else by device files."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for name in visible.split(",") if name.strip() not in ("", "-1"))
    if (dev / "dxg").exists():  # Linux on Windows, which has one file for all
        return len(visible_cards(environment))
    return sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())


def visible_cards(environment: Mapping[str, str]) -> dict[str, Card]:
    """The cards by the names that torch gives them, `cuda:N`; those that nvidia-smi does not
    describe (parts of a card, or all if there is no nvidia-smi) are left out.
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
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [index for index, _, _ in found] if visible is None else visible.split(",")
    cards: dict[str, Card] = {}
    for number, name in enumerate(names):
        wanted = name.strip()
        for index, uuid, card in found:
            if wanted and (wanted == index or uuid.startswith(wanted)):
                cards[f"cuda:{number}"] = card
    return cards


def how_many(
    encoders: int | None, decoders: int | None, *, images: bool, gpus: int
) -> tuple[int, int]:
    """Encoders and decoders where their number is not given.

    All cards are used: each has a decoder, but for those that encoders take. On one card an encoder
    and a decoder share it; without a card there is one of each.

    Args:
        encoders: as given; None: by the cards.
        decoders: as given; None: by the cards.
        images: whether the model takes any.
        gpus: that both kinds are spread over; 0: they run on CPUs, or on a card that is named.
    """
    if not images:
        return 0, decoders or max(1, gpus)
    if encoders is None:
        encoders = max(1, -(-gpus // _CARDS_PER_ENCODER))
    return encoders, decoders or max(1, gpus - encoders)


def place(
    encoder_device: str,
    decoder_device: str,
    *,
    encoders: int,
    decoders: int,
    gpus: int,
    cpus: int,
    card_share: float = CARD_SHARE,
) -> tuple[list[Placement], list[Placement]]:
    """Resolves `auto` and divides memory and CPU threads.

    `cuda` is all cards, `auto` the same or, if there is none, the CPU: decoders take the first
    cards and encoders the next ones, starting over when there are more processes than cards. With
    a device that is named all processes of that kind run there. Without encoders, decoders get
    whole cards.

    Returns:
        The placements of the encoders and of the decoders.
    """
    decoder_devices = _spread(decoder_device, decoders, first=0, gpus=gpus)
    encoder_devices = _spread(encoder_device, encoders, first=decoders, gpus=gpus)
    beside = _ENCODER_SHARE_BESIDE_DECODER
    return (
        _share(encoder_devices, decoder_devices, card_share, min(beside, card_share / 2), cpus),
        _share(
            decoder_devices, encoder_devices, card_share, max(card_share - beside, card_share / 2),
            cpus,
        ),
    )  # fmt: skip


def _spread(device: str, count: int, *, first: int, gpus: int) -> list[str]:
    if device in ("auto", "cuda"):
        return [f"cuda:{(first + i) % gpus}" if gpus else "cpu" for i in range(count)]
    return [device] * count


def _share(
    mine: Sequence[str], others: Sequence[str], whole: float, beside_others: float, cpus: int
) -> list[Placement]:
    """Equal shares for the processes of one kind; of `whole` if the other kind is absent."""
    counts = Counter(mine)
    cpu_processes = counts["cpu"] + Counter(others)["cpu"]
    placements: list[Placement] = []
    for device in mine:
        if device == "cpu":
            placements.append(Placement(device, 1.0, max(1, cpus // max(1, cpu_processes))))
            continue
        share = beside_others if device in others else whole
        placements.append(Placement(device, round(share / counts[device], 3), 0))
    return placements
