"""What flashinfer is told of a step's chunks, with fakes in place of its wrappers."""

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention.attention_tuning import AttentionFacts
from kernels.device import KNOWN_DEVICES
from services.decoder.attention.base import AttentionMetadata
from tests.block_tables import first_blocks

CPU = torch.device("cpu")
WRAPPERS = (
    "BatchDecodeWithPagedKVCache",
    "BatchPrefillWithPagedKVCache",
    "BatchPrefillWithRaggedKVCache",
)


class Wrapper:
    """Notes the arguments of its plan."""

    def __init__(self, *_: Any, **options: Any) -> None:
        self.options = options

    def plan(self, *arrays: Any, **_: Any) -> None:
        self.queries, self.keys = arrays[0].tolist(), arrays[1].tolist()


class Ring:
    """Memory for plans that is not pinned, which needs no GPU."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def take(self) -> torch.Tensor:
        return torch.empty(self._size_bytes, dtype=torch.uint8)

    def copied(self) -> None:
        pass


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prefill of an 8B on an H200 with room for the keys of 128,000 tokens."""
    library, name = ModuleType("flashinfer"), "services.decoder.attention.flashinfer"
    for wrapper in WRAPPERS:
        setattr(library, f"{wrapper}Wrapper", type(wrapper, (Wrapper,), {}))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)  # removed again afterwards
    monkeypatch.setattr(module, "_PinnedRing", Ring)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    facts = AttentionFacts(
        device=KNOWN_DEVICES["h200"], dtype=torch.bfloat16, num_heads=32, num_kv_heads=8,
        head_dim=128, block_size=16, max_num_sequences=64, max_num_blocks=2000,
    )  # fmt: skip
    found = module.FlashInferPrefill(facts, CPU, torch.zeros(8))
    assert found.can_be_captured
    return found


def step_of(decodes: int, chunks: list[tuple[int, int]]) -> AttentionMetadata:
    """Decodes of 100 tokens, and chunks of (cached, new) tokens."""
    contexts = np.array([100] * decodes + [sum(chunk) for chunk in chunks], np.int32)
    lengths = [1] * decodes + [new for _, new in chunks]
    starts = first_blocks(contexts, 16)
    return AttentionMetadata(
        num_decodes=decodes,
        cu_query_lens=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=contexts,
        first_blocks=starts,
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_ids=torch.zeros(20_000, dtype=torch.int32),
        first_blocks_device=torch.from_numpy(starts),
        seq_lens_device=torch.from_numpy(contexts),
    )


def test_keys_are_copied_if_enough_queries_share_them(prefill: Any) -> None:
    dense = prefill.plan(step_of(7, [(6000, 1000), (3000, 800)]))
    assert type(dense).__name__ == "DenseChunks"
    assert dense._wrapper.queries == [7, 1007, 1007, 1807, 1807]
    assert dense._wrapper.keys == [0, 7000, 7040, 10_840, 10_880]
    assert dense._seq_lens.tolist() == [7000, 3800]
    for chunks in ([(9000, 300)], [(5000, 1000)] * 33, [(126_000, 2000), (0, 700)]):
        paged = prefill.plan(step_of(7, chunks))
        assert type(paged).__name__ == "PagedChunks"
        assert paged._wrapper.queries == np.cumsum([0, *(new for _, new in chunks)]).tolist()


def test_all_graphs_are_planned_in_the_same_places(prefill: Any) -> None:
    padding = [(0, 0)] * 16
    wrappers = set()
    for chunks in ([(6000, 1000)], [(2000, 500), (9000, 500)]):
        count = 17 - len(chunks)
        planned = prefill.plan(step_of(60, [*chunks, *padding[:count]]), captured=True)
        wrapper = planned._wrapper
        wrappers.add(id(wrapper))
        assert wrapper.options["use_cuda_graph"]
        assert len(wrapper.queries) == len(wrapper.options["qo_indptr_buf"]) == 35
        assert wrapper.queries[-1] == 60 + sum(new for _, new in chunks)
        assert len(planned._first_blocks) == 17
    assert len(wrappers) == 1


def test_a_graph_copies_keys_for_fewer_queries_than_an_eager_step(prefill: Any) -> None:
    for chunks, suits in (
        ([(20_000, 505)], True),
        ([(20_000, 400)], False),
        ([(30_000, 150)] * 4, False),
        ([(126_000, 2000), (0, 700)], False),  # no room
    ):
        assert prefill.suits_graph(step_of(3, chunks)) == suits
