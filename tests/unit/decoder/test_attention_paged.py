"""Which implementations a step's attention uses on a GPU; what they compute is for tests/gpu."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention
from kernels.device import KNOWN_DEVICES, DeviceFacts
from services.common.nn.dispatch import KernelTable, UnknownOverride
from services.decoder.attention import table
from services.decoder.attention.base import AttentionMetadata, StepLengths
from services.decoder.attention.paged import (
    LibraryChunks,
    LibraryDecodes,
    PagedBackend,
    StepPart,
)
from services.decoder.attention.sdpa import SdpaBackend
from tests.block_tables import first_blocks

BLOCK_SIZE = 16
CPU = torch.device("cpu")
H200 = KNOWN_DEVICES["h200"]
KINDS = ("decodes", "prompts", "mixed", "long")


class FakeDecode:
    """flashinfer's decode, whose wrapper is the name of what it plans."""

    fails = False

    def plan(self, metadata: AttentionMetadata, *, captured: bool) -> str:
        if self.fails:
            raise RuntimeError("not compiled")
        return f"{metadata.num_decodes} captured" if captured else "eager"


class FakePrefill:
    """flashinfer's prefill, likewise, with room for the keys of 50,000 tokens."""

    fails = False

    def __init__(self, facts: AttentionFacts) -> None:
        self.can_be_captured = facts.device.is_hopper

    def suits_graph(self, step: StepLengths) -> bool:
        return int(step.seq_lens[step.num_decodes :].sum()) <= 50_000

    def plan(self, metadata: AttentionMetadata, *, captured: bool) -> str:
        if self.fails:
            raise RuntimeError("not compiled")
        return "captured chunks" if captured else "chunks"


def facts_of(
    device: DeviceFacts = H200, heads: int = 16, kv_heads: int = 8, dim: int = 128,
    *, flashinfer: bool = True,
) -> AttentionFacts:  # fmt: skip
    return AttentionFacts(
        device=device, dtype=torch.bfloat16, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        block_size=BLOCK_SIZE, has_flashinfer=flashinfer,
    )  # fmt: skip


def table_of(facts: AttentionFacts, **overrides: str) -> KernelTable[AttentionFacts]:
    return table.resolve(facts, overrides)


def backend_of(facts: AttentionFacts, **overrides: str) -> PagedBackend:
    """A backend that was never on a device, with fakes of flashinfer's kernels."""
    resolved = table_of(facts, **overrides)
    makers = {
        (table.DECODE, table.PAGED): lambda: PagedDecodeAttention(facts, CPU),
        (table.PREFILL, table.HOPPER): lambda: PrefillAttention(facts, CPU),
        (table.DECODE, table.FLASHINFER): FakeDecode,
        (table.PREFILL, table.FLASHINFER): lambda: FakePrefill(facts),
    }
    usable = {(name, row.name) for name in resolved.operations for row in resolved.usable(name)}
    kernels = {key: make() for key, make in makers.items() if key in usable}
    return PagedBackend(facts, resolved, kernels)


@dataclass
class Step:
    """A `StepLengths`: decodes of 100 tokens, then chunks of (new, cached) tokens."""

    num_decodes: int
    chunks: list[tuple[int, int]]

    def __post_init__(self) -> None:
        lengths = [1] * self.num_decodes + [new for new, _ in self.chunks]
        contexts = [100] * self.num_decodes + [sum(chunk) for chunk in self.chunks]
        self.cu_query_lens = np.cumsum([0, *lengths]).astype(np.int32)
        self.seq_lens = np.array(contexts, np.int32)
        self.first_blocks = first_blocks(self.seq_lens, BLOCK_SIZE)
        self.num_tokens = sum(lengths)

    def metadata(self, work: np.ndarray | None = None) -> AttentionMetadata:
        num_blocks = int((-(-self.seq_lens // BLOCK_SIZE)).sum())
        return AttentionMetadata(
            num_decodes=self.num_decodes,
            cu_query_lens=self.cu_query_lens,
            seq_lens=self.seq_lens,
            slot_mapping=torch.zeros(self.num_tokens, dtype=torch.int64),
            first_blocks=self.first_blocks,
            block_ids=torch.arange(num_blocks, dtype=torch.int32),
            first_blocks_device=torch.from_numpy(self.first_blocks),
            seq_lens_device=torch.from_numpy(self.seq_lens),
            work=None if work is None else torch.from_numpy(work),
        )


def test_a_cache_in_e4m3_is_not_flashinfers() -> None:
    facts = replace(facts_of(), fp8_cache=True)
    assert "not FP8" in table.flashinfer_obstacle(facts)
    resolved = table_of(facts)
    assert [row.name for row in resolved.usable(table.DECODE)] == ["paged", "plain"]
    assert [row.name for row in resolved.usable(table.PREFILL)] == ["hopper", "plain"]
    backend = backend_of(facts)
    assert all(map(backend.captures, ("decodes", "mixed"))) and not backend.plans_from_blocks(8)


OURS, LIST = "ours", "list"  # of decodes, of chunks
PROMPTS = [(1008, 0)] * 8


@pytest.mark.parametrize(
    ("decodes", "chunks", "captured", "expected"),
    [
        (3, [], False, ("eager", None)),
        (3, [], True, ("3 captured", None)),
        (48, [], False, ("eager", None)),
        (48, [], True, (OURS, None)),
        (0, [(100, 0)], False, (None, "chunks")),
        (0, [(100, 500)], True, (None, LIST)),
        (60, [(100, 0)], False, ("eager", "chunks")),
        (2, [(100, 0)], True, (OURS, LIST)),
        (2, PROMPTS, False, (OURS, LIST)),
        (0, PROMPTS, False, (None, LIST)),
        (2, [(1008, 1000)] * 8, False, ("eager", "chunks")),
        (50, [(1008, 1000)] * 8, False, (OURS, "chunks")),
        (300, [(2, 0)] * 3000, False, (OURS, LIST)),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (64, 8), (28, 4), (8, 8)])
def test_what_a_step_uses_on_hopper(
    heads: int,
    kv_heads: int,
    decodes: int,
    chunks: list[tuple[int, int]],
    captured: bool,
    expected: tuple[str | None, str | None],
) -> None:
    backend = backend_of(facts_of(heads=heads, kv_heads=kv_heads))
    assert all(map(backend.captures, KINDS))
    assert planned(backend, Step(decodes, chunks), captured) == expected


@pytest.mark.parametrize("decodes", [0, 2, 62])
def test_chunks_behind_long_contexts_are_captured_with_fa3(decodes: int) -> None:
    """The graph's decodes are ours, because most of them may be padding."""
    backend, step = backend_of(facts_of(heads=32)), Step(decodes, [(1008, 20_000), (30, 0)])
    assert backend.captures_long(step) and not backend.captures_chunks(step)
    parts = backend.plan(step.metadata(), captured=True)
    found = [_planned_by_library(part) or part.key[1] for part in parts]
    assert found == [*["paged"] * bool(decodes), "captured chunks"]
    too_long = Step(decodes, [(1008, 30_000), (1008, 20_000)])
    assert not backend.captures_long(too_long) and not backend.captures_chunks(too_long)
    for short in (Step(decodes, [(1008, 1000)]), Step(decodes, [(400, 500)])):
        assert backend.captures_chunks(short) and not backend.captures_long(short)
    few = Step(decodes, [(440, 20_000)])  # fewer queries share a copy of the keys
    assert not backend.captures_long(few) and not backend.captures_chunks(few)
    for crowd in (Step(64, [(1008, 20_000)]), Step(0, [(100, 2000)] * 17)):
        assert not backend.captures_long(crowd)
    # Where the copy has no room, a step has the graph that it would have otherwise.
    wide = backend_of(facts_of(heads=8, kv_heads=8))
    far = Step(decodes, [(60, 25_000), (460, 25_001)])
    assert not wide.captures_long(far) and wide.captures_chunks(far)


def test_other_gpus_capture_decodes_alone() -> None:
    backend = backend_of(facts_of(KNOWN_DEVICES["l40s"]))
    assert [kind for kind in KINDS if backend.captures(kind)] == ["decodes"]
    assert planned(backend, Step(50, PROMPTS), captured=False) == (OURS, "chunks")
    assert planned(backend, Step(3, PROMPTS), captured=False) == ("eager", "chunks")
    assert planned(backend, Step(50, []), captured=True) == (OURS, None)


@pytest.mark.parametrize("device", [H200, KNOWN_DEVICES["rtx-pro-6000"]])
def test_without_flashinfer_our_kernels_and_torch_serve(device: DeviceFacts) -> None:
    backend = backend_of(facts_of(device, flashinfer=False))
    chunks = LIST if device.is_hopper else "plain"
    for decodes in (1, 60):
        assert planned(backend, Step(decodes, []), captured=True) == (OURS, None)
        found = planned(backend, Step(decodes, [(100, 5000)]), captured=False)
        assert found == (OURS, chunks)


def test_heads_that_no_library_has_are_served() -> None:
    backend = backend_of(facts_of(dim=96))
    assert planned(backend, Step(2, [(10, 0)]), captured=False) == (OURS, "plain")
    wide = backend_of(facts_of(heads=8, kv_heads=4, dim=256))
    assert planned(wide, Step(2, [(10, 0)]), captured=False) == ("eager", "chunks")
    assert wide.captures("mixed")  # on Hopper


@pytest.mark.parametrize("device", [H200, KNOWN_DEVICES["rtx-pro-6000"]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (24, 4, 256)])
def test_a_library_that_fails_is_as_one_that_is_absent(
    monkeypatch: pytest.MonkeyPatch, device: DeviceFacts, heads: int, kv_heads: int, dim: int
) -> None:
    """flashinfer fails where no kernel was compiled for a head dimension and none may be."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    absent = backend_of(facts_of(device, **sizes, flashinfer=False))
    backend = backend_of(facts_of(device, **sizes))
    assert planned(backend, Step(1, []), captured=True) == ("1 captured", None)
    for fake in (FakeDecode, FakePrefill):
        monkeypatch.setattr(fake, "fails", True)
    with backend.table.warming_up():
        assert planned(backend, Step(1, []), captured=True) == (OURS, None)
        planned(backend, Step(0, [(2, 0)]), captured=False)
    for operation in (table.DECODE, table.PREFILL):
        ours, theirs = backend.table.usable(operation), absent.table.usable(operation)
        assert [(row.name, row.tokens) for row in ours] == [
            (row.name, row.tokens) for row in theirs
        ]
    for kind in KINDS:
        assert backend.captures(kind) == absent.captures(kind)
    assert backend.plans_on_device and not backend.plans_from_blocks(1)
    # A captured step must never run the plain twin, which plans on the host.
    for decodes, chunks in ((1, []), (60, []), (0, [(2, 0)]), (2, [(100, 5000)]), (3, PROMPTS)):
        step = Step(decodes, chunks)
        captures = [False, True] if not chunks or device.is_hopper else [False]
        for captured in captures:
            found = planned(backend, step, captured=captured)
            assert found == planned(absent, step, captured=captured)
        if chunks:
            assert backend.captures_chunks(step) == absent.captures_chunks(step)


def test_a_library_that_another_rank_lacks_is_not_used() -> None:
    backend, absent = backend_of(facts_of()), backend_of(facts_of(flashinfer=False))
    backend.table.keep(absent.table.in_use())
    for step in (Step(1, []), Step(2, [(100, 5000)]), Step(0, PROMPTS)):
        for captured in (False, True):
            found = planned(backend, step, captured=captured)
            assert found == planned(absent, step, captured=captured)
            assert not {"eager", "chunks", "1 captured"} & set(found)


def test_an_override_is_used_for_any_step() -> None:
    backend = backend_of(facts_of(), decode_attention="paged", prefill_attention="flashinfer")
    assert planned(backend, Step(2, [(100, 0)]), captured=False) == (OURS, "chunks")
    assert not backend.captures("mixed")
    with pytest.raises(UnknownOverride, match="flashinfer-python"):
        table_of(facts_of(flashinfer=False), decode_attention="flashinfer")


def test_what_fails_while_kernels_warm_up_is_not_used_again() -> None:
    """On a CPU our kernels fail, and so does flashinfer's fake."""
    facts = facts_of(heads=6, kv_heads=2, dim=64)
    backend = backend_of(facts)
    assert backend.captures("mixed")
    pool, query = torch.randn(40, 2, BLOCK_SIZE, 2, 64), torch.randn(52, 6, 64)
    step = Step(50, [(2, 0)])
    own = torch.randn(52, 4, 64)
    pool = torch.randn(7 * 50 + 1, 2, BLOCK_SIZE, 2, 64)
    metadata = step.metadata(backend.list_work(step, captured=True))
    metadata.plan = backend.plan(metadata, captured=True)
    with backend.table.warming_up():
        found = backend.forward(query, pool, metadata, own)
    assert [entry.name for entry in backend.table.usable("decode_attention")] == ["plain"]
    assert [entry.name for entry in backend.table.usable("prefill_attention")] == ["plain"]
    assert not any(map(backend.captures, KINDS))
    twin = backend_of(facts, decode_attention="plain", prefill_attention="plain")
    again = step.metadata()
    again.plan = twin.plan(again)
    torch.testing.assert_close(found, twin.forward(query, pool, again))
    backend.forward(query, pool, metadata)
    assert backend.table.calls() == {
        ("decode_attention", "plain"): 1, ("prefill_attention", "plain"): 1,
    }  # fmt: skip
    # A failure later on is an error.
    fresh = backend_of(facts)
    metadata = step.metadata(fresh.list_work(step, captured=True))
    metadata.plan = fresh.plan(metadata, captured=True)
    with pytest.raises(Exception, match=r"."):
        fresh.forward(query, pool, metadata, own)
    assert fresh.captures("mixed")


@pytest.mark.parametrize(("decodes", "chunks"), [(3, []), (0, [(7, 30)]), (2, [(5, 0), (1, 16)])])
def test_the_plain_implementation_is_sdpa(decodes: int, chunks: list[tuple[int, int]]) -> None:
    facts = facts_of(heads=6, kv_heads=2, dim=32)
    backend = backend_of(facts, decode_attention="plain", prefill_attention="plain")
    assert not backend.captures("decodes")
    step = Step(decodes, chunks)
    metadata = step.metadata()
    pool = torch.randn(len(metadata.block_ids), 2, BLOCK_SIZE, 2, 32)
    query = torch.randn(step.num_tokens, 6, 32)
    metadata.plan = backend.plan(metadata)
    found = backend.forward(query, pool, metadata)
    sdpa = SdpaBackend(facts)
    twin = replace(metadata)
    twin.plan = sdpa.plan(twin)
    torch.testing.assert_close(found, sdpa.forward(query, pool, twin))


def test_the_table_says_what_each_gpu_uses() -> None:
    def names(device: str, operation: str, **sizes: Any) -> list[str]:
        resolved = table_of(facts_of(KNOWN_DEVICES[device], **sizes))
        return [entry.name for entry in resolved.usable(operation)]

    for heads, kv_heads in ((16, 8), (32, 8), (64, 8), (40, 8)):
        sizes = {"heads": heads, "kv_heads": kv_heads}
        assert names("h200", "prefill_attention", **sizes) == ["hopper", "flashinfer", "plain"]
        for device in KNOWN_DEVICES:
            assert names(device, "decode_attention", **sizes) == ["paged", "flashinfer", "plain"]
            if device not in ("h200", "h100"):
                assert names(device, "prefill_attention", **sizes) == ["flashinfer", "plain"]
    assert "wgmma" in str(table_of(facts_of(KNOWN_DEVICES["b200"])))


def planned(backend: PagedBackend, step: Step, captured: bool) -> tuple[str | None, str | None]:
    metadata = step.metadata(backend.list_work(step, captured=captured))
    parts = {part.key[0]: part for part in backend.plan(metadata, captured=captured)}
    decode, prefill = (parts.get(name) for name in ("decode_attention", "prefill_attention"))
    is_ours = prefill is not None and prefill.key[1] == "hopper"
    assert metadata.wants_keys_values == is_ours
    if is_ours:
        assert metadata.work is not None
        tokens = metadata.work[:, 1] * (metadata.work[:, 7] == 0)
        assert int(tokens.sum()) == sum(new for new, _ in step.chunks)
    names = {"paged": OURS, "hopper": LIST}
    decode, prefill = (
        part and (_planned_by_library(part) or names.get(part.key[1], part.key[1]))
        for part in (decode, prefill)
    )
    return decode, prefill


def _planned_by_library(part: StepPart) -> str | None:
    """Returns what a fake of flashinfer planned. None if the part is not the library's."""
    if isinstance(part, LibraryDecodes):
        return part.wrapper
    return part.planned if isinstance(part, LibraryChunks) else None
