"""The sizes that all vision towers have."""

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower, which computes one embedding per `spatial_merge_size`² patches.

    A family's file has a subclass with the fields that only its kind of tower has.

    Attributes:
        kind: name of the tower's file in `services/encoder/models`.
        depth: number of blocks.
        temporal_patch_size: number of frames in a patch.
        out_hidden_size: size of an embedding's features.
        pixel_mean, pixel_std: mean and standard deviation by which pixels of 0 to 255 are
            normalized, one for each channel or one for all channels.
    """

    kind: ClassVar[str]
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    pixel_mean: tuple[float, ...] = field(default=(127.5,), kw_only=True)
    pixel_std: tuple[float, ...] = field(default=(127.5,), kw_only=True)

    @property
    def num_features(self) -> int:
        """Number of features of a unit's embedding, the merged output included."""
        return 1

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def block_weights(self) -> int:
        """Number of weights of a block's matrices."""
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size

    def attended(self, num_patches: int) -> float:
        """Returns the number of patches that a patch of a unit attends to, as a mean over blocks.

        Args:
            num_patches: number of patches of the unit.
        """
        return num_patches
