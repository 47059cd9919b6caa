"""Which process runs on which device, and its share of the memory. Pure; without torch.

`plan` calls `place`. A device that does not exist is found by the engine process, at its start.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Shares of one card's memory. The rest is for CUDA contexts and the desktop.
_CARD_SHARE = 0.90
_ENCODER_SHARE_BESIDE_DECODER = 0.15


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


def count_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """NVIDIA devices that this process may use, by the environment, else by device files."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for name in visible.split(",") if name.strip() not in ("", "-1"))
    return sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())


def place(
    encoder_device: str, decoder_device: str, *, encoders: int, decoders: int, gpus: int, cpus: int
) -> tuple[list[Placement], list[Placement]]:
    """Resolves `auto` and divides memory and CPU threads.

    `auto` is the CPU if there is no GPU. Else decoders take the first cards and encoders the next
    ones, starting over when there are more processes than cards. With an explicit device all
    processes of that kind run there. Without encoders, decoders get whole cards.

    Returns:
        The placements of the encoders and of the decoders.
    """
    decoder_devices = _spread(decoder_device, decoders, first=0, gpus=gpus)
    encoder_devices = _spread(encoder_device, encoders, first=decoders, gpus=gpus)
    return (
        _share(encoder_devices, decoder_devices, _ENCODER_SHARE_BESIDE_DECODER, cpus),
        _share(decoder_devices, encoder_devices, _CARD_SHARE - _ENCODER_SHARE_BESIDE_DECODER, cpus),
    )


def _spread(device: str, count: int, *, first: int, gpus: int) -> list[str]:
    if device == "auto":
        return [f"cuda:{(first + i) % gpus}" if gpus else "cpu" for i in range(count)]
    return [device] * count


def _share(
    mine: Sequence[str], others: Sequence[str], share_beside_others: float, cpus: int
) -> list[Placement]:
    """Equal shares for the processes of one kind; of the whole card if the other kind is absent."""
    counts = Counter(mine)
    cpu_processes = counts["cpu"] + Counter(others)["cpu"]
    placements: list[Placement] = []
    for device in mine:
        if device == "cpu":
            placements.append(Placement(device, 1.0, max(1, cpus // max(1, cpu_processes))))
            continue
        share = share_beside_others if device in others else _CARD_SHARE
        placements.append(Placement(device, round(share / counts[device], 3), 0))
    return placements
