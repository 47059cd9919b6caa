"""Sizes of the Qwen3-VL language models, for benchmarks that need no checkpoint."""

from services.common.model_spec import MoESpec, RopeSpec, TextSpec


def _qwen3_vl(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    *,
    tied: bool,
    num_kv_heads: int = 8,
    moe: MoESpec | None = None,
) -> TextSpec:
    return TextSpec(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=5e6, rotary_dim=128, mrope_section=(24, 20, 20)),
        max_position_embeddings=262144,
        tie_word_embeddings=tied,
        qk_norm=True,
        moe=moe,
    )


TEXT_SHAPES = {
    "2b": _qwen3_vl(2048, 6144, 28, 16, tied=True),
    "4b": _qwen3_vl(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3_vl(4096, 12288, 36, 32, tied=False),
    "32b": _qwen3_vl(5120, 25600, 64, 64, tied=False),
    "30b-a3b": _qwen3_vl(
        2048, 6144, 48, 32, tied=False, num_kv_heads=4,
        moe=MoESpec(num_experts=128, top_k=8, intermediate_size=768),
    ),
}  # fmt: skip
