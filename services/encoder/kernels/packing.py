"""Pixels → normalized patches in plain torch."""

import torch
from torch import Tensor


def pack_patches(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """Images of one size: (x / 255 - 0.5) / 0.5 as the reference processor fuses it, in float32,
    rounded once.

    Args:
        images: `[num_images, height * patch, width * patch, channels]` uint8, contiguous.
        height: in patches; `width` as well.
        merge_size: patches per image-token side.
        out: `[num_images * height * width, channels * patch²]`, contiguous: the rows of
            `engine.patches.pack_patches`.
    """
    patch_size = images.shape[1] // height
    blocks = images.view(
        len(images), height // merge_size, merge_size, patch_size,
        width // merge_size, merge_size, patch_size, -1,
    ).permute(0, 1, 4, 2, 5, 7, 3, 6)  # fmt: skip
    torch.div(blocks.reshape(out.shape) - 127.5, 127.5, out=out)
