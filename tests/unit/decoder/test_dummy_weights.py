"""Random weights of ranks are parts of what one rank has: all ranks agree on what they share."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.device import DeviceFacts
from services.common.families import read_spec
from services.common.nn import dummy_weights
from services.common.nn.collectives import Ranks
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.linear import Linear
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.models.rank_spec import rank_spec
from services.decoder.models.transformer import Transformer
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts, attention_facts
from services.decoder.operations.ops import Ops
from tests.parity.test_ranks import MAKERS


def made(directory: Path, ranks: Ranks) -> Transformer:
    spec = read_spec(directory)
    part = rank_spec(spec.text, ranks)
    facts = KernelFacts(DeviceFacts("cpu"), part, torch.float32, num_ranks=ranks.count)
    with torch.device("meta"):
        model = Transformer(
            spec,
            SdpaBackend(attention_facts(facts, block_size=4)),
            Ops(table.resolve(facts)),
            ranks=ranks,
        )
    load_dummy(
        model, 7, device="cpu", dtype=torch.float32, weight_map=model.weight_map,
        quantization=spec.checkpoint.quantization,
    )  # fmt: skip
    return model


def parts_of(layer: Linear, parameter: str) -> dict[str, Tensor]:
    """A layer's modules' values of a parameter, which has all of each."""
    (layout,) = (each for each in layer.layouts() if each.parameter == parameter)
    values = getattr(layer, parameter)
    lead = [slice(None)] * (values.ndim - len(layout.axes))
    return {piece.part: values[(*lead, *piece.place)] for piece in layer.pieces(layout)}


def cut_of(layer: Linear, parameter: str, whole: Linear) -> Tensor:
    """What the layer should hold of it, by the model of one rank."""
    (layout,) = (each for each in layer.layouts() if each.parameter == parameter)
    modules = parts_of(whole, parameter)
    lead = [slice(None)] * len(layer.stack)
    cuts = [modules[piece.part][(*lead, *piece.cut)] for piece in layer.pieces(layout)]
    return torch.cat(cuts, len(lead) + layout.merged_axis)


@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen3", 4), ("qwen3.5-moe", 2), ("fp8-block-experts", 2),
     ("packed-awq", 2)],
)  # fmt: skip
def test_ranks_have_parts_of_the_same_weights(
    tmp_path: Path, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy_weights, "process", lambda module: None)  # which moves codes
    MAKERS[name](tmp_path / "model")
    whole = made(tmp_path / "model", Ranks())
    layers = dict(whole.named_modules())
    seen = set[str]()
    for rank in range(count):
        for path, layer in made(tmp_path / "model", Ranks(rank, count)).named_modules():
            other = layers[path]
            for field, values in layer.named_parameters(recurse=False):
                if values.shape == getattr(other, field).shape:
                    if field == "bias" and rank and layer.columns != other.columns:  # type: ignore[union-attr]
                        assert not values.any()
                        continue
                    expected = getattr(other, field)
                elif isinstance(layer, Linear):
                    seen.add(field)
                    assert isinstance(other, Linear)
                    expected = cut_of(layer, field, other)
                else:
                    (*ranges,) = layer.shares[field].ranges  # type: ignore[union-attr,index]
                    rows = [getattr(other, field)[start:stop] for start, stop in ranges]
                    expected = torch.cat(rows).view_as(values)
                assert torch.equal(values, expected), f"{path}.{field} of rank {rank}"
    assert "weight" in seen
