"""Adapters of experts and of their router by name give PEFT's logits, float32 on the CPU."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.adapter_config import AdapterError
from services.common.nn.merged_checkpoint import open_checkpoint
from tests.adapters import adapted_oracle
from tests.cases import first
from tests.decoder_harness import Harness
from tests.parity import qwen3_5_oracle, text_oracle
from tests.parity.oracle import CONFIGS, Oracle, largest_difference, make_oracle
from tests.parity.test_adapters import start
from tests.parity.test_language_model import TOLERANCE

# isort: split
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of an import that PEFT has not renamed yet
    from peft import PeftModel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = {
    "text": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["qwen3-moe-odd-heads-dense-between"](), directory
    ),
    "vl": lambda directory: make_oracle(CONFIGS["moe-gqa3-two-taps"], directory),
    "hybrid": lambda directory: qwen3_5_oracle.make_qwen3_5(
        qwen3_5_oracle.CONFIGS["experts-one-shared"], directory
    ),
}
# PEFT's tensors of experts, those of one parameter alone, and the router beside attention.
ADAPTERS: tuple[dict[str, Any], ...] = (
    {
        "target_parameters": FUSED,
        "target_modules": [],
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"gate_up_proj": 3},
    },
    {"target_parameters": FUSED[1:], "target_modules": ["q_proj"], "use_rslora": True},
    {"target_parameters": ["mlp.gate.weight", FUSED[0]], "target_modules": ["o_proj"]},
)


@pytest.mark.parametrize("family", first(1, list(FAMILIES)))
def test_experts_of_several_adapters_in_one_step_give_logits_of_peft(
    family: str, tmp_path: Path
) -> None:
    base = FAMILIES[family](tmp_path / "model")
    places = [tmp_path / f"adapter-{number}" for number in range(len(ADAPTERS))]
    scale = 0.1 if family == "hybrid" else 0.3
    oracles = [
        adapted_oracle(base, place, number, scale=scale, **config)
        for number, (place, config) in enumerate(zip(places, ADAPTERS, strict=True))
    ]
    harness = Harness(base.directory, adapters=tuple(places), max_adapters=4)
    sources = [(oracles[0], 0), (base, -1), (oracles[1], 1), (oracles[2], 2), (oracles[0], 0)]
    started = [
        start(harness, oracle, slot, row, seed=row) for row, (oracle, slot) in enumerate(sources)
    ]
    found = harness.logits(*(harness.chunk(sequence) for sequence, _ in started))
    parts = found.split([len(logits) for _, logits in started])
    for row, (part, (_, expected)) in enumerate(zip(parts, started, strict=True)):
        assert largest_difference(part, expected) < TOLERANCE, row
        plain = start(harness, base, -1, row, seed=row)[1]
        harness.started = []
        assert (largest_difference(plain, expected) > 100 * TOLERANCE) == (row != 1)  # control
    # An adapter that has left the slot changes nothing.
    harness.runner.load_adapter(0, "")
    sequence, expected = start(harness, base, 0, 5, seed=9)
    assert largest_difference(harness.prompt_logits(sequence), expected) < TOLERANCE


def write_of_each_expert(directory: Path, base: Oracle, rank: int = 4) -> Path:
    """Writes an adapter with a module for each expert, as transformers 4 had them."""
    moe, hidden = base.spec.text.moe, base.spec.text.hidden_size
    assert moe is not None
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(base.spec.text.num_layers):
        if layer in moe.dense_layers:
            continue
        for expert in range(moe.num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                sizes = (moe.intermediate_size, hidden)
                out, size = sizes[::-1] if part == "down_proj" else sizes
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
                a = torch.randn(rank, size, generator=generator)
                b = torch.randn(out, rank, generator=generator)
                tensors[f"{name}.lora_A.weight"] = a * 1.2 / size**0.5
                tensors[f"{name}.lora_B.weight"] = b * 0.2
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none",
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_modules_of_each_expert_give_logits_of_peft(tmp_path: Path) -> None:
    """PEFT converts such an adapter to the fused tensors of transformers 5."""
    base = text_oracle.make_text_oracle(
        text_oracle.CONFIGS["qwen3-moe-biases-tied"](), tmp_path / "model"
    )
    place = write_of_each_expert(tmp_path / "adapter", base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(copy.deepcopy(base.model), str(place)).eval()
    oracle = Oracle(base.directory, cast(Any, adapted).base_model.model, base.spec)
    harness = Harness(base.directory, adapters=(place,), max_adapters=1)
    sequence, expected = start(harness, oracle, 0, 0, seed=1)
    assert largest_difference(harness.prompt_logits(sequence), expected) < TOLERANCE
    control = start(harness, base, -1, 0, seed=1)[1]
    assert largest_difference(control, expected) > 100 * TOLERANCE


def test_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    base, other = (
        text_oracle.make_text_oracle(text_oracle.CONFIGS[name](), tmp_path / name)
        for name in ("qwen3-moe-biases-tied", "qwen3-moe-odd-heads-dense-between")
    )
    fused = tmp_path / "fused"
    adapted_oracle(other, fused, target_parameters=FUSED, target_modules=[])
    single = write_of_each_expert(tmp_path / "single", other)
    for place, message in (
        (fused, "experts"),
        (single, r"layers\.\d\.mlp\.experts\.\d\.gate_proj is"),
    ):
        with pytest.raises(AdapterError, match=message):
            Harness(base.directory, adapters=(place,), max_adapters=1)
    both = write_of_each_expert(tmp_path / "both", base)
    tensors = load_file(both / "adapter_model.safetensors")
    tensors |= load_file(fused / "adapter_model.safetensors")
    save_file(tensors, both / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match="has factors of another shape"):
        Harness(base.directory, adapters=(both,), max_adapters=1)
    # PEFT computes no DoRA of stacked experts, whose magnitudes would be ignored.
    config = json.loads((fused / "adapter_config.json").read_text())
    (both / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    tensors = load_file(fused / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
        tensors[magnitude] = torch.ones(len(tensors[name]))
    save_file(tensors, both / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match="DoRA"):
        Harness(other.directory, adapters=(both,), max_adapters=1)
    # A rank that the configuration does not name has another scaling than the one computed.
    config = json.loads((fused / "adapter_config.json").read_text())
    for changed in ({"rank_pattern": {"gate_up_proj": 2}}, {"r": 2}):
        (fused / "adapter_config.json").write_text(json.dumps(config | changed))
        with pytest.raises(AdapterError, match="the configuration says 2"):
            Harness(other.directory, adapters=(fused,), max_adapters=1)
        with pytest.raises(AdapterError, match="the configuration says 2"):
            open_checkpoint(other.spec, fused, torch.float32)
    assert any("base_layer" in name for name in load_file(fused / "adapter_model.safetensors"))


def test_graphs_can_be_captured_beside_an_adapter_of_experts(tmp_path: Path) -> None:
    """The graphs leave the experts' changes out, so they fit once the adapter has left its slot."""
    base = text_oracle.make_text_oracle(
        text_oracle.CONFIGS["qwen3-moe-biases-tied"](), tmp_path / "model"
    )
    adapted_oracle(base, tmp_path / "adapter", target_parameters=FUSED, target_modules=[])
    harness = Harness(base.directory, adapters=(tmp_path / "adapter",), max_adapters=2)
    adapters = harness.runner.computer.model.adapters
    assert adapters is not None
    adapters.note_capture()
    assert not adapters.fit_graphs
    adapters.unload(0)
    assert adapters.fit_graphs
