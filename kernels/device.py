"""What kernels must know of a device; queried once.

Dispatch tables are resolved from it; the known devices are for tables and compilation without a
GPU.
"""

import importlib.util
from dataclasses import dataclass

import torch


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
    def triton_obstacle(self) -> str:
        """Why Triton's kernels do not run there, or ""; Triton supports Ampere and later."""
        if self.kind != "cuda":
            return "needs a GPU"
        if self.capability < (8, 0):
            return "needs compute capability 8.0"
        return "" if self.has_triton else "needs Triton"

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
