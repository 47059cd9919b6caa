"""The sizes of one rank's part of a model."""

from dataclasses import replace

from services.common.model_spec import TextSpec
from services.common.nn.collectives import Ranks


def rank_spec(text: TextSpec, ranks: Ranks) -> TextSpec:
    """Returns the sizes of a rank's kernels and caches.

    Args:
        text: sizes and options of the whole model.
        ranks: ranks that share the model.

    Raises:
        ValueError: heads, MLP, experts or vocabulary cannot be divided equally.
    """
    if ranks.count == 1:
        return text

    def share(of: object, name: str, *, replicated: bool = False) -> int:
        return len(ranks.part(getattr(of, name), name, replicated=replicated))

    share(text, "vocab_size")
    moe, linear = text.moe, text.linear_attention
    if moe is not None:
        sizes = ("intermediate_size", "shared_intermediate_size")
        moe = replace(moe, **{name: share(moe, name) for name in sizes})
    if linear is not None:
        share(linear, "num_key_heads")
        linear = linear.part(ranks.count)
    return replace(
        text,
        moe=moe,
        linear_attention=linear,
        num_heads=share(text, "num_heads"),
        num_kv_heads=share(text, "num_kv_heads", replicated=True),
        intermediate_size=share(text, "intermediate_size"),
    )
