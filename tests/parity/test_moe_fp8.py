"""FP8 experts: our logits are those of Hugging Face's model with dequantized weights.

Weight-only, float32, CPU; tolerance as in test_fp8.py. Experts lie one by one, as in Qwen's
official files, or fused; quantizer and unpacker share no code with ours.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.gemm import fp8_weight
from services.common.nn import fp8
from services.common.nn.checkpoint import CheckpointError
from tests.decoder_harness import Harness
from tests.fp8_checkpoints import FORMATS, FP8_BLOCK, compressed, write
from tests.parity.oracle import EOS_ID, VOCAB_SIZE, Oracle
from tests.parity.oracle import largest_difference as error
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.text_oracle import make_text_oracle

# isort: split
from transformers import Qwen3MoeConfig

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, COUNT = 256, 4
SIZES = {"whole blocks": 128, "H = 2 * I is no block": 160, "half a block": 64}
CONFIG = FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"]}


def is_quantized(module: str) -> bool:
    return "layers" in module and not module.endswith("mlp.gate")


class Model:
    """One checkpoint, unquantized at Hugging Face's and to be quantized for us."""

    def __init__(self, directory: Path, size: int, hidden: int = HIDDEN) -> None:
        config = Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=COUNT,
            num_experts_per_tok=2, moe_intermediate_size=size, norm_topk_prob=True,
            max_position_embeddings=2048, mlp_only_layers=[1], eos_token_id=EOS_ID,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        self.source = directory / "source"
        self.directory = directory / "quantized"
        self.oracle: Oracle = make_text_oracle(config, self.source)
        self.prompt = self.oracle.prompt(40)
        self.original = {k: v.clone() for k, v in self.oracle.model.state_dict().items()}

    def expected(self, meant: dict[str, Tensor]) -> Tensor:
        """Logits of Hugging Face's model with these weights, whose experts lie one by one."""
        made = dict(meant)
        for layer in {name.partition(".experts.")[0] for name in meant if ".experts." in name}:
            parts = [
                [made.pop(f"{layer}.experts.{i}.{part}_proj.weight") for i in range(COUNT)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = map(torch.stack, parts)
            made[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
            made[f"{layer}.experts.down_proj"] = down
        missing, unexpected = self.oracle.model.load_state_dict(made, strict=False)
        assert not unexpected and not missing
        return self.oracle.answer(self.prompt).logits

    def write(self, name: str = "fp8-block", **options: object) -> dict[str, Tensor]:
        chosen = {"config": CONFIG if name == "fp8-block" else None, "modules": is_quantized}
        return write(self.source, self.directory, name, **(chosen | options))  # type: ignore[arg-type]

    def ours(self, chunk_size: int | None = None) -> Tensor:
        harness = Harness(self.directory)
        return harness.prompt_logits(harness.start(self.prompt.token_ids), chunk_size)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_one_by_one_agree(size: int, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    model = Model(tmp_path, size)
    meant = model.write(scale_dtype=scale_dtype)
    assert sum("experts" in name for name in meant) == 3 * COUNT
    expected = model.expected(meant)
    assert error(model.ours(), expected) < TOLERANCE
    assert error(model.ours(3), expected) < TOLERANCE
    model.oracle.model.load_state_dict(model.original)
    unquantized = model.oracle.answer(model.prompt).logits
    assert error(unquantized, expected) > CLEARLY_WRONG


def test_experts_with_a_scale_per_channel_agree(tmp_path: Path) -> None:
    model = Model(tmp_path, 160)
    config = compressed(ignore=["lm_head", "re:.*mlp.gate$"])
    expected = model.expected(model.write("compressed-channel", config=config))
    assert error(model.ours(), expected) < TOLERANCE


def test_experts_in_modelopts_blocks_agree(tmp_path: Path) -> None:
    model = Model(tmp_path, 160)
    config = FORMATS["modelopt-block"][0] | {"ignore": ["lm_head", "*mlp.gate"]}
    expected = model.expected(model.write("modelopt-block", config=config))
    assert error(model.ours(), expected) < TOLERANCE


def test_experts_that_files_leave_unquantized_agree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(tmp_path, 128)
    meant = model.write(modules=lambda module: is_quantized(module) and "experts" not in module)
    assert error(model.ours(), model.expected(meant)) < TOLERANCE
    (record,) = [record for record in caplog.records if "not quantized" in record.message]
    assert f"{3 * COUNT} modules" in record.message


def fused(
    directory: Path,
    *,
    transposed: bool,
    drops_scales: bool = False,
    scale: str = "weight_scale_inv",
) -> None:
    """Writes the experts of a quantized checkpoint as two tensors, and as many of scales."""
    path = directory / "model.safetensors"
    made = load_file(path)
    prefixes = {name.partition(".experts.")[0] + ".experts" for name in made if ".experts." in name}
    for prefix in prefixes:
        for kind in ("weight", scale):
            suffix = kind.removeprefix("weight")
            gate, up, down = (
                torch.stack([made.pop(f"{prefix}.{i}.{part}_proj.{kind}") for i in range(COUNT)])
                for part in ("gate", "up", "down")
            )
            if drops_scales and suffix:
                continue
            both = torch.cat((gate, up), 1) if gate.dim() > 1 else gate
            tensors = {"gate_up_proj": both, "down_proj": down}
            for name, tensor in tensors.items():
                found = tensor.mT.contiguous() if transposed else tensor
                made[f"{prefix}.{name}{suffix}"] = found
    save_file(made, path)


def test_fused_experts_with_one_scale_each_agree(tmp_path: Path) -> None:
    """That of a fused tensor is the gate's and up's."""
    model, path = Model(tmp_path, 160), tmp_path / "quantized" / "model.safetensors"
    config = FORMATS["modelopt"][0] | {"ignore": ["lm_head", "*mlp.gate"]}
    meant, prefix = model.write("modelopt", config=config), "model.layers.0.mlp.experts"
    made = load_file(path)
    for index in range(COUNT):
        gate, up = (f"{prefix}.{index}.{part}_proj.weight" for part in ("gate", "up"))
        made[f"{up}_scale"] = made[f"{gate}_scale"].clone()
        meant[up] = made[up].float() * made[f"{gate}_scale"]
    save_file({name: x for name, x in made.items() if "input_scale" not in name}, path)
    fused(model.directory, transposed=False, scale="weight_scale")
    assert error(model.ours(), model.expected(meant)) < TOLERANCE


@pytest.mark.parametrize("size", [128, 256])  # H = 2 * I, H = I
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_agree(size: int, transposed: bool, tmp_path: Path) -> None:
    model = Model(tmp_path, size)
    expected = model.expected(model.write())
    fused(model.directory, transposed=transposed)
    assert error(model.ours(), expected) < TOLERANCE


def test_scales_that_gate_and_up_share_are_refused(tmp_path: Path) -> None:
    model = Model(tmp_path, 160)
    model.write()
    fused(model.directory, transposed=False)
    with pytest.raises(CheckpointError, match="scales per 128 rows are not supported"):
        model.ours()


# Controls: what is read wrongly is seen.


@pytest.mark.parametrize("fault", ["dropped", "of another expert"])
def test_control_scales(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tmp_path, 128)
    expected = model.expected(model.write())
    assert error(model.ours(), expected) < TOLERANCE
    of_stack = fp8.Fp8Linear.weight

    def faulty(self: fp8.Fp8Linear, layer: fp8.Linear) -> fp8_weight.Fp8Weight:
        weight = of_stack(self, layer)
        if weight.scale.dim() < 3:
            return weight
        means = weight.scale.mean().expand_as(weight.scale)
        scale = means if fault == "dropped" else weight.scale.roll(1, 0)
        return fp8_weight.Fp8Weight(weight.values, scale, weight.block_rows, weight.block_columns)

    monkeypatch.setattr(fp8.Fp8Linear, "weight", faulty)
    assert error(model.ours(), expected) > CLEARLY_WRONG


EXPERT = "model.layers.0.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda key, tensor: None if key == f"{EXPERT}.weight_scale_inv" else tensor,
            rf"missing tensors: {EXPERT}\.weight_scale_inv$",
        ),
        (
            lambda key, tensor: tensor.float() if key == f"{EXPERT}.weight" else tensor,
            r"experts\.0\.gate_proj, .* are one layer, and not all are quantized",
        ),
        (
            lambda key, tensor: tensor.t() if key == f"{EXPERT}.weight_scale_inv" else tensor,
            r"up_proj\.weight_scale_inv is \[2, 1\], the model wants \[1, 2\]",
        ),
    ],
    ids=["no-scale", "mixed", "shape"],
)
def test_files_that_do_not_fit_are_errors(change: Callable, message: str, tmp_path: Path) -> None:
    model = Model(tmp_path, 128)
    model.write(change=change)
    with pytest.raises(CheckpointError, match=message):
        model.ours()


def test_fused_experts_without_scales_are_an_error(tmp_path: Path) -> None:
    model = Model(tmp_path, 128)
    model.write()
    fused(model.directory, transposed=True, drops_scales=True)
    with pytest.raises(CheckpointError, match=r"missing tensors: .*down_proj_scale_inv, .*gate_up"):
        model.ours()
