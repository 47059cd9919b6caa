"""Int8 weights and activations: our logits are those of Hugging Face's model with dequantized
weights whose linear layers quantize their inputs.

Sums of integers are exact in both. Float32's rounding of what comes before may move an input across
a border of its 255 steps, by 1/127 of the largest; a few of those are less than the tolerance.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gemm import int8_weight
from kernels.gemm.int8_weight import Int8Weight
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.int8 import Int8Linear
from tests.decoder_harness import Harness
from tests.int8_checkpoints import INT8, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import Quantized, changed, dummy_layer, fixtures
from tests.parity.test_language_model import CLEARLY_WRONG
from tests.parity.test_moe_fp8 import Model as ExpertsModel
from tests.parity.test_moe_fp8 import is_quantized

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 0.05
UNQUANTIZED = 0.2  # less than leaving the inputs as they are makes a difference of


class Int8(Quantized):
    def quantizing(self, meant: dict[str, Tensor]) -> Tensor:
        """Logits of Hugging Face's model with these weights and quantized inputs."""
        self.expected(meant)
        layers = [
            part
            for name, part in self.oracle.model.named_modules()
            if "layers" in name and "visual" not in name and isinstance(part, torch.nn.Linear)
        ]
        assert len(layers) % 7 == 0 and layers
        with quantized_inputs(layers):
            return self.oracle.answer(self.prompt).logits


@contextmanager
def quantized_inputs(layers: list[torch.nn.Linear]) -> Iterator[None]:
    for layer in layers:
        layer.__class__ = QuantizingLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = torch.nn.Linear


class QuantizingLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        scale = input.abs().amax(-1, keepdim=True) / 127
        found = torch.round(input / scale).double() * scale.double()
        return F.linear(found, self.weight.double()).float() + (
            0 if self.bias is None else self.bias
        )


model, text = fixtures(write, kind=Int8)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_quantized_inputs(model: Int8, scale_dtype: torch.dtype) -> None:
    directory, meant = model.write("int8", scale_dtype=scale_dtype)
    expected = model.quantizing(meant)
    assert error(model.ours(directory), expected) < TOLERANCE
    assert error(model.ours(directory, 3), expected) < TOLERANCE
    assert error(model.expected(meant), expected) > UNQUANTIZED


def test_weights_are_those_of_the_files(text: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without quantized inputs, as exactly as unquantized models."""
    directory, meant = text.write("int8")
    weight_only(monkeypatch)
    assert error(text.ours(directory), text.expected(meant)) < 2e-4


def weight_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Int8Weight) -> Tensor:
        return F.linear(x, int8_weight.dequantize(weight, x.dtype))

    monkeypatch.setattr(int8_weight, "w8a8_linear", linear)
    monkeypatch.setattr(Int8Linear, "multiply", staticmethod(linear))


def test_experts_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ExpertsModel(tmp_path, 160)
    config = INT8 | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    meant = write(model.source, model.directory, modules=is_quantized, config=config)
    quantized = model.ours()
    weight_only(monkeypatch)
    expected = model.expected(meant)
    assert error(model.ours(), expected) < 2e-4
    assert UNQUANTIZED < error(quantized, expected) < 10


@pytest.mark.parametrize("fault", ["dropped", "of another row"])
def test_control_scales(text: Int8, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, meant = text.write("int8")
    linear = int8_weight.w8a8_linear

    def faulty(x: Tensor, weight: Int8Weight) -> Tensor:
        means = weight.scale.mean().expand_as(weight.scale)
        scale = means if fault == "dropped" else weight.scale.flip(0)
        return linear(x, replace(weight, scale=scale))

    monkeypatch.setattr(int8_weight, "w8a8_linear", faulty)
    assert error(text.ours(directory), text.quantizing(meant)) > CLEARLY_WRONG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed("self_attn.k_proj.weight_scale", lambda _: None),
            r"missing tensors: .*1\.self_attn\.k_proj\.weight_scale$",
        ),
        (
            changed("mlp.up_proj.weight_scale", lambda scale: scale[1:]),
            r"up_proj\.weight_scale is \[319, 1\], the model wants \[320, 1\]",
        ),
        (
            changed("mlp.down_proj.weight", Tensor.float),
            r"unexpected tensors: .*1\.mlp\.down_proj\.weight_scale$",
        ),
        (
            changed("mlp.down_proj.weight", lambda weight: weight.view(torch.uint8)),
            r"down_proj\.weight is uint8, the model wants int8",
        ),
    ],
    ids=["no-scale", "shape", "dropped-scale", "dtype"],
)
def test_files_that_do_not_fit_are_errors(text: Int8, change: Callable, message: str) -> None:
    directory, _ = text.write("int8", change=change)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)


def test_dummy_weights_are_int8(text: Int8) -> None:
    directory, _ = text.write("int8")
    layer = dummy_layer(directory)
    weight = int8_weight.dequantize(layer.method.weight(layer), torch.float32)
    assert layer.weight_format == "int8" and 0.015 < float(weight.std()) < 0.025


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (24, 2056)])
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_torchs_gemm_of_integers_is_exact(rows: int, columns: int, tokens: int) -> None:
    values = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    weight, x = Int8Weight(values, torch.rand(rows, 1)), torch.randn(tokens, columns)
    x[0] = 0
    assert int8_weight.int_mm_linear(x, weight).equal(int8_weight.w8a8_linear(x, weight))
