"""Qwen3.5 on a GPU: kernels of the gated delta rule, each with its floor, and model directories for
`benchmarks.engine`.

    python -m benchmarks.kernels.qwen3_5 --kernels
    python -m benchmarks.kernels.qwen3_5 --verify --shapes 27b --batches 1,16,64
    python -m benchmarks.kernels.qwen3_5 --write 27b /tmp/q27
    python -m benchmarks.engine --model /tmp/q27 --load-format dummy --batches 1,64 --prompts 1008

`--kernels` times both kernels for the 4B's and the 27B's heads, by configuration. If `fla` is
importable, its kernels are timed beside them: the recurrence alone, without convolution and gates.
`--verify` times the kernels that verify drafts, by configuration, and beside them the decode's.
"""

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kernels.linear_attention import delta_rule_decode, delta_rule_prefill, delta_rule_verify
from kernels.linear_attention.draft_runs import KeptInputs, StepRuns, run_table
from kernels.linear_attention.states import DeltaInputs, StateCache, StateLayout, prefill_pieces
from kernels.tuning import (
    DeltaDecodeConfig,
    DeltaPrefillConfig,
    delta_decode_config,
    delta_verify_config,
)
from services.common.model_spec import LinearAttentionSpec

BANDWIDTH = 4.8e12  # bytes/s, the H200's data sheet
_SLOTS = 256  # more states than the L2 cache holds
_SHAPES: dict[str, dict[str, object]] = {
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": True,
    },
    "27b": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "linear_num_value_heads": 48, "tie_word_embeddings": False,
    },
}  # fmt: skip
_COMMON = {
    "vocab_size": 248320, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip


def write_model(shape: str, directory: Path, **changes: object) -> Path:
    """A text model's config.json of a shape, for random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen3_5ForCausalLM"]} | _COMMON | _SHAPES[shape] | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def heads_of(shape: str) -> LinearAttentionSpec:
    """The linear attention of a shape."""
    heads = _SHAPES[shape]["linear_num_value_heads"]
    assert isinstance(heads, int)
    return LinearAttentionSpec(
        num_key_heads=16, num_value_heads=heads, key_head_dim=128, value_head_dim=128, conv_width=4
    )


def make_inputs(spec: LinearAttentionSpec, num_tokens: int) -> DeltaInputs:
    """Random ones, strided as the projection leaves them."""
    heads, cuda = spec.num_value_heads, torch.device("cuda")
    width = spec.num_channels + spec.value_size
    projected = torch.randn(num_tokens, width + 2 * heads, device=cuda).bfloat16()
    return DeltaInputs(
        spec, projected[:, : spec.num_channels], projected[:, width : width + heads],
        projected[:, width + heads :],
        torch.randn(spec.num_channels, spec.conv_width, device=cuda).bfloat16(),
        torch.randn(heads, device=cuda), torch.randn(heads, device=cuda).bfloat16(),
    )  # fmt: skip


def layouts_of(spec: LinearAttentionSpec, lengths: list[int], decodes: int) -> list[StateLayout]:
    """Several steps of sequences of these numbers of new tokens, over different slots."""
    cuda, count = torch.device("cuda"), len(lengths)
    cache = StateCache.allocate(spec, 1, _SLOTS, torch.bfloat16, cuda)
    cache.conv.normal_()
    cache.recurrent.normal_()
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    lens = np.array(lengths, np.int32) + 1000
    work = None
    if decodes < count:
        work = torch.from_numpy(prefill_pieces(starts, decodes, int(starts[-1]))).to(cuda)
    starts_device, lens_device = torch.from_numpy(starts).to(cuda), torch.from_numpy(lens).to(cuda)
    slots = [torch.arange(first, first + count, device=cuda) for first in range(0, _SLOTS, count)]
    return [
        StateLayout(cache, decodes, starts, lens, each, starts_device, lens_device, work)
        for each in slots
        if int(each[-1]) < _SLOTS
    ]


def time_s(steps: list[Callable[[], object]], repeats: int = 5) -> float:
    """Seconds of one step of several, as one CUDA graph; the fastest of some runs."""
    for step in steps[:2]:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    taken = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return min(taken[1:]) / len(steps)


def show(title: str, seconds: float, floor_s: float) -> None:
    """One line."""
    figures = f"{seconds * 1e6:9.1f} us, floor {floor_s * 1e6:8.1f}, {seconds / floor_s:.2f} x"
    print(f"{title:<72} {figures}")


def time_decode(shape: str, batch: int) -> None:
    """The decode kernel, by configuration."""
    spec = heads_of(shape)
    inputs = make_inputs(spec, batch)
    out = torch.empty(batch, spec.num_value_heads, 128, device="cuda", dtype=torch.bfloat16)
    layouts = layouts_of(spec, [1] * batch, batch)
    floor = batch * 2 * 4 * spec.value_size * spec.key_head_dim / BANDWIDTH
    configs = [
        DeltaDecodeConfig(columns, warps, limit)
        for columns in (16, 32, 64, 128)
        for warps in (1, 2, 4, 8)
        for limit in (None, 128)
    ]
    for config in configs:
        per_thread = config.columns * 128 // (32 * config.warps)
        if not 8 <= per_thread <= 128:
            continue

        def run(layout: StateLayout, config: DeltaDecodeConfig = config) -> None:
            states = layout.cache.layer(0)
            delta_rule_decode.decode(inputs, states, layout, out, pdl=True, config=config)

        steps = [lambda layout=layout, run=run: run(layout) for layout in layouts]
        show(f"{shape} decode {batch} {config}", time_s(steps), floor)


def verifying(
    spec: LinearAttentionSpec, batch: int, drafts: int, folds: int, num_decodes: int
) -> tuple[list[StateLayout], KeptInputs]:
    """Steps of runs of one token and its drafts, padded to `num_decodes` by runs of one token."""
    cuda, padding = torch.device("cuda"), num_decodes - batch * (1 + drafts)
    sizes, kept_drafts = (1, _SLOTS), max(drafts, 3)
    kept = KeptInputs.allocate(
        spec.num_channels, spec.num_value_heads, (*sizes, kept_drafts), torch.bfloat16, cuda
    )
    kept.qkv.normal_()
    kept.gates.normal_()
    layouts = []
    for layout in layouts_of(spec, [1] * batch, batch):
        slots = layout.slots.cpu().numpy().astype(np.int32).repeat(1 + drafts)
        lens = np.tile(1000 + np.arange(1 + drafts), batch)
        slots = np.concatenate((slots, np.full(padding, _SLOTS - 1))).astype(np.int32)
        lens = np.concatenate((lens, np.ones(padding))).astype(np.int32)
        folded = {first: folds for first in range(0, batch * (1 + drafts), 1 + drafts)}
        table = torch.from_numpy(run_table(slots, lens, folded if folds else {})).to(cuda)
        starts = np.arange(num_decodes + 1, dtype=np.int32)
        layouts.append(
            StateLayout(
                layout.cache, num_decodes, starts, lens,
                torch.from_numpy(slots.astype(np.int64)).to(cuda),
                torch.from_numpy(starts).to(cuda), torch.from_numpy(lens).to(cuda),
                runs=StepRuns(table, slots, lens, folded),
            )
        )  # fmt: skip
    return layouts, kept


def time_verify(shape: str, batch: int) -> None:
    """The kernels that verify drafts, by configuration, for three drafts, of which the step before
    accepted two; then for other steps; then the decode kernel. The floor reads and writes states.
    """
    spec = heads_of(shape)
    floor = batch * 2 * 4 * spec.value_size * spec.key_head_dim / BANDWIDTH

    def timed(
        title: str, drafts: int, folds: int, num_decodes: int, config: DeltaDecodeConfig
    ) -> None:
        layouts, kept = verifying(spec, batch, drafts, folds, num_decodes)
        inputs = make_inputs(spec, num_decodes)
        out = torch.empty(
            num_decodes, spec.num_value_heads, 128, device="cuda", dtype=torch.bfloat16
        )

        def run(layout: StateLayout) -> None:
            states = layout.cache.layer(0)
            delta_rule_verify.verify(
                inputs, states, layout, kept.layer(0), out, pdl=2, config=config
            )

        steps: list[Callable[[], object]] = [partial(run, layout) for layout in layouts]
        name = f"{config.columns} columns, {config.warps} warps"
        show(f"{shape} verify {batch} {title}, {name}", time_s(steps), floor)

    for columns, warps in ((8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 4)):
        config = DeltaDecodeConfig(columns, warps)
        timed("3 drafts, 2 folds", 3, 2, 4 * batch, config)
    config = delta_verify_config(4 * batch)
    timed("3 drafts, 0 folds", 3, 0, 4 * batch, config)
    timed("0 drafts, 3 folds", 0, 3, batch, delta_verify_config(batch))
    timed("0 drafts, 0 folds", 0, 0, batch, delta_verify_config(batch))
    timed("8 drafts, 8 folds", 8, 8, 9 * batch, delta_verify_config(9 * batch))
    layouts, inputs = layouts_of(spec, [1] * batch, batch), make_inputs(spec, batch)
    out = torch.empty(batch, spec.num_value_heads, 128, device="cuda", dtype=torch.bfloat16)

    def decode(layout: StateLayout) -> None:
        delta_rule_decode.decode(inputs, layout.cache.layer(0), layout, out, pdl=2)

    steps: list[Callable[[], object]] = [partial(decode, layout) for layout in layouts]
    show(f"{shape} decode {batch} {delta_decode_config(batch)}", time_s(steps), floor)


def time_prefill(shape: str, lengths: list[int]) -> None:
    """The prefill kernels, by configuration, then the parts of the default one."""
    spec, count = heads_of(shape), sum(lengths)
    inputs = make_inputs(spec, count)
    out = torch.empty(count, spec.num_value_heads, 128, device="cuda", dtype=torch.bfloat16)
    layout = layouts_of(spec, lengths, 0)[0]
    # What any implementation reads and writes: inputs, outputs, states.
    elements = count * (spec.num_channels + spec.value_size)
    states = len(lengths) * 2 * 4 * spec.value_size * spec.key_head_dim
    floor = (2 * elements + states) / BANDWIDTH
    default = DeltaPrefillConfig()
    changes: list[dict[str, int]] = [
        {}, {"solve_warps": 8}, {"channels": 64}, {"channels": 128},
        {"columns": 16}, {"columns": 64}, {"columns": 64, "scan_warps": 8}, {"scan_warps": 8},
        {"columns": 128, "scan_warps": 8}, {"scan_stages": 2}, {"columns": 64, "scan_stages": 2},
    ]  # fmt: skip
    for change in changes:
        config = dataclasses.replace(default, **change)

        def run(config: DeltaPrefillConfig = config) -> None:
            delta_rule_prefill.prefill(inputs, layout.cache.layer(0), layout, out, config=config)

        title = f"{shape} prefill {len(lengths)} x {lengths[0]} {change}"
        try:
            show(title, time_s([run] * 4), floor)
        except Exception as error:
            print(f"{title}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule_prefill.prefill(inputs, layout.cache.layer(0), layout, out)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        print(f"    {event.key[:60]:<60} {event.self_device_time_total:9.1f} us")


def time_fla(shape: str, lengths: list[int], *, decode: bool) -> None:
    """Fla's recurrence for the same heads, without convolution and gates."""
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    spec, count, cuda = heads_of(shape), sum(lengths), torch.device("cuda")
    batch, tokens = (count, 1) if decode else (1, count)
    heads = spec.num_value_heads
    q, k, v = (torch.randn(batch, tokens, heads, 128, device=cuda).bfloat16() for _ in range(3))
    g = -torch.rand(batch, tokens, heads, device=cuda)
    beta = torch.rand(batch, tokens, heads, device=cuda).bfloat16()
    state = torch.randn(len(lengths), heads, 128, 128, device=cuda)
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], device=cuda, dtype=torch.int32)
    function = fused_recurrent_gated_delta_rule if decode else chunk_gated_delta_rule
    extra = {} if decode else {"cu_seqlens": starts}

    def run() -> None:
        function(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, **extra,
        )  # fmt: skip

    title = f"{shape} fla {'decode' if decode else 'prefill'} {len(lengths)} x {lengths[0]}"
    show(title, time_s([run] * 4), 1e-6)


def main() -> None:
    """Prints the table, or writes a directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--shapes", default="4b,27b")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--write", nargs=2, metavar=("SHAPE", "DIRECTORY"))
    arguments = parser.parse_args()
    if arguments.write:
        print(write_model(arguments.write[0], Path(arguments.write[1])))
    if arguments.verify:
        for shape in arguments.shapes.split(","):
            for batch in map(int, arguments.batches.split(",")):
                time_verify(shape, batch)
    if not arguments.kernels:
        return
    prefills = ([1008], [1008] * 8)
    for shape in arguments.shapes.split(","):
        for batch in map(int, arguments.batches.split(",")):
            time_decode(shape, batch)
        for lengths in prefills:
            time_prefill(shape, lengths)
        if importlib.util.find_spec("fla"):
            for batch in (1, 64):
                time_fla(shape, [1] * batch, decode=True)
            for lengths in prefills:
                time_fla(shape, lengths, decode=False)


if __name__ == "__main__":
    main()
