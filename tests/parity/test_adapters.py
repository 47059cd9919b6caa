"""Adapters beside the base model give PEFT's logits, float32 on the CPU, many in one batch."""

from pathlib import Path

import pytest
import torch

from services.common.adapter_config import AdapterError
from tests.adapters import LINEARS, adapted_oracle
from tests.cases import first
from tests.decoder_harness import Harness
from tests.parity import qwen3_5_oracle, text_oracle
from tests.parity.oracle import CONFIGS, Oracle, largest_difference, make_oracle
from tests.parity.test_language_model import TOLERANCE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

MIXED = r".*(q_proj|o_proj|down_proj|out_proj|in_proj_qkv|in_proj_a|shared_expert_gate)"
# Eight adapters that differ in everything that is served.
ADAPTERS = (
    {},
    {"target_modules": ["q_proj", "v_proj"], "r": 16, "lora_alpha": 16},
    {"use_rslora": True, "r": 6},
    {"use_dora": True, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {r"layers\.1\..*": 3}},
    {"target_modules": MIXED, "lora_alpha": 4},
    {"target_modules": ["lm_head", "gate_proj"]},
    {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["k_proj"]},
)
FAMILIES = {
    "vl": lambda directory: make_oracle(CONFIGS["gqa3-hd32-odd-heads"], directory),
    "vl, tied": lambda directory: make_oracle(CONFIGS["gqa1-hd16-one-tap"], directory),
    "biases": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["llama-gqa1-biases-tied"](), directory
    ),
    "hybrid": lambda directory: qwen3_5_oracle.make_qwen3_5(
        qwen3_5_oracle.CONFIGS["experts-one-shared"], directory
    ),
}


def start(harness: Harness, oracle: Oracle, adapter: int, row: int, seed: int):
    """Starts a prompt, with an image where the model takes one; returns its true logits, too."""
    is_text = oracle.spec.vision is None
    prompt = oracle.prompt(*((9 + row,) if is_text else (4 + row, (4, 6), 5)), seed=seed)
    answer = oracle.answer(prompt)
    images = list(zip(prompt.offsets, answer.embeddings, strict=True))
    positions = None if is_text else answer.positions
    sequence = harness.start(
        prompt.token_ids, row, positions=positions, delta=answer.delta, images=images,
        adapter=adapter,
    )  # fmt: skip
    return sequence, answer.logits


@pytest.mark.parametrize("family", first(2, list(FAMILIES)))
def test_eight_adapters_in_one_step_give_logits_of_peft(family: str, tmp_path: Path) -> None:
    base = FAMILIES[family](tmp_path / "model")
    places = [tmp_path / f"adapter-{number}" for number in range(len(ADAPTERS))]
    # More is amplified too much by eight layers with recurrent states.
    scale = 0.1 if family == "hybrid" else 0.3
    oracles = [
        adapted_oracle(base, place, number, scale=scale, **config)
        for number, (place, config) in enumerate(zip(places, ADAPTERS, strict=True))
    ]
    # The slots are in another order than the rows, and a sequence without adapter is between them.
    harness = Harness(
        base.directory, adapters=tuple(reversed(places)), max_adapters=9, max_num_sequences=10
    )
    slots = [*reversed(range(len(ADAPTERS)))]
    sources = [*zip(oracles[:4], slots[:4]), (base, -1), *zip(oracles[4:], slots[4:])]
    started = [
        start(harness, oracle, slot, row, seed=row) for row, (oracle, slot) in enumerate(sources)
    ]
    found = harness.logits(*(harness.chunk(sequence) for sequence, _ in started))
    plain = [start(harness, base, -1, row, seed=row)[1] for row in range(len(sources))]  # control
    harness.started = []
    parts = found.split([len(logits) for _, logits in started])
    for row, (part, (_, expected)) in enumerate(zip(parts, started, strict=True)):
        assert largest_difference(part, expected) < TOLERANCE, row
        if row != 4:
            assert largest_difference(plain[row], expected) > 100 * TOLERANCE
