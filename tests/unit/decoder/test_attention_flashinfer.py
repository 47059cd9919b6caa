"""Which kernels a step's attention goes through; what they compute is for tests/gpu."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from services.common.nn import launches
from services.decoder.attention.base import AttentionMetadata, AttentionSizes
from services.decoder.kernels.many_attention import ManyAttention
from services.decoder.kernels.prompt_attention import PromptAttention

BLOCK_SIZE = 16


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The backend's, without flashinfer."""
    library: Any = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = object
    library.BatchPrefillWithPagedKVCacheWrapper = object
    name = "services.decoder.attention.flashinfer"
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def backend_of(module: ModuleType, kv_heads: int, *, hopper: bool) -> Any:
    """One that was never on a device."""
    heads, dim, cpu = 16, 128, torch.device("cpu")
    backend = object.__new__(module.FlashInferBackend)
    backend._sizes = AttentionSizes(heads, kv_heads, dim, BLOCK_SIZE, 512, 1024)
    fits = hopper and ManyAttention.fits(heads, kv_heads, dim, BLOCK_SIZE)
    backend._many = ManyAttention(cpu, heads, kv_heads, dim, processors=4) if fits else None
    backend._prompts = PromptAttention(cpu, heads, dim) if hopper else None
    of_index = torch.zeros(1 << 20, dtype=torch.uint8)
    backend._index_ring = SimpleNamespace(take=lambda: of_index, copied=lambda: None)
    backend._decode, backend._prefill = "decodes", "prompts"
    backend._captured_wrapper = lambda decodes: f"{decodes} captured"
    backend._plan_decode = backend._plan_prefill = lambda *arguments: None
    return backend


@dataclass
class Step:
    """See `StepLengths`: decodes of 100 tokens, then chunks of so many new behind so many."""

    num_decodes: int
    chunks: list[tuple[int, int]]

    def __post_init__(self) -> None:
        lengths = [1] * self.num_decodes + [new for new, _ in self.chunks]
        contexts = [100] * self.num_decodes + [sum(chunk) for chunk in self.chunks]
        self.cu_query_lens = np.cumsum([0, *lengths]).astype(np.int32)
        self.seq_lens = np.array(contexts, np.int32)
        self.num_tokens = sum(lengths)

    def metadata(self, work: np.ndarray | None) -> AttentionMetadata:
        return AttentionMetadata(
            num_decodes=self.num_decodes,
            cu_query_lens=self.cu_query_lens,
            seq_lens=self.seq_lens,
            slot_mapping=torch.zeros(self.num_tokens, dtype=torch.int64),
            block_tables=torch.empty(0),
            block_ids=torch.zeros(int((-(-self.seq_lens // BLOCK_SIZE)).sum()), dtype=torch.int32),
            seq_lens_device=torch.from_numpy(self.seq_lens),
            work=None if work is None else torch.from_numpy(work),
        )


MANY, ITEMS = "ours", "list"  # of decodes, of chunks
PROMPTS = [(1008, 0)] * 8


@pytest.mark.parametrize(
    ("decodes", "chunks", "captured", "expected"),
    [
        (3, [], False, ("decodes", None)),
        (3, [], True, ("3 captured", None)),
        (48, [], False, ("decodes", None)),
        (48, [], True, (MANY, None)),
        (0, [(100, 0)], False, (None, "prompts")),
        (0, [(100, 500)], True, (None, ITEMS)),
        (60, [(100, 0)], False, ("decodes", "prompts")),
        (2, [(100, 0)], True, (MANY, ITEMS)),
        (2, PROMPTS, False, (MANY, ITEMS)),
        (0, PROMPTS, False, (None, ITEMS)),
        (2, [(1008, 1000)] * 8, False, ("decodes", "prompts")),
        (50, [(1008, 1000)] * 8, False, (MANY, "prompts")),
        (300, [(2, 0)] * 3000, False, (MANY, ITEMS)),
    ],
)  # fmt: skip
def test_what_a_step_goes_through(
    module: ModuleType,
    decodes: int,
    chunks: list[tuple[int, int]],
    captured: bool,
    expected: tuple[str | None, str | None],
) -> None:
    assert planned(backend_of(module, 8, hopper=True), Step(decodes, chunks), captured) == expected


def test_other_models_and_other_gpus_do_without_some(module: ModuleType) -> None:
    larger, older = backend_of(module, 4, hopper=True), backend_of(module, 8, hopper=False)
    assert (larger.captures_prompts, larger.captures_mixed) == (True, False)
    assert planned(larger, Step(50, PROMPTS), captured=False) == ("decodes", ITEMS)
    assert (older.captures_prompts, older.captures_mixed) == (False, False)
    assert planned(older, Step(50, PROMPTS), captured=False) == ("decodes", "prompts")
    assert planned(older, Step(50, []), captured=True) == ("50 captured", None)


def planned(backend: Any, step: Step, captured: bool) -> tuple[str | None, str | None]:
    with launches.captured() if captured else nullcontext():
        metadata = step.metadata(backend.list_work(step, captured=captured))
        plan = backend.plan(metadata, captured=captured)
    is_list = isinstance(plan.prefill, torch.Tensor)
    assert metadata.wants_keys_values == is_list
    if is_list:
        tokens = plan.prefill[:, 1] * (plan.prefill[:, 7] == 0)
        assert int(tokens.sum()) == sum(new for new, _ in step.chunks)
    return (
        MANY if isinstance(plan.decode, ManyAttention) else plan.decode,
        ITEMS if is_list else plan.prefill,
    )
