"""Creates the attention backend of a model: in torch, or composed of GPU kernels.

The runner's factory calls it. Which implementations there are is for `attention.table` to say. A
GPU's libraries are imported only where the table has them.
"""

import importlib.util
from collections.abc import Mapping

import torch

from kernels.attention.attention_tuning import AttentionFacts
from kernels.device import DeviceFacts
from services.common.nn.dispatch import PLAIN
from services.decoder.attention import table
from services.decoder.attention.base import AttentionBackend, AttentionSizes
from services.decoder.attention.sdpa import SdpaBackend


def create_backend(
    sizes: AttentionSizes,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Mapping[str, str] | None = None,
    *,
    fp8_cache: bool = False,
) -> AttentionBackend:
    """The backend for a model on a device of this machine.

    Args:
        dtype: of queries, and of the KV cache unless that is e4m3.
        overrides: see `dispatch.parse_overrides`; operations of other tables are ignored.
        fp8_cache: keys and values are cached in e4m3.

    Raises:
        UnknownOverride: an implementation does not exist or cannot run here.
    """
    facts = AttentionFacts(
        device=DeviceFacts.of(device),
        dtype=dtype,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=sizes.block_size,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        fp8_cache=fp8_cache,
    )
    resolved = table.resolve(facts, overrides)
    usable = {entry.name for name in resolved.operations for entry in resolved.usable(name)}
    if usable == {PLAIN}:
        return SdpaBackend(sizes, resolved)
    from services.decoder.attention.paged import PagedBackend

    return PagedBackend(facts, sizes, device, resolved)
