"""MLPs of Qwen2.5-VL's tower whose inner size is padded with zeros."""

import pytest
import torch
from torch.nn import functional as F

from services.common.families.qwen2_5_vl import WindowTower
from services.common.nn.weights import process
from services.encoder.models.qwen2_5_vl import Mlp
from tests.tower import cpu_ops

HIDDEN = 32


def mlp_of(inner: int) -> Mlp:
    spec = WindowTower(
        depth=1, hidden_size=HIDDEN, intermediate_size=inner, num_heads=2, in_channels=3,
        patch_size=14, temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=32,
        window_size=56, full_attention_blocks=(),
    )  # fmt: skip
    mlp = Mlp(spec, cpu_ops(spec))
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data.normal_(generator=generator)
    return mlp


def expected(mlp: Mlp, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The network by the weights of the files."""
    up, down = mlp.gate_up_proj, mlp.down_proj
    gate, value = F.linear(x, up.weight, up.bias).chunk(2, -1)
    return residual + F.linear(F.silu(gate) * value, down.weight, down.bias)


def computed(mlp: Mlp, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    residual = residual.clone()
    added = mlp(x, residual)
    return residual if added is None else residual + added


@pytest.mark.parametrize("inner", [3420, 44, 64])
def test_padding_changes_no_result(inner: int) -> None:
    mlp = mlp_of(inner)
    x, residual = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    wanted = expected(mlp, x, residual)
    process(mlp)
    padded = -(-inner // 64) * 64
    assert mlp.gate_up_proj.weight.shape == (2 * padded, HIDDEN)
    assert mlp.gate_up_proj.bias is not None and mlp.gate_up_proj.bias.shape == (2 * padded,)
    assert mlp.down_proj.weight.shape == (HIDDEN, padded)
    torch.testing.assert_close(computed(mlp, x, residual), wanted)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_one_of_the_layers_may_be_quantized(name: str) -> None:
    """A layer of another format is not padded. Here it is a layer whose format is not known."""
    mlp = mlp_of(44)
    x, residual = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    wanted = expected(mlp, x, residual)
    layer = getattr(mlp, name)
    other = mlp.down_proj if name == "gate_up_proj" else mlp.gate_up_proj
    other.method.process_weights_after_loading(other)

    class Other(type(layer.method).__mro__[1]):
        weight_format = "other"

    layer.method = Other()
    torch.testing.assert_close(computed(mlp, x, residual), wanted)
