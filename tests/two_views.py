"""A family whose images are two units each: an overview, then the image at its own size.

No model of the repository has more than one; this shows that the services leave room for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.common.families import qwen3_vl
from services.common.geometry import Geometry, Int32s, Run, Size, Unit
from services.common.model_spec import ModelSpec

BETWEEN = 7  # a token of text
OVERVIEW = Unit((1, 4, 4))


@dataclass(frozen=True, slots=True)
class TwoViews(Geometry):
    def units(self, size: Size) -> tuple[Unit, ...]:
        (whole,) = Geometry.units(self, size)
        return OVERVIEW, whole

    def placeholders(self, units: Sequence[Unit]) -> tuple[Int32s, Sequence[int]]:
        overview, whole = map(self.num_tokens, units)
        ids = [*[self.image_token_id] * overview, BETWEEN, *[self.image_token_id] * whole]
        return np.array(ids, np.int32), (0, overview + 1)

    def positions(self, num_tokens: int, runs: Sequence[Run]) -> tuple[None, int]:
        return None, 0


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    spec = qwen3_vl.read(directory, config)
    plain = spec.vision_part.geometry
    assert isinstance(plain, Geometry)
    geometry = TwoViews(
        plain.image_token_id, plain.patch_size, plain.merge_size, plain.min_pixels, plain.max_pixels
    )
    return replace(spec, vision=replace(spec.vision_part, geometry=geometry))
