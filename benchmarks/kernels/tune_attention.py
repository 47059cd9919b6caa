"""Times the decoder's attention kernels on a GPU by model shape, and prints the winners.

    python -m benchmarks.kernels.tune_attention [--shapes 2b,8b,32b] [--quick]

Decode: fused, paged and flashinfer's kernels by number of sequences; prefill: our kernel and
flashinfer's for 1,008 tokens. Each candidate's output is compared with torch in float32; then a
CUDA graph of layers, whose KV caches together exceed L2, is replayed. Fused decode attention
includes q/k norm, rotation and the cache write: next to it stand the others with `qk_rope_cache`,
all behind a GEMV, as in a step. Times are µs per layer. The rows at the end belong into
`kernels/attention/attention_tuning.py`. Worker processes compile ahead into Triton's cache.
"""

import argparse
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.text_shapes import TEXT_SHAPES
from kernels.attention.attention_tuning import (
    FUSED_MAX_SEQUENCES,
    AttentionFacts,
    FusedDecodeConfig,
    PagedDecodeConfig,
    fused_decode_config,
    paged_decode_config,
    prefill_obstacle,
)
from kernels.attention.fused_decode_attention import FusedDecodeAttention
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from kernels.attention.qk_rope_cache import qk_rope_cache
from kernels.device import DeviceFacts
from kernels.gemm import gemv
from services.decoder.attention.base import AttentionMetadata
from services.decoder.operations.table import KernelFacts, attention_facts

SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
CONTEXT, LONG_CONTEXT, PROMPT, BLOCK_SIZE = 1024, 4096, 1008, 16
_EPS = 1e-6
_TOLERANCE = 1e-2  # relative L2 in bfloat16, see tests/gpu/twins: two roundings and a sum's order
_COLD_BYTES = 256 << 20  # of KV caches in a graph: several times the L2 of an H200
_TIMED_S = 0.02  # of replays per candidate, at least
_CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """A candidate for a step of decodes, whose context includes the new token.

    Attributes:
        kind: `fused`, `paged` or `flashinfer`.
        config: of our kernels; None: the tuned one. Of flashinfer: whether by tensor cores.
        with_rope: behind a GEMV, with q/k norm, rotation and the cache write.
    """

    shape: str
    kind: str
    num_sequences: int
    context: int
    config: FusedDecodeConfig | PagedDecodeConfig | bool | None = None
    with_rope: bool = False


@dataclass(frozen=True)
class Timed:
    """Median time in µs per layer; None: it failed, and why."""

    case: Case
    time_us: float | None
    why: str = ""


def facts_of(shape: str) -> AttentionFacts:
    """On the GPU of this machine."""
    facts = KernelFacts(DeviceFacts.of(_CUDA), TEXT_SHAPES[shape], torch.bfloat16)
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    return attention_facts(facts, block_size=BLOCK_SIZE, has_flashinfer=has_flashinfer)


def fused_candidates(facts: AttentionFacts, num_sequences: int) -> list[FusedDecodeConfig]:
    """The tuned configuration first."""
    group = facts.group_size
    found = [fused_decode_config(facts, num_sequences)]
    for splits in (8, 16, 32) if num_sequences > 1 else (16, 32, 64):
        found.append(FusedDecodeConfig(min(group, 4), splits, 64))
        if group > 2:
            found.append(FusedDecodeConfig(2, splits, 64))
            found.append(FusedDecodeConfig(group, splits, 64, tensor_cores=True))
            found.append(FusedDecodeConfig(group, splits, 32, tensor_cores=True))
    found.append(replace(found[0], num_warps=8))
    return list(dict.fromkeys(found))


def paged_candidates(facts: AttentionFacts) -> list[PagedDecodeConfig]:
    """The tuned configuration first."""
    tuned = paged_decode_config(facts)
    found = [tuned]
    found += [
        replace(tuned, kv_heads=kv_heads, alone=alone)
        for kv_heads in sorted({tuned.kv_heads, max(tuned.kv_heads // 2, 1), 1}, reverse=True)
        for alone in ((1, 5), (2, 3), (3, 2))
    ]
    found.append(replace(tuned, tile_rows=128, num_warps=8, alone=(1, 3)))
    found.append(replace(tuned, tile_rows=32, alone=(2, 5)))
    return list(dict.fromkeys(found))


class Step:
    """Inputs of one step's layers: each has a KV cache and a query of its own."""

    def __init__(self, case: Case) -> None:
        self.facts = facts = facts_of(case.shape)
        self.pdl = KernelFacts(facts.device, TEXT_SHAPES[case.shape], torch.bfloat16).pdl
        hidden = TEXT_SHAPES[case.shape].hidden_size
        heads, kv_heads, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
        count, context = case.num_sequences, case.context
        blocks = -(-context // BLOCK_SIZE) * count
        layer_bytes = blocks * 2 * BLOCK_SIZE * kv_heads * dim * 2
        self.num_layers = min(max(-(-_COLD_BYTES // layer_bytes), 2), 28)
        torch.manual_seed(0)
        shape = (self.num_layers, blocks + 1, 2, BLOCK_SIZE, kv_heads, dim)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=_CUDA).normal_()
        self.pool[:, -1] = torch.nan  # belongs to no sequence
        self.block_ids = torch.randperm(blocks, device=_CUDA).int()
        self.seq_lens_cpu = np.full(count, context, np.int32)
        self.seq_lens = torch.from_numpy(self.seq_lens_cpu).to(_CUDA)
        self.first_blocks_cpu = np.arange(count, dtype=np.int32) * (blocks // count)
        self.first_blocks = torch.from_numpy(self.first_blocks_cpu).to(_CUDA)
        self.query = self._random(count, heads, dim)
        self.out = torch.empty_like(self.query)
        if case.with_rope:
            size = (heads + 2 * kv_heads) * dim
            self.x = self._random(count, hidden)
            self.weights = [self._random(size, hidden) * hidden**-0.5 for _ in range(4)]
            self.norms = (self._random(dim), self._random(dim))
            angles = torch.rand(count, dim // 2, device=_CUDA) * 6.28
            self.rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
            last = self.block_ids.view(count, -1)[:, -1].long() * BLOCK_SIZE
            self.rows = kv_rows(last + (context - 1) % BLOCK_SIZE, BLOCK_SIZE)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=_CUDA).bfloat16()

    def projected(self, layer: int) -> ProjectedHeads:
        """The layer's GEMV, ready for q/k norm and rotation."""
        qkv = gemv.linear(self.x, self.weights[layer % len(self.weights)], pdl=self.pdl)
        pool = self.pool[layer]
        return ProjectedHeads(qkv, self.norms, _EPS, self.rope, pool, self.rows)

    def rotated(self, layer: int) -> Tensor:
        """The layer's queries, after the write to the cache."""
        return qk_rope_cache(self.projected(layer), pdl=self.pdl)

    def expected(self, query: Tensor) -> Tensor:
        """Attention of layer 0 in float32, whose cache has the new tokens."""
        count = len(query)
        table = self.block_ids.view(count, -1).long()
        found: list[Tensor] = []
        for ids, one in zip(table, query, strict=True):
            keys, values = (
                self.pool[0][ids, part].flatten(0, 1)[: int(self.seq_lens_cpu[0])].float()
                for part in (0, 1)
            )
            found.append(
                F.scaled_dot_product_attention(
                    one[:, None].float(), keys.transpose(0, 1), values.transpose(0, 1),
                    enable_gqa=True,
                )[:, 0]
            )  # fmt: skip
        return torch.stack(found)

    def metadata(self) -> AttentionMetadata:
        """For flashinfer's plan."""
        count = len(self.seq_lens)
        return AttentionMetadata(
            num_decodes=count,
            cu_query_lens=np.arange(count + 1, dtype=np.int32),
            seq_lens=self.seq_lens_cpu,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            first_blocks=self.first_blocks_cpu,
            block_ids=self.block_ids,
            first_blocks_device=self.first_blocks,
            seq_lens_device=self.seq_lens,
        )


def layer_of(step: Step, case: Case) -> Callable[[int], Tensor]:
    """What computes a layer by the candidate: `[S, num_heads, head_dim]`."""
    facts, config = step.facts, case.config
    if case.kind == "fused":
        assert config is None or isinstance(config, FusedDecodeConfig)
        fused = (
            FusedDecodeAttention(facts, _CUDA)
            if config is None
            else FusedDecodeAttention(facts, _CUDA, lambda *_: config)
        )

        def run_fused(layer: int) -> Tensor:
            tables = step.projected(layer), step.block_ids, step.first_blocks, step.seq_lens
            return fused(*tables).view_as(step.query)

        return run_fused
    if case.kind == "paged":
        assert config is None or isinstance(config, PagedDecodeConfig)
        paged = PagedDecodeAttention(facts, _CUDA, config)

        def attend(query: Tensor, layer: int) -> None:
            tables = step.block_ids, step.first_blocks, step.seq_lens
            paged(query, step.pool[layer], *tables, out=step.out)

    else:
        wrapper = _flashinfer_decode(step, bool(config))

        def attend(query: Tensor, layer: int) -> None:
            wrapper.run(query, step.pool[layer], out=step.out)

    def run(layer: int) -> Tensor:
        attend(step.rotated(layer) if case.with_rope else step.query, layer)
        return step.out

    return run


def _flashinfer_decode(step: Step, tensor_cores: bool) -> Any:  # noqa: ANN401 - flashinfer's
    from services.decoder.attention.flashinfer import FlashInferDecode, make_float_workspace

    metadata = step.metadata()
    facts = replace(
        step.facts,
        max_num_sequences=metadata.num_decodes,
        max_num_blocks=-(-int(metadata.seq_lens.max()) // BLOCK_SIZE),
    )
    scratch = make_float_workspace(_CUDA)
    decode = FlashInferDecode(facts, _CUDA, scratch, tensor_cores=tensor_cores)
    return decode.plan(metadata, captured=True)


def replayed(run: Callable[[int], object], num_layers: int) -> float:
    """Median time of a graph's replays in µs per layer."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(num_layers):
                run(layer)
    torch.cuda.synchronize()
    times: list[float] = []
    graph.replay()
    while sum(times) < _TIMED_S * 1e3 or len(times) < 5:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / num_layers


def timed(step: Step, case: Case) -> Timed:
    """Compares a candidate with torch, then times it."""
    try:
        run = layer_of(step, case)
        found = run(0).clone()
        query = step.rotated(0) if case.with_rope else step.query
        expected = step.expected(query)
        error = float((found.float() - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:
            return Timed(case, None, f"differs from torch by {error:.1e}")
        return Timed(case, replayed(run, step.num_layers))
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        return Timed(case, None, f"{type(error).__name__}: {why[:100]}")


def decode_cases(shapes: list[str], quick: bool) -> Iterator[Case]:
    """All candidates. Configurations of the paged kernel are tried for a few numbers of sequences,
    the tuned one for all.
    """
    for shape in shapes:
        facts = facts_of(shape)
        for context in (CONTEXT, LONG_CONTEXT):
            for count in range(1, FUSED_MAX_SEQUENCES + 1):
                configs = fused_candidates(facts, count)
                for config in configs[:1] if quick else configs:
                    yield Case(shape, "fused", count, context, config, with_rope=True)
                yield Case(shape, "paged", count, context, with_rope=True)
                for tensor_cores in (False, True):
                    yield Case(shape, "flashinfer", count, context, tensor_cores, with_rope=True)
        for count in SEQUENCES:
            tried = paged_candidates(facts)
            few = quick or count not in (16, 64, 256)
            for config in tried[:1] if few else tried:
                yield Case(shape, "paged", count, CONTEXT, config)
            for tensor_cores in (False, True):
                yield Case(shape, "flashinfer", count, CONTEXT, tensor_cores)


def compile_ahead(case: Case) -> None:
    """Runs a candidate of our own once, so that Triton's cache has its kernels."""
    try:
        step = Step(replace(case, context=32))
        layer_of(step, case)(0)
        torch.cuda.synchronize()
    except Exception as error:  # the timed run reports it
        print(f"  ahead: {case.kind} {case.config}: {type(error).__name__}", flush=True)


def prefill_times(shape: str) -> dict[str, float | str]:
    """µs per layer of one prompt of `PROMPT` tokens without a cached prefix."""
    facts = facts_of(shape)
    heads, kv_heads, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    blocks, layers = -(-PROMPT // BLOCK_SIZE), 8
    pool = torch.zeros(layers, blocks, 2, BLOCK_SIZE, kv_heads, dim, device=_CUDA).bfloat16()
    block_ids = torch.arange(blocks, dtype=torch.int32, device=_CUDA)
    query = torch.randn(PROMPT, heads, dim, device=_CUDA).bfloat16()
    own = torch.randn(PROMPT, 2 * kv_heads, dim, device=_CUDA).bfloat16()
    parts = own.unflatten(1, (2, kv_heads))
    token = torch.arange(PROMPT, device=_CUDA)
    pool[:, token // BLOCK_SIZE, :, token % BLOCK_SIZE] = parts[:, None]
    keys, values = parts.float().permute(1, 2, 0, 3)
    expected = F.scaled_dot_product_attention(
        query.float().transpose(0, 1), keys, values, is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    out = torch.empty_like(query)

    def measured(run: Callable[[int], object]) -> float | str:
        try:
            out.fill_(torch.nan)
            run(0)
            error = float((out.float() - expected).norm() / expected.norm())
            return replayed(run, layers) if error <= _TOLERANCE else f"differs by {error:.1e}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:80]}"

    times: dict[str, float | str] = {}
    if why := prefill_obstacle(facts):
        times["ours"] = why
    else:
        kernel = PrefillAttention(facts, _CUDA)
        listed = kernel.list_work([PrefillChunk(0, PROMPT, 0, 0)], kernel.count_work(PROMPT, 1))
        work = torch.from_numpy(listed).to(_CUDA)
        times["ours"] = measured(
            lambda layer: kernel(query, own, pool[layer], block_ids, work, out=out)
        )
    if facts.has_flashinfer:
        from services.decoder.attention.flashinfer import FlashInferPrefill, make_float_workspace

        prefill = FlashInferPrefill(facts, _CUDA, make_float_workspace(_CUDA))
        lengths = np.array([PROMPT], np.int32)
        metadata = AttentionMetadata(
            num_decodes=0,
            cu_query_lens=np.array([0, PROMPT], np.int32),
            seq_lens=lengths,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            first_blocks=np.zeros(1, np.int32),
            block_ids=block_ids,
            first_blocks_device=torch.zeros(1, dtype=torch.int32, device=_CUDA),
            seq_lens_device=torch.from_numpy(lengths).to(_CUDA),
        )
        wrapper: Any = prefill.plan(metadata)
        name = "flashinfer fa3" if facts.device.is_hopper else "flashinfer fa2"
        times[name] = measured(lambda layer: wrapper.run(query, pool[layer], out=out))
    return times


def print_shape(shape: str, found: list[Timed]) -> None:
    """The table of a shape, and the rows to enter."""
    facts = facts_of(shape)
    heads = f"{facts.num_heads}/{facts.num_kv_heads} heads of {facts.head_dim}"
    print(f"\n{shape}: {heads}, µs per layer")
    wide = f"{'sequences x context':<24}{'tuned':>9}{'best':>9}{'fi cuda':>9}{'fi mma':>9}  best"
    print(wide)
    best: dict[tuple[str, int, int, bool], Timed] = {}
    kinds = sorted({(t.case.with_rope, t.case.context, t.case.num_sequences) for t in found})
    for with_rope, context, count in kinds:
        rows = [
            t for t in found
            if (t.case.with_rope, t.case.context, t.case.num_sequences)
            == (with_rope, context, count)
        ]  # fmt: skip
        library = {t.case.config: t for t in rows if t.case.kind == "flashinfer"}
        for kind in ("fused", "paged"):
            ours = [t for t in rows if t.case.kind == kind]
            if not ours:
                continue
            right = [t for t in ours if t.time_us is not None]
            winner = min(right, key=lambda t: t.time_us or 0.0, default=ours[0])
            best[kind, count, context, with_rope] = winner
            label = (
                f"{kind}{' + rope' if with_rope and kind == 'paged' else ''} {count} x {context}"
            )
            cells = [ours[0], winner, library.get(False), library.get(True)]
            times = "".join(f"{_cell(one):>9}" for one in cells)
            print(f"{label:<24}{times}  {winner.case.config}")
    for one in found:
        if one.time_us is None:
            print(f"  failed: {one.case}: {one.why}")
    _print_rows(facts, found, best)


def _cell(one: Timed | None) -> str:
    return "-" if one is None or one.time_us is None else f"{one.time_us:.1f}"


def _print_rows(
    facts: AttentionFacts, found: list[Timed], best: dict[tuple[str, int, int, bool], Timed]
) -> None:
    """The class's row; what was not timed is left as it is."""

    def library(count: int, context: int, with_rope: bool) -> float:
        times = [
            t.time_us for t in found
            if t.case.kind == "flashinfer" and t.time_us is not None
            and (t.case.num_sequences, t.case.context, t.case.with_rope)
            == (count, context, with_rope)
        ]  # fmt: skip
        return min(times, default=float("inf"))

    def cuda_cores_win() -> bool:
        wins = 0
        for count in SEQUENCES:
            of = {
                t.case.config: t.time_us or float("inf") for t in found
                if t.case.kind == "flashinfer" and t.case.num_sequences == count
                and not t.case.with_rope
            }  # fmt: skip
            wins += of.get(False, float("inf")) <= of.get(True, float("inf"))
        return wins > len(SEQUENCES) // 2

    at_least = next(
        (
            count for index, count in enumerate(SEQUENCES)
            if all(
                (best["paged", later, CONTEXT, False].time_us or float("inf"))
                <= library(later, CONTEXT, False)
                for later in SEQUENCES[index:]
            )
        ),
        None,
    )  # fmt: skip
    fused = [best["fused", n, CONTEXT, True] for n in range(1, FUSED_MAX_SEQUENCES + 1)]
    longest = [
        max(
            (
                context for context in (CONTEXT, LONG_CONTEXT)
                if (best["fused", n, context, True].time_us or float("inf"))
                <= library(n, context, True)
            ),
            default=0,
        )
        for n in range(1, FUSED_MAX_SEQUENCES + 1)
    ]  # fmt: skip
    configs = ", ".join(str(one.case.config) for one in fused)
    print(f"  ({facts.group_size}, {facts.head_dim}, {facts.num_kv_heads}): SizeClass(")
    print(f"      fused=({configs}),")
    print(f"      fused_max_context={tuple(longest)},  # of {CONTEXT} and {LONG_CONTEXT} timed")
    print(f"      paged={best['paged', 64, CONTEXT, False].case.config},  # of 64 sequences")
    print(f"      paged_min_sequences={at_least},  # None: flashinfer wins for 256")
    print(f"      flashinfer_tensor_cores={not cuda_cores_win()},\n  ),")


def main() -> None:
    """Parses the command line, compiles ahead, times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="2b,8b,32b", help="of " + ", ".join(TEXT_SHAPES))
    parser.add_argument("--quick", action="store_true", help="tuned configurations only")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile ahead")
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    started = time.monotonic()
    print(torch.cuda.get_device_name(), torch.__version__)
    cases = list(decode_cases(shapes, arguments.quick))
    ours = [case for case in cases if case.kind != "flashinfer"]
    # A kernel is compiled per configuration, not per context, nor per number of sequences but for
    # its power of two above 128.
    distinct = {
        (case.shape, case.kind, case.config, min(case.num_sequences, 2) if case.kind == "fused"
         else max(case.num_sequences, 128), case.with_rope): case
        for case in ours
    }  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    if arguments.workers:
        with ProcessPoolExecutor(arguments.workers, mp_context=spawn) as pool:
            list(pool.map(compile_ahead, distinct.values()))
    print(f"compiled {len(distinct)} after {time.monotonic() - started:.0f} s", flush=True)
    found: dict[str, list[Timed]] = {shape: [] for shape in shapes}
    step, key = None, None
    for case in cases:
        wanted = case.shape, case.num_sequences, case.context, case.with_rope
        if step is None or wanted != key:
            step = None
            torch.cuda.empty_cache()
            step, key = Step(case), wanted
        found[case.shape].append(timed(step, case))
    step = None
    for shape in shapes:
        print_shape(shape, found[shape])
        prefill = ", ".join(
            f"{name} {time_us if isinstance(time_us, str) else f'{time_us:.1f}'}"
            for name, time_us in prefill_times(shape).items()
        )
        print(f"  prefill of {PROMPT} tokens: {prefill}", flush=True)
    print(f"done after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
