"""What can be divided among ranks is known without torch, and as the ranks divide it."""

from dataclasses import replace

import pytest

from services.common.families import read_spec
from services.common.model_spec import LinearAttentionSpec, MoESpec, TextSpec, undivided_size
from services.common.nn.collectives import Ranks
from services.decoder.models.rank_spec import rank_spec
from triptych.options import DEMONSTRATION_MODEL

TEXT = replace(
    read_spec(DEMONSTRATION_MODEL).text,
    num_heads=24, num_kv_heads=4, intermediate_size=48 * 35, vocab_size=48 * 35,
)  # fmt: skip
MOE = MoESpec(num_experts=8, top_k=2, intermediate_size=96)
LINEAR = LinearAttentionSpec(
    num_key_heads=6, num_value_heads=12, key_head_dim=8, value_head_dim=8, conv_width=4
)
SPECS = {
    "plain": TEXT,
    "few key-value heads": replace(TEXT, num_kv_heads=2),
    "three key-value heads": replace(TEXT, num_kv_heads=3),
    "odd vocabulary": replace(TEXT, vocab_size=1001),
    "narrow MLP": replace(TEXT, intermediate_size=100),
    "experts": replace(TEXT, moe=MOE),
    "shared expert": replace(TEXT, moe=replace(MOE, shared_intermediate_size=36)),
    "linear attention": replace(TEXT, linear_attention=LINEAR),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_answer_is_that_of_the_ranks(name: str) -> None:
    def can_be_divided(text: TextSpec, count: int) -> bool:
        try:
            rank_spec(text, Ranks(rank=0, count=count))
        except ValueError:
            return False
        return True

    answers = [can_be_divided(SPECS[name], count) for count in range(1, 17)]
    assert [not undivided_size(SPECS[name], count) for count in range(1, 17)] == answers
    assert True in answers and False in answers


def test_the_size_is_named() -> None:
    assert undivided_size(replace(TEXT, num_heads=14), 4) == "14 attention heads"
    assert undivided_size(SPECS["three key-value heads"], 2) == "3 key-value heads"
    assert undivided_size(SPECS["three key-value heads"], 6) == ""  # each has a copy
