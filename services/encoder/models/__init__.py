"""The vision towers, each in the file that its kind is named after."""

import importlib
from typing import TYPE_CHECKING

from services.common.model_spec import TowerSpec
from services.encoder.operations.ops import Ops

if TYPE_CHECKING:
    from services.encoder.models.qwen3_vl import VisionTower


def create_tower(tower: TowerSpec, ops: Ops, prefix: str = "") -> "VisionTower":
    """Creates a vision tower on torch's current default device.

    Args:
        tower: sizes of the tower. `tower.kind` names the file of its class `VisionTower`.
        ops: operations of the tower, with the kernels chosen for the device.
        prefix: prefix of the tower's tensor names in a checkpoint.
    """
    module = importlib.import_module(f"{__name__}.{tower.kind}")
    return module.VisionTower(tower, ops, prefix)
