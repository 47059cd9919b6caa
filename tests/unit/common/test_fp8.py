"""FP8 layers: how values and scales are stored, cut for ranks, and multiplied in plain torch."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.gemm import fp8_weight
from services.common.model_spec import QuantizationSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError
from services.common.nn.collectives import Ranks, Share
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.layer_formats import set_methods
from services.common.nn.linear import Axis, Linear, TensorLayout, UnquantizedLinear
from services.common.nn.weight_map import WeightMap
from services.common.nn.weights import load_weights
from tests.fp8_checkpoints import E4M3, quantize, unpack

BLOCK = QuantizationSpec(format="fp8_block")
CHANNEL = QuantizationSpec(format="fp8_channel")
FORMATS = {"block": (BLOCK, (128, 128)), "channel": (CHANNEL, (1, None)), "plain": (None, None)}


class Model(nn.Module):
    def __init__(self, rows: Mapping[str, int | Share], columns: int | Share, bias: bool) -> None:
        super().__init__()
        self.merged = Linear(columns, rows, bias)


def make(directory: Path, rows: dict[str, int], columns: int, name: str) -> dict[str, Tensor]:
    """Writes one module per part; returns what their files hold."""
    torch.manual_seed(0)
    spec, block = FORMATS[name]
    files: dict[str, Tensor] = {}
    for part, count in rows.items():
        files[f"{part}.bias"] = torch.randn(count)
        weight = torch.randn(count, columns)
        if spec is None:
            files[f"{part}.weight"] = weight
        else:
            files[f"{part}.weight"], scale = quantize(weight, block)
            files[f"{part}.weight_scale"] = scale
    save_file(files, directory / "model.safetensors")
    return files


def load(
    directory: Path, rows: Mapping[str, int | Share], columns: int | Share, name: str,
    dtype: torch.dtype,
):  # fmt: skip
    with torch.device("meta"):
        model = Model(rows, columns, bias=True)
    checkpoint, weight_map = Checkpoint.open(directory), WeightMap({"": ""})
    set_methods(model, checkpoint, weight_map, FORMATS[name][0])
    load_weights(model, checkpoint, weight_map, device="cpu", dtype=dtype)
    return model.merged


def meant(files: dict[str, Tensor], part: str, name: str) -> Tensor:
    spec, block = FORMATS[name]
    if spec is None:
        return files[f"{part}.weight"]
    return unpack(files[f"{part}.weight"], files[f"{part}.weight_scale"], block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["block", "channel"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ({"q": 256, "k": 128, "v": 128}, 256),
        ({"gate": 320, "up": 320}, 192),
        ({"q": 96, "k": 32, "v": 5}, 130),
        ({"q": 128, "k": 3, "v": 128}, 128),
    ],
)
def test_merged_layers_keep_the_scales_of_each_part(
    tmp_path: Path, rows: dict[str, int], columns: int, name: str, dtype: torch.dtype
) -> None:
    files = make(tmp_path, rows, columns, name)
    layer = load(tmp_path, rows, columns, name, dtype)
    assert layer.weight.dtype == E4M3 and layer.weight_scale.dtype == torch.float32
    assert layer.bias.dtype == dtype
    whole = torch.cat([meant(files, part, name) for part in rows])
    assert fp8_weight.dequantize(layer.method.weight(layer), torch.float32).equal(whole)
    x, bias = torch.randn(7, columns).to(dtype), torch.cat([files[f"{s}.bias"] for s in rows])
    expected = F.linear(x, whole.to(dtype)) + bias.to(dtype)
    assert layer(x).equal(expected)
    assert layer(x.view(7, 1, columns)).equal(expected.unsqueeze(1))


@pytest.mark.parametrize("columns", [128, 200, 4096])
@pytest.mark.parametrize("block_columns", [128, None])
def test_activations_are_quantized_by_the_largest_of_a_block(
    columns: int, block_columns: int | None
) -> None:
    wide = block_columns or columns
    x = torch.randn(5, columns) * torch.logspace(-30, 30, 5)[:, None]
    x[1, :128] = 0
    values, scale = fp8_weight.quantize_activations(x, wide)
    assert scale.shape == (5, -(-columns // wide)) and values.dtype == E4M3
    for start in range(0, columns, wide):
        block, found = x[:, start : start + wide], values[:, start : start + wide].float()
        used = scale[:, start // wide, None]
        largest = block.abs().amax(-1, keepdim=True)
        assert torch.where(largest > 0, largest / 448, 1.0).equal(used)
        assert found.equal((block / used).to(E4M3).float())
        # A value is off by half a step, of which there are 8 per power of two.
        assert ((found * used - block).abs() <= block.abs() / 16 + used * 2**-10).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_read_their_parts_of_the_files(tmp_path: Path, name: str, world: int) -> None:
    """Divided by rows, outputs are concatenated; by columns, they are added."""
    rows, columns = {"gate": 768, "up": 768}, 768
    make(tmp_path, rows, columns, name)
    x = torch.randn(3, columns)
    whole = load(tmp_path, rows, columns, name, torch.float32)
    expected, by_rows, total = whole(x), [], torch.zeros(3, 1536)
    for ranks in (Ranks(rank, world) for rank in range(world)):
        share = ranks.share(768, "size")
        parts = dict.fromkeys(rows, share)
        outputs = load(tmp_path, parts, columns, name, torch.float32)(x)
        by_rows.append(outputs.chunk(2, -1))
        total += load(tmp_path, rows, share, name, torch.float32)(x.chunk(world, -1)[ranks.rank])
    found = torch.cat([torch.cat(of_part, -1) for of_part in zip(*by_rows, strict=True)], -1)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(total, expected, atol=1e-3, rtol=1e-5)  # one of them has the bias


def test_parts_of_a_module_are_cut_one_by_one(tmp_path: Path) -> None:
    """As of queries, keys and values in one module, of which a rank has heads of each."""
    files = make(tmp_path, {"qkv": 512}, 256, "block")
    query, value = Share(128, ((0, 128),)), Share(256, ((128, 256),))
    share = Share.joined([query, Share(128, ((0, 128),)), value])
    assert share == Share(512, ((0, 256), (384, 512)))
    layer = load(tmp_path, {"qkv": share}, 256, "block", torch.float32)
    held = [*range(256), *range(384, 512)]
    assert layer.bias.equal(files["qkv.bias"][held])
    whole = meant(files, "qkv", "block")[held]
    assert fp8_weight.dequantize(layer.method.weight(layer), torch.float32).equal(whole)


def test_blocks_must_not_be_cut(tmp_path: Path) -> None:
    make(tmp_path, {"gate": 768, "up": 768}, 768, "block")
    quarter = Ranks(1, 4).share(768, "size")
    for rows, columns in (
        ({"gate": quarter, "up": quarter}, 768),
        ({"gate": 768, "up": 768}, quarter),
    ):
        with pytest.raises(CheckpointError, match=r"gate\.weight_scale: 192 of 768 cut through a"):
            load(tmp_path, rows, columns, "block", torch.float32)
    with pytest.raises(ValueError, match="size 768 cannot be divided by 5 ranks"):
        Ranks(0, 5).share(768, "size")


def test_few_units_are_replicated() -> None:
    parts = [Ranks(rank, 8).part(2, "num_kv_heads", replicated=True) for rank in range(8)]
    assert parts == 4 * [range(1)] + 4 * [range(1, 2)]
    with pytest.raises(ValueError, match="num_kv_heads 3 cannot be divided by 8 ranks"):
        Ranks(0, 8).part(3, "num_kv_heads", replicated=True)


class PackedAlongOutputs(UnquantizedLinear):
    """As AWQ stores values: outputs in the second dimension, eight to a word."""

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        axes = (Axis("in"), Axis("out", 8))
        return (
            TensorLayout(
                name="qweight", parameter="weight", axes=axes,
                stored=(torch.int32,), dtype=torch.int32,
            ),
        )  # fmt: skip


def test_a_format_may_pack_outputs_in_the_second_dimension(tmp_path: Path) -> None:
    words = {
        f"{s}.qweight": torch.randint(1 << 30, (6, n)).int() for s, n in {"a": 2, "b": 3}.items()
    }
    save_file(words, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model({"a": 16, "b": 24}, 6, bias=False)
        model.merged.set_method(PackedAlongOutputs())
    checkpoint = Checkpoint.open(tmp_path)
    load_weights(model, checkpoint, WeightMap({"": ""}), device="cpu", dtype=torch.bfloat16)
    assert model.merged.weight.equal(torch.cat(list(words.values()), 1))


class PackedAlongInputs(UnquantizedLinear):
    """As compressed-tensors packs four bits: no `weight`, and tensors that no dimension of the
    matrix runs along.
    """

    weight_format = "packed"

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        words = (torch.int32,)
        return (
            TensorLayout(
                name="weight_packed", parameter="weight", axes=(Axis("out"), Axis("in", 8)),
                stored=words, dtype=torch.int32,
            ),
            TensorLayout(
                name="weight_shape", parameter="weight_shape", axes=(2,),
                stored=(torch.int64,), dtype=torch.int64,
            ),
            TensorLayout(
                name="weight_g_idx", parameter="g_idx", axes=(Axis("in"),), stored=words,
                dtype=torch.int32,
            ),
        )  # fmt: skip


def packed(parts: dict[str, int]) -> tuple[nn.Module, dict[str, Tensor]]:
    files: dict[str, Tensor] = {}
    for name, rows in parts.items():
        files[f"{name}.weight_packed"] = torch.randint(-(1 << 30), 1 << 30, (rows, 3)).int()
        files[f"{name}.weight_shape"] = torch.tensor([rows, 24])
        files[f"{name}.weight_g_idx"] = torch.arange(24).int() // 8
    with torch.device("meta"):
        model = Model(parts, 24, bias=False)
        model.merged.set_method(PackedAlongInputs())
    return model, files


def test_a_format_may_have_tensors_of_literal_sizes(tmp_path: Path) -> None:
    model, files = packed({"a": 2, "b": 3})
    save_file(files, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    load_weights(model, checkpoint, WeightMap({"": ""}), device="cpu", dtype=torch.float32)
    assert model.merged.weight.equal(torch.cat([files[f"{s}.weight_packed"] for s in "ab"]))
    assert model.merged.weight_shape.tolist() == [2, 24, 3, 24]
    assert model.merged.g_idx.tolist() == 2 * files["a.weight_g_idx"].tolist()


def test_dummy_integers_use_all_bits() -> None:
    made = []
    for _ in range(2):
        model, _ = packed({"a": 64, "b": 64})
        load_dummy(model, 3, device="cpu", dtype=torch.float32)
        made.append(model.merged.weight)
    assert made[0].equal(made[1]) and made[0].dtype == torch.int32
    assert made[0].min() < -(1 << 30) and made[0].max() > 1 << 30


def test_no_weight_leaves_the_residual_without_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A projection may be the layer's own; a sum that is added in place may not."""
    fp8_kernels = pytest.importorskip("kernels.gemm.fp8_kernels")

    def add(x: Tensor, weight: object, bias: Tensor, residual: Tensor, *, device: object) -> None:
        residual += 1

    monkeypatch.setattr(fp8_kernels, "gemv_add", add)
    make(tmp_path, {"o": 8}, 8, "channel")  # a size that other kernels do not take
    layer = load(tmp_path, {"o": 8}, 8, "channel", torch.float32)
    (row,) = (row for row in layer.method.rows() if row.operation == "linear_residual")
    kernel, residual = row.create(SimpleNamespace(device=None)), torch.zeros(1, 8)
    kernel(torch.ones(1, 8), layer, residual)
    assert residual.tolist() == [[1.0] * 8]
