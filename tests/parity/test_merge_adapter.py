"""An adapter that is folded into the weights gives PEFT's merged weights and its logits."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.common.adapter_config import AdapterConfig, AdapterError
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.merged_checkpoint import open_checkpoint
from tests.adapters import EVERYWHERE, LINEARS, make_adapter, merged
from tests.cases import first
from tests.decoder_harness import Harness
from tests.parity import qwen3_5_oracle, text_oracle
from tests.parity.oracle import CONFIGS, Oracle, largest_difference, make_oracle
from tests.parity.test_adapters import start
from tests.parity.test_language_model import TOLERANCE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Options of adapters, by name: the kind of the model, and LoraConfig's fields.
CASES = {
    "tower, saved embedding of tied weights": (
        "vl",
        {"target_modules": EVERYWHERE, "modules_to_save": ["embed_tokens"]},
    ),
    "rsLoRA, DoRA and patterns": (
        "text",
        {
            "use_rslora": True,
            "use_dora": True,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7, "up_proj": 2},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    "head and embedding": ("untied", {"target_modules": [*LINEARS, "lm_head", "embed_tokens"]}),
    "saved head and norm": ("untied", {"modules_to_save": ["lm_head", "norm"]}),
    "experts": ("moe", {"target_parameters": EXPERTS}),
    "a tower that shares names with the language model": ("vl-2.5", {"use_dora": True}),
    "experts of a tower's model": ("vl-moe", {"target_parameters": EXPERTS}),
    "linear attention": ("hybrid", {"target_modules": EVERYWHERE, "lora_alpha": 1}),
}


def make(kind: str, directory: Path) -> Oracle:
    if kind == "vl":
        return make_oracle(CONFIGS["gqa1-hd16-one-tap"], directory)
    if kind == "vl-2.5":
        return make_oracle(CONFIGS["qwen2.5-gqa2-hd16"], directory)
    if kind == "vl-moe":
        return make_oracle(CONFIGS["moe-gqa3-two-taps"], directory)
    if kind == "hybrid":
        return qwen3_5_oracle.make_qwen3_5(qwen3_5_oracle.CONFIGS["experts-one-shared"], directory)
    names = {
        "text": "qwen3-odd-heads-tied",
        "untied": "mistral-wide-heads",
        "moe": "qwen3-moe-odd-heads-dense-between",
    }
    return text_oracle.make_text_oracle(text_oracle.CONFIGS[names[kind]](), directory)


@pytest.mark.parametrize("case", first(3, list(CASES)))
def test_merged_weights_and_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    oracle = make(kind, tmp_path / "model")
    adapted = make_adapter(oracle.model, tmp_path / "adapter", **config)
    whole = merged(adapted)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            half = make_adapter(cast(Any, oracle.model).to(dtype), tmp_path / "half", **config)
            adapter, whole = tmp_path / "half", merged(half)
        else:
            adapter = tmp_path / "adapter"
            reference = Oracle(oracle.directory, whole, oracle.spec)
            # With an image, whose embedding is that of the merged tower, where there is a tower.
            harness = Harness(oracle.directory, merge_adapter=adapter)
            sequence, expected = start(harness, reference, -1, 7, seed=3)
            assert largest_difference(harness.prompt_logits(sequence), expected) < TOLERANCE
            base = Harness(oracle.directory)
            other = base.prompt_logits(start(base, oracle, -1, 7, seed=3)[0])
            assert largest_difference(other, expected) > 100 * TOLERANCE  # control
        whole.save_pretrained(tmp_path / f"merged-{dtype}")
        ours = open_checkpoint(oracle.spec, adapter, dtype)
        theirs = Checkpoint.open(tmp_path / f"merged-{dtype}")
        with ours.reader() as mine, theirs.reader() as other:
            for name in theirs.tensors:
                found = mine.read(name).to(dtype)
                if case == "head and embedding" and "embed" in name and dtype != torch.float32:
                    continue  # PEFT rounds an embedding's change twice
                assert torch.equal(found, other.read(name)), name
                if found.dim() > 1:
                    assert torch.equal(mine.read(name, (slice(1, 3),)).to(dtype), found[1:3])


def test_each_refusal_names_its_cause(tmp_path: Path) -> None:
    oracle = make("text", tmp_path / "model")
    make_adapter(oracle.model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for name, value, message in (
        ("peft_type", "IA3", "peft_type 'IA3'"),
        ("bias", "all", "bias 'all'"),
        ("init_lora_weights", "pissa", "init_lora_weights 'pissa'"),
        ("trainable_token_indices", [3], "trainable_token_indices"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens"),
        ("r", 257, "rank 257"),
        ("use_dora", True, "use_dora and the magnitudes"),
        ("r", 3, "rank 4"),
        ("use_new_thing", True, "use_new_thing is not known"),
        ("r", "four", "malformed"),
    ):
        file.write_text(json.dumps(config | {name: value}))
        with pytest.raises(AdapterError, match=message):
            open_checkpoint(oracle.spec, tmp_path / "adapter", torch.float32)
    with pytest.raises(AdapterError, match="no adapter at"):
        AdapterConfig.read(tmp_path)


def test_adapter_of_another_model_or_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    oracle, other = make("text", tmp_path / "model"), make("untied", tmp_path / "other")
    make_adapter(other.model, tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"has no unquantized weights of that shape for layers"):
        open_checkpoint(oracle.spec, tmp_path / "adapter", torch.float32)
