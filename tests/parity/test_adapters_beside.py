"""Adapters beside quantized weights, and over two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fp8_checkpoints, packed_checkpoints
from tests.adapters import adapted_oracle
from tests.cases import first
from tests.decoder_harness import Harness
from tests.parity import adapter_ranks
from tests.parity.oracle import largest_difference
from tests.parity.quantized import TEXTS, Quantized
from tests.parity.test_expert_adapters import FUSED
from tests.parity.test_language_model import TOLERANCE
from tests.parity.text_oracle import CONFIGS, make_text_oracle

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

FORMATS = {
    "w4a16": (packed_checkpoints.write, "ct-32", "llama-biases"),
    "fp8": (fp8_checkpoints.write, "compressed-channel", "qwen3"),
    "fp8 blocks": (fp8_checkpoints.write, "fp8-block", "llama-biases"),
}
PARTS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("name", first(1, list(FORMATS)))
def test_adapter_over_quantized_weights_is_that_of_their_values(name: str, tmp_path: Path) -> None:
    """With DoRA, whose norms are those of the dequantized weights."""
    writer, layout, family = FORMATS[name]
    model = Quantized(TEXTS[family], tmp_path, writer)
    directory, meant = model.write(layout)
    base = model.expected(meant)
    adapted = adapted_oracle(
        model.oracle, tmp_path / "adapter", target_modules=PARTS, use_dora=True
    )
    expected = adapted.answer(model.prompt).logits
    harness = Harness(directory, adapters=(tmp_path / "adapter",), max_adapters=1)
    both = [harness.start(model.prompt.token_ids, row, adapter=row - 1) for row in range(2)]
    found = harness.logits(*map(harness.chunk, both)).split(len(model.prompt.token_ids))
    assert largest_difference(found[0], base) < TOLERANCE
    assert largest_difference(found[1], expected) < TOLERANCE
    assert largest_difference(base, expected) > 100 * TOLERANCE


# Models and their adapters.
OF_RANKS = {
    "mistral-wide-heads": (
        {"use_dora": True},
        {"target_modules": ["lm_head", "o_proj"]},
        {"use_rslora": True},
    ),
    "qwen3-moe-biases-tied": (
        {"target_parameters": FUSED, "target_modules": []},
        {"target_parameters": ["mlp.gate.weight"], "target_modules": ["o_proj"]},
        {"target_parameters": FUSED, "target_modules": ["q_proj"], "use_rslora": True},
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", OF_RANKS)
def test_two_ranks_give_the_answers_of_one(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.tie_word_embeddings = False  # a tied model repeats the prompt's last token
    base = make_text_oracle(config, tmp_path / "model")
    places = [tmp_path / f"adapter-{number}" for number in range(3)]
    for number, (place, options) in enumerate(zip(places, OF_RANKS[name], strict=True)):
        adapted_oracle(base, place, number, **options)
    paths = [str(base.directory), *map(str, places)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.adapter_ranks", "answers", *paths],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = adapter_ranks.answers(adapter_ranks.created(base.directory, places), places)
    assert json.loads(done.stdout.splitlines()[-1]) == alone
    assert len({tuple(answer) for answer in alone}) == 4  # control


# The adapters of the sequences that run while slots change.
CHANGING = (
    {"target_modules": PARTS},
    {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    {"target_modules": ["lm_head", "o_proj"], "use_rslora": True},
)


@pytest.mark.timeout(400)
def test_two_ranks_change_their_adapters_between_steps(tmp_path: Path) -> None:
    """Each answer is that of its adapter alone, also if a load fails on one rank only, and if a
    slot is filled while a step for its former adapter is in flight or staged.
    """
    base = make_text_oracle(CONFIGS["mistral-wide-heads"](), tmp_path / "model")
    places = [tmp_path / f"adapter-{number}" for number in range(len(CHANGING))]
    for number, (place, options) in enumerate(zip(places, CHANGING, strict=True)):
        adapted_oracle(base, place, number, **options)
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.parity.adapter_ranks", "changes", str(base.directory),
            *map(str, places),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = adapter_ranks.Changed(*json.loads(done.stdout.splitlines()[-1]))
    runner = adapter_ranks.created(base.directory, [], slots=len(places))
    alone = adapter_ranks.each_alone(runner, places)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)  # control
    for adapter, prompt, tokens in found.answers:
        assert tokens == alone[adapter, prompt], (adapter, prompt)
    assert {adapter for adapter, _, _ in found.answers} == {-1, 0, 1, 2}
    assert found.num_refused >= 4 and found.num_planned >= 1
