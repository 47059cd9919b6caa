"""Creates the attention backend of a model: in torch, or composed of GPU kernels.

The runner's factory calls it. Which implementations there are is for `attention.table` to say. A
GPU's libraries are imported only where the table has them.
"""

from collections.abc import Mapping

import torch

from kernels.attention.attention_tuning import AttentionFacts
from services.common.nn.dispatch import PLAIN
from services.decoder.attention import table
from services.decoder.attention.base import AttentionBackend
from services.decoder.attention.sdpa import SdpaBackend


def create_backend(
    facts: AttentionFacts, device: torch.device, overrides: Mapping[str, str] | None = None
) -> AttentionBackend:
    """The backend for a model on a device of this machine.

    Args:
        facts: of both.
        device: that they are of.
        overrides: see `dispatch.parse_overrides`; operations of other tables are ignored.

    Raises:
        UnknownOverride: an implementation does not exist or cannot run here.
    """
    resolved = table.resolve(facts, overrides)
    usable = {entry.name for name in resolved.operations for entry in resolved.usable(name)}
    if usable == {PLAIN}:
        return SdpaBackend(facts, resolved)
    from services.decoder.attention.paged import PagedBackend

    return PagedBackend(facts, device, resolved)
