"""How a process takes its place among the ranks: its card, and the process group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from services.common.nn.collectives import Ranks
from services.common.nn.device import resolve_device

_TIMEOUT = timedelta(hours=1)  # of a start; what hangs later, or dies, is noticed by others
# All ranks are on one machine. Multicast over NVLink is off: where a fabric manager has no group
# for it, NCCL waits for one.
_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip


def device_of(setting: str, rank: int) -> str:
    """The device of a rank: ranks have the cards from the setting's on.

    Args:
        setting: `auto`, `cpu`, `cuda` or `cuda:N`.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return "cpu"
    first = int(setting.partition(":")[2] or 0)
    return f"cuda:{first + rank}"


def join(rank: int, count: int, device: str, store_fd: int) -> Ranks:
    """Waits for the other ranks.

    Args:
        store_fd: of an empty memfd, which all ranks inherit: where they meet, without a port.

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
