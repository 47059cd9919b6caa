"""Joins a process to the ranks: chooses its card, and makes the process group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from services.common.nn.collectives import Ranks
from services.common.nn.device import resolve_device

# Longest time that the start may take. A rank that hangs or dies later is noticed by
# `RankProcesses`.
_TIMEOUT = timedelta(hours=1)
# All ranks are on one machine. Multicast over NVLink is disabled: if the fabric manager has no
# multicast group, NCCL waits for one.
_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def device_of(setting: str, rank: int) -> str:
    """Returns the device of a rank: `cpu`, or the card that follows the first card by `rank`.

    Args:
        setting: `auto`, `cpu`, `cuda` or `cuda:N`. The first card is N, or 0.
        rank: number of the rank.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return "cpu"
    first = int(setting.partition(":")[2] or 0)
    return f"cuda:{first + rank}"


def join(rank: int, count: int, device: str, store_fd: int) -> Ranks:
    """Waits for the other ranks, and returns the group of all ranks.

    Args:
        rank: number of this rank.
        count: number of ranks.
        device: device of this rank.
        store_fd: descriptor of an empty memory file that all ranks inherit. They find each other
            through the file, without a port.

    Raises:
        SettingsError: this machine does not have the device.
    """
    for name, value in _VARIABLES.items():
        os.putenv(name, value)
    where = resolve_device(device)
    store = FileStore(f"/proc/self/fd/{store_fd}", count)
    store.set_timeout(_TIMEOUT)
    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=count,
        timeout=_TIMEOUT,
        device_id=where if on_gpu else None,
    )
    return Ranks(rank, count, PrefixStore("ranks", store))
