"""The vision models, each in the file that its tower's kind names."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from services.common.model_spec import TowerSpec

if TYPE_CHECKING:
    from services.encoder.models.qwen3_vl import VisionTower


def model_class(tower: TowerSpec) -> "Callable[..., VisionTower]":
    """The class that computes a tower."""
    return importlib.import_module(f"{__name__}.{tower.kind}").VisionTower
