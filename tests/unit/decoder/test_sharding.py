"""A model that two ranks share gives the whole model's logits, float32, CPU.

Ranks are threads; their all-reduce adds up in the order of ranks. Tolerance 1e-4 where logits are
of the order of 10: each projection back is a sum of two partial sums instead of one.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.model_spec import CheckpointSpec, ModelSpec, MoESpec, RopeSpec, TextSpec
from services.common.nn.device import DeviceFacts
from services.common.nn.weights import load_dummy, materialize
from services.decoder.attention.base import AttentionMetadata, AttentionSizes
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.kernels import table
from services.decoder.kernels.ops import Ops
from services.decoder.kernels.table import KernelFacts
from services.decoder.models.transformer import Transformer, rank_spec, shard

CPU, BLOCK_SIZE = torch.device("cpu"), 4
RANKS, TOKENS = 2, 11
TEXT = TextSpec(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=8, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4, rotary_dim=8),
    max_position_embeddings=64, tie_word_embeddings=False, qk_norm=True,
)  # fmt: skip
BIASED = {"qk_norm": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True}


class Meeting:
    """Where ranks add up; `reduces` False: each goes on with its own term."""

    def __init__(self, *, reduces: bool = True) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._terms: dict[int, Tensor] = {}
        self._reduces = reduces

    def all_reduce(self, rank: int, term: Tensor) -> Tensor:
        self._terms[rank] = term
        self._barrier.wait(30)
        total = torch.stack([self._terms[each] for each in range(RANKS)]).sum(0)
        self._barrier.wait(30)
        return total if self._reduces else term


def backend_of(text: TextSpec) -> SdpaBackend:
    sizes = AttentionSizes(text.num_heads, text.num_kv_heads, text.head_dim, BLOCK_SIZE, 4, 8)
    return SdpaBackend(sizes)


def ops_of(text: TextSpec, num_ranks: int) -> Ops:
    facts = KernelFacts(DeviceFacts("cpu"), text, torch.float32, num_ranks=num_ranks)
    return Ops(table.resolve(facts))


def logits(model: Transformer, text: TextSpec) -> Tensor:
    """A prompt's logits, in one chunk."""
    blocks = -(-TOKENS // BLOCK_SIZE)
    metadata = AttentionMetadata(
        num_decodes=0,
        cu_query_lens=np.array([0, TOKENS], np.int32),
        seq_lens=np.array([TOKENS], np.int32),
        slot_mapping=torch.arange(TOKENS),
        block_ids=torch.arange(blocks, dtype=torch.int32),
        seq_lens_device=torch.tensor([TOKENS], dtype=torch.int32),
    )
    metadata.plan = model.layers[0].self_attn.backend.plan(metadata)
    pool = torch.zeros(text.num_layers, blocks + 1, 2, BLOCK_SIZE, text.num_kv_heads, text.head_dim)
    ids = torch.arange(TOKENS) * 5 % text.vocab_size
    positions = torch.arange(TOKENS).expand(3, TOKENS)
    return model.logits(model.forward(ids, positions, pool, metadata))


def spec_of(text: TextSpec) -> ModelSpec:
    return ModelSpec(
        directory=Path(), name="tiny", architecture="Tiny", text=text, vision=None,
        checkpoint=CheckpointSpec(text_prefix="model."), eos_token_ids=(0,),
    )  # fmt: skip


def whole_of(text: TextSpec) -> Transformer:
    with torch.device("meta"):
        model = Transformer(spec_of(text), backend_of(text), ops_of(text, 1))
    load_dummy(model, device=CPU, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms, too, at a scale that shows
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0)
    return model


def together(whole: Transformer, text: TextSpec, meeting: Meeting) -> Tensor:
    def run(rank: int) -> Tensor:
        part = rank_spec(text, RANKS)
        with torch.device("meta"):
            model = Transformer(
                spec_of(text), backend_of(part), ops_of(text, RANKS), num_ranks=RANKS,
                all_reduce=lambda term: meeting.all_reduce(rank, term),
            )  # fmt: skip
        materialize(model, CPU, torch.float32)
        model.load_state_dict(shard(whole, rank, RANKS))
        return logits(model, part)

    with ThreadPoolExecutor(RANKS) as pool:
        return torch.cat(list(pool.map(run, range(RANKS))), dim=1)


EXPERTS = MoESpec(
    num_experts=6, top_k=2, intermediate_size=24, shared_intermediate_size=48,
    dense_layers=frozenset({1}),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        BIASED,
        {"num_heads": 4, "intermediate_size": 80},
        {"moe": EXPERTS},
        {"moe": replace(EXPERTS, shared_intermediate_size=0), "num_layers": 3},
    ],
)
def test_two_ranks_give_the_whole_models_logits(changes: dict) -> None:
    torch.manual_seed(0)
    text = replace(TEXT, **changes)
    whole = whole_of(text)
    expected = logits(whole, text)
    assert expected.abs().max() > 1
    found = together(whole, text, Meeting())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    alone = together(whole, text, Meeting(reduces=False))
    assert (alone - expected).abs().max() > 0.1, "the check would see a missing all-reduce"


def test_ranks_divide_the_weights_and_share_none_of_them() -> None:
    whole = whole_of(TEXT)
    parts = [shard(whole, rank, RANKS) for rank in range(RANKS)]
    layer = whole.layers[0]
    qkv = layer.self_attn.qkv_proj.weight
    query, key = 8 * 8, 4 * 8
    for rank, part in enumerate(parts):
        found = part["layers.0.self_attn.qkv_proj.weight"]
        rows = [
            *range(rank * query // 2, (rank + 1) * query // 2),
            *range(query + rank * key // 2, query + (rank + 1) * key // 2),
            *range(query + key + rank * key // 2, query + key + (rank + 1) * key // 2),
        ]
        assert torch.equal(found, qkv[rows])
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weight = layer.get_submodule(name).weight
        halves = [part[f"layers.0.{name}.weight"] for part in parts]
        assert torch.equal(torch.cat(halves, dim=1), weight)
    halves = [part["lm_head.weight"] for part in parts]
    assert torch.equal(torch.cat(halves), whole.lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 1}, "num_kv_heads 1"),
        ({"intermediate_size": 49}, "intermediate_size 49"),
        ({"moe": replace(EXPERTS, intermediate_size=25)}, "intermediate_size 25"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} cannot be divided by 2 ranks"):
        rank_spec(replace(TEXT, **changes), RANKS)
