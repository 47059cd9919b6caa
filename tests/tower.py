"""Operations of a vision tower for tests."""

import torch

from kernels.device import DeviceFacts
from services.common.families.qwen3_vl import DeepStackTower
from services.common.model_spec import TowerSpec
from services.encoder.operations.ops import Ops
from services.encoder.operations.table import TowerFacts, resolve


def cpu_ops(spec: TowerSpec) -> Ops:
    return Ops(resolve(TowerFacts.of(spec, DeviceFacts("cpu"), torch.float32)))


# On the CPU, see `Ops.pack_patches`; the tower does not matter.
pack_patches = cpu_ops(DeepStackTower(1, 16, 16, 1, 3, 16, 2, 2, 16, 4, ())).pack_patches
