"""Facts about a device that kernels and dispatch tables depend on.

`KNOWN_DEVICES` has the facts of common GPUs, for which tables can be printed and kernels compiled
without a GPU.
"""

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a device.

    Attributes:
        kind: `cpu` or `cuda`.
        name: name in the driver.
        capability: compute capability. (0, 0) for a CPU.
        num_sms: number of streaming multiprocessors. 0 for a CPU.
        shared_memory_bytes: largest shared memory of a CTA.
        has_triton: True if Triton is installed.
    """

    kind: str
    name: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    shared_memory_bytes: int = 0
    has_triton: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        """Queries the facts of a device of this machine."""
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
        """Returns whether the device has programmatic dependent launch (Hopper and later)."""
        return self.capability >= (9, 0)

    @property
    def triton_obstacle(self) -> str:
        """Reason why Triton's kernels cannot run on the device, or "". Triton needs Ampere."""
        if self.kind != "cuda":
            return "needs a GPU"
        if self.capability < (8, 0):
            return "needs compute capability 8.0"
        return "" if self.has_triton else "needs Triton"

    @property
    def is_hopper(self) -> bool:
        """Returns whether the device has `wgmma` instructions, which Blackwell lacks."""
        return self.capability[0] == 9


_KIB = 1 << 10
# From NVIDIA's data sheets and the table of compute capabilities in the CUDA programming guide.
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
