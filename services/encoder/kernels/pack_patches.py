"""Pixels → normalized patches in one pass, as one Triton kernel; the plain twin is
`packing.pack_patches`, whose values it gives bit for bit.
"""

import triton
import triton.language as tl
from torch import Tensor


def pack_patches(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """See the plain twin."""
    assert images.is_contiguous() and out.is_contiguous()
    _pack_patches_kernel[(len(out),)](
        images, out, height * width, width, MERGE=merge_size, PATCH=images.shape[1] // height,
        CHANNELS=images.shape[-1], num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_patches", "width"])
def _pack_patches_kernel(
    pixels_ptr, out_ptr, num_patches, width, MERGE: tl.constexpr, PATCH: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    image, within = row // num_patches, row % num_patches
    block, inside = within // (MERGE * MERGE), within % (MERGE * MERGE)
    across = width // MERGE
    top = block // across * MERGE + inside // MERGE
    left = block % across * MERGE + inside % MERGE
    y, x = tl.arange(0, PATCH)[:, None], tl.arange(0, PATCH)[None, :]
    first = image.to(tl.int64) * num_patches * (PATCH * PATCH)
    place = pixels_ptr + (first + (top * PATCH + y) * (width * PATCH) + left * PATCH + x) * CHANNELS
    to = out_ptr + row.to(tl.int64) * (CHANNELS * PATCH * PATCH) + y * PATCH + x
    for channel in tl.static_range(CHANNELS):
        value = tl.load(place + channel).to(tl.float32)
        # Divided as the reference does: a product with the reciprocal is another number.
        tl.store(
            to + channel * (PATCH * PATCH),
            tl.div_rn(value - 127.5, 127.5).to(out_ptr.dtype.element_ty),
        )
