"""Layers, factors and slots of tokens that tests of the kernels of adapters on a GPU share."""

import torch
from torch import Tensor

from kernels.adapters import token_groups
from kernels.adapters.adapter_tuning import FEW_TOKENS
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.device import DeviceFacts
from tests.gpu.twins import CUDA, random

SLOTS = 8
CHANGE = 8e-3  # of the norm of a change, see `test_adapters_gpu`
QKV, GATE_UP, DOWN = (4096, 1024, 1024), (12288, 12288), (4096,)


def factors_of(sizes: tuple[int, ...], columns: int, rank: int, slots: int = SLOTS) -> SlotFactors:
    """Random factors, whose changes are as large as outputs."""
    made = SlotFactors.zeros(sizes, columns, slots, rank, random(0))
    made.a[:, :, :rank].copy_(random(slots, len(sizes), rank, columns) * columns**-0.5)
    made.b[..., :rank].copy_(random(sum(sizes), slots, rank) * rank**-0.5)
    return made


def rows_of(slots: Tensor) -> AdapterRows:
    """The adapters of tokens as a step has them: in groups if there are many tokens."""
    is_many = len(slots) > FEW_TOKENS
    groups = token_groups.group_tokens(slots, SLOTS) if is_many else None
    return AdapterRows(slots, SLOTS, 0, SLOTS, groups=groups)


def given(pdl: int = 2) -> dict[str, int]:
    """The arguments of the kernels that depend on the device."""
    return {
        "shared_memory_bytes": DeviceFacts.of(torch.device(CUDA)).shared_memory_bytes,
        "pdl": pdl,
    }


def slots_of(count: int, kind: str) -> Tensor:
    """Slots of tokens: `none`, `one`, `eight` in turn, or `some`, of which a third has none."""
    turn = torch.arange(count, device=CUDA)
    return {
        "none": torch.full_like(turn, -1),
        "one": torch.full_like(turn, 5),
        "eight": turn % SLOTS,
        "some": torch.where(turn % 3 == 0, -1, turn // 100 % SLOTS),
    }[kind]
