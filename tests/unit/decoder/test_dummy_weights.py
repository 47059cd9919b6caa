"""Random weights: all ranks agree on what each of them holds whole."""

from pathlib import Path

import pytest
import torch

from kernels.device import DeviceFacts
from services.common.families import read_spec
from services.common.nn.collectives import Ranks
from services.common.nn.dummy_weights import load_dummy
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


@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen3", 4), ("qwen3.5-moe", 2), ("fp8-block-experts", 2),
     ("packed-awq", 2)],
)  # fmt: skip
def test_ranks_agree_on_what_they_all_hold(tmp_path: Path, name: str, count: int) -> None:
    MAKERS[name](tmp_path / "model")
    whole = dict(made(tmp_path / "model", Ranks()).named_parameters())
    shared = set[str]()
    for rank in range(count):
        part = dict(made(tmp_path / "model", Ranks(rank, count)).named_parameters())
        assert part.keys() == whole.keys() | {"lm_head.weight"}
        shared |= {key for key, values in whole.items() if part[key].shape == values.shape}
        for key in shared:
            assert torch.equal(part[key], whole[key]), f"{key} of rank {rank}"
    assert "embed_tokens.weight" in shared and len(shared) < len(whole)
