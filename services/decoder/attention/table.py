"""The attention rows of the dispatch table, in order of preference.

The operations are `decode_attention`, chosen by the number of sequences, and `prefill_attention`,
chosen by the number of tokens. `PagedBackend` composes a step of the implementations, so the rows
create no kernels. The row of `fused_decode_attention` is in `services.decoder.operations.table`.
Where flashinfer cannot run, or fails while kernels warm up, our own kernels serve any step.
The module imports no kernel, so a table can be printed for any device.
"""

from collections.abc import Mapping, Sequence

from kernels.attention.attention_tuning import (
    AttentionFacts,
    paged_decode_obstacle,
    prefill_obstacle,
    size_class,
)
from services.common.nn.dispatch import PLAIN, Implementation, KernelTable, TokenRange

DECODE, PREFILL = "decode_attention", "prefill_attention"
PAGED, HOPPER, FLASHINFER = "paged", "hopper", "flashinfer"
_FLASHINFER_HEAD_DIMS = (64, 128, 256)

Row = Implementation[AttentionFacts]


def flashinfer_obstacle(facts: AttentionFacts) -> str:
    """Returns why flashinfer cannot serve these facts, or ""."""
    if facts.device.kind != "cuda":
        return "needs a GPU"
    if not facts.device.has_triton:  # the backend around flashinfer needs Triton
        return "needs Triton"
    if not facts.has_flashinfer:
        return "needs the package flashinfer-python: pip install 'triptych[gpu]'"
    if facts.fp8_cache:
        return "needs keys and values in bfloat16 or float16, not FP8"
    if facts.dtype.itemsize != 2:
        return f"needs bfloat16 or float16, not {facts.dtype}"
    if facts.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"needs a head_dim of 64, 128 or 256, not {facts.head_dim}"
    return ""


def _paged_sequences(facts: AttentionFacts) -> TokenRange:
    least = size_class(facts).paged_min_sequences
    where = f"captured or >= {facts.launch_hiding_tokens} tokens; any beside {HOPPER}"
    return TokenRange(least, condition=f"sequences, {where}")


def _hopper_tokens(facts: AttentionFacts) -> TokenRange:
    least = facts.launch_hiding_tokens
    return TokenRange(condition=f"captured, or >= {least} with few cached ones")


def _composed(_: AttentionFacts) -> None:
    """Creates nothing, because the backend composes the operation itself."""


ROWS: Sequence[Row] = (
    Row(DECODE, PAGED, _composed, paged_decode_obstacle, _paged_sequences, FLASHINFER),
    Row(DECODE, FLASHINFER, _composed, flashinfer_obstacle),
    Row(DECODE, PLAIN, _composed),
    Row(PREFILL, HOPPER, _composed, prefill_obstacle, _hopper_tokens, FLASHINFER),
    Row(PREFILL, FLASHINFER, _composed, flashinfer_obstacle),
    Row(PREFILL, PLAIN, _composed),
)


def resolve(
    facts: AttentionFacts, overrides: Mapping[str, str] | None = None
) -> KernelTable[AttentionFacts]:
    """Resolves the table for a model on a device.

    Args:
        facts: facts of the model and the device.
        overrides: the user's choices, see `dispatch.parse_overrides`. Operations of other tables
            are ignored.

    Raises:
        UnknownOverride: an implementation does not exist or cannot run for these facts.
    """
    own = {name: wanted for name, wanted in (overrides or {}).items() if name in _OWN}
    return KernelTable.resolve(ROWS, facts, own)


_OWN = {DECODE, PREFILL, "*"}
