"""Creates the attention backend of a model: in torch, or composed of GPU kernels.

The runner's factory calls `create_backend`. `attention.table` lists the implementations. Libraries
for GPUs are imported only if the table has rows that use them.
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
    """Creates the backend for a model on a device of this machine.

    Args:
        facts: facts of the model and the device.
        device: the device that computes.
        overrides: the user's choices, see `dispatch.parse_overrides`. Operations of other tables
            are ignored.

    Raises:
        UnknownOverride: an implementation does not exist or cannot run here.
    """
    resolved = table.resolve(facts, overrides)
    usable = {entry.name for name in resolved.operations for entry in resolved.usable(name)}
    if usable == {PLAIN}:
        return SdpaBackend(facts, resolved)
    from services.decoder.attention.paged import PagedBackend, create_kernels

    return PagedBackend(facts, resolved, create_kernels(facts, device, resolved))
