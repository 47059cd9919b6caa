"""The vision models, each in the file that its tower's kind names."""

import importlib

from services.common.model_spec import TowerSpec
from services.encoder.models.base import VisionModel


def model_class(tower: TowerSpec) -> type[VisionModel]:
    """The class that computes a tower."""
    return importlib.import_module(f"{__name__}.{tower.kind}").VisionTower
