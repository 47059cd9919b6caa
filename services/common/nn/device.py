"""The device of an engine, by its setting, and what kernels must know of it; queried once.

Dispatch tables are resolved from it; the known devices are for tables and compilation without a
GPU.
"""

import importlib.util
from dataclasses import dataclass

import torch

from services.common.settings import SettingsError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device that a setting names; `auto`: the first GPU if there is one, else the CPU.

    Raises:
        SettingsError: this machine does not have it.
    """
    available = torch.cuda.is_available()
    device = torch.device(("cuda" if available else "cpu") if name == "auto" else name)
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not available or (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"device {name!r} does not exist: torch sees no such GPU")
        device = torch.device("cuda", device.index or 0)
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting names; `auto`: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        SettingsError: it is not supported.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise SettingsError(f"dtype {name!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device.

    Attributes:
        kind: `cpu` or `cuda`.
        name: as the driver calls it.
        capability: compute capability; (0, 0) on a CPU.
        num_sms: streaming multiprocessors; 0 on a CPU.
        shared_memory_bytes: most that one CTA can have.
        has_triton: Triton can compile for it here.
    """

    kind: str
    name: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    shared_memory_bytes: int = 0
    has_triton: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        """Facts of a device of this machine."""
        if device.type != "cuda":
            return cls(device.type)
        found = torch.cuda.get_device_properties(device)
        return cls(
            kind="cuda",
            name=found.name,
            capability=(found.major, found.minor),
            num_sms=found.multi_processor_count,
            shared_memory_bytes=found.shared_memory_per_block_optin,
            has_triton=importlib.util.find_spec("triton") is not None,
        )

    @property
    def supports_pdl(self) -> bool:
        """Programmatic dependent launch: Hopper and later."""
        return self.capability >= (9, 0)

    @property
    def is_hopper(self) -> bool:
        """Whether it has `wgmma`, which Blackwell has not."""
        return self.capability[0] == 9


_KIB = 1 << 10
# By NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities: to print
# and compile for a device that is not here.
KNOWN_DEVICES = {
    name.lower().replace(" ", "-"): DeviceFacts("cuda", name, capability, num_sms, shared, True)
    for name, capability, num_sms, shared in (
        ("H200", (9, 0), 132, 227 * _KIB),
        ("H100", (9, 0), 132, 227 * _KIB),
        ("A100", (8, 0), 108, 163 * _KIB),
        ("L40S", (8, 9), 142, 99 * _KIB),
        ("B200", (10, 0), 148, 227 * _KIB),
        ("RTX PRO 6000", (12, 0), 188, 99 * _KIB),
    )
}
