"""Creates a model runner from options: loads the model, sizes the KV pool, and warms up.

The engine process calls `create_runner` once. A model, device or option that cannot be served is
refused here, before the first request.
"""

import importlib.util
import logging
import mmap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs
from torch import nn

from kernels.attention.attention_tuning import AttentionFacts, wave_tokens
from kernels.attention.fp8_pages import E4M3
from kernels.device import DeviceFacts
from kernels.linear_attention.draft_runs import KeptInputs
from kernels.linear_attention.states import PIECE, StateCache
from kernels.rows import DeviceRows
from services.common.adapter_config import AdapterConfig
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, TextSpec, longest_context
from services.common.nn.adapter import Adapter
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.device import resolve_device, resolve_dtype
from services.common.nn.dispatch import parse_overrides
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.formats import rows_of_layers
from services.common.nn.layer_formats import set_methods
from services.common.nn.linear import set_kernels
from services.common.nn.merged_checkpoint import open_checkpoint
from services.common.nn.weights import load_weights
from services.common.process.progress import log_progress
from services.common.quantization import quantized_at_load
from services.decoder.attention import create_backend
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run import kv_cache
from services.decoder.engine.run.draft_graphs import capture_drafts
from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.run.drafting_runner import DraftingRunner
from services.decoder.engine.run.graph_sizes import (
    crowded_buckets,
    decode_buckets,
    long_buckets,
    mixed_buckets,
    prompt_buckets,
)
from services.decoder.engine.run.graphs import (
    CrowdedGraphs,
    DecodeGraphs,
    DeviceState,
    GraphMemory,
    Graphs,
    LongGraphs,
    MixedGraphs,
    PromptGraphs,
)
from services.decoder.engine.run.host_cache import buffer_bytes
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.kv_cache import DeviceMemory, KVCacheShape
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.pooling_runner import PoolingRunner
from services.decoder.engine.run.step_computer import StepComputer
from services.decoder.models.adapters import Adapters
from services.decoder.models.base import DRAFT_HEAD
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.draft_head_files import (
    add_draft_head,
    quantize_layer,
    read_elsewhere,
    round_output,
    with_draft_head,
)
from services.decoder.models.kv_scales import finish_scales, ignore_query_scales, read_scales
from services.decoder.models.pooling import Pooler, PoolingTransformer, pooling_text
from services.decoder.models.rank_spec import rank_spec
from services.decoder.models.stored import as_stored
from services.decoder.models.transformer import Transformer
from services.decoder.operations.kernel_facts import KernelFacts, attention_facts
from services.decoder.operations.ops import Ops, PlainOps, create_ops

logger = logging.getLogger(__name__)

_CPU_KV_CACHE_BYTES = 512 << 20
_CONTEXT = 8192  # cached tokens behind which steps warm up
_ADAPTER_RANK = 16  # largest rank of adapters that are loaded later, if nothing says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """The model, the device and the limits of a runner.

    Attributes:
        model_directory: directory of a checkpoint in Hugging Face layout. With load_format "dummy"
            only its JSON files are read.
        task: task of the checkpoint, see `DecoderSettings.task`.
        device: "cpu", "cuda" or "cuda:N"; "auto" is cuda if there is a GPU.
        dtype: "float32", "bfloat16" or "float16"; "auto" is bfloat16 on a GPU, float32 on a CPU.
        merge_adapter: directory of an adapter that is folded into the weights. None if there is no
            such adapter.
        adapters: directories of adapters, which get the slots 0, 1, … in their order.
        max_adapters: number of slots for adapters.
        max_adapter_rank: largest rank of an adapter. None for that of `adapters`, at least 16.
        load_format: "auto" for safetensors files, or "dummy" for random weights.
        quantization: format into which weights are quantized while they are read, see
            `quantized_at_load`. Empty if they are not.
        fp8_cache: True if keys and values are cached in e4m3. They also are if the checkpoint asks
            for it.
        block_size: tokens per KV block.
        max_num_sequences: the most sequences that run at once.
        max_batched_tokens: the most tokens of a step.
        max_model_len: the most prompt and completion tokens of one sequence. None for the model's
            own limit, or for what the KV pool holds if that is less.
        memory_fraction: share of the whole card that this process may use, on a GPU.
        kv_cache_bytes: size of the KV pool. None for what the fraction leaves on a GPU, or 512 MiB
            on a CPU.
        kv_host_bytes: bytes of the host's memory for copies of KV blocks and recurrent states, for
            each rank.
        checkpoint_bytes: bytes for checkpoints of recurrent states. None for an eighth of the
            memory that is left for checkpoints and KV pool, or for an eighth of `kv_cache_bytes`
            in addition to these.
        cuda_graphs: True if steps are captured as CUDA graphs, on a GPU.
        kernels: overrides of the dispatch table: `op=implementation,...`, or `plain`.
        max_drafts: the most drafts of a sequence in a step. 0 if there is no speculation.
        draft_head: True if the model's layer for multi-token prediction drafts tokens.
        draft_head_directory: directory of the model whose layer is read. None if it is the model's
            own.
    """

    model_directory: Path
    task: str = "auto"
    merge_adapter: Path | None = None
    adapters: tuple[Path, ...] = ()
    max_adapters: int = 0
    max_adapter_rank: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = ""
    fp8_cache: bool = False
    block_size: int = 16
    max_num_sequences: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int | None = None
    memory_fraction: float = 0.9
    kv_cache_bytes: int | None = None
    kv_host_bytes: int = 0
    checkpoint_bytes: int | None = None
    cuda_graphs: bool = True
    kernels: str = ""
    max_drafts: int = 0
    draft_head: bool = False
    draft_head_directory: Path | None = None


def create_runner(
    options: RunnerOptions, arena: mmap.mmap | None = None, ranks: Ranks = ALONE
) -> ModelRunner:
    """Loads the model, sizes the KV pool and warms up each kernel, in seconds to minutes.

    Args:
        options: the model and the limits of the runner.
        arena: the front's shared memory with image embeddings. None if no sequence has images.
        ranks: the ranks that share the model. All of them call this function together, with the
            same options but for the device.

    Raises:
        ModelSpecError, CheckpointError: the directory is not a model that can be served.
        UnsupportedOption: the model needs a feature that is not implemented.
        ValueError: an option does not fit the machine or the model; the message says which.
    """
    started = time.monotonic()
    spec = quantized_at_load(read_spec(options.model_directory, options.task), options.quantization)
    limit = longest_context(spec.text, options.max_model_len)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = ranks.with_peers(options.max_batched_tokens, spec.text.hidden_size, dtype, device)
    text = rank_spec(spec.text, ranks)
    fp8_cache = options.fp8_cache or _has_fp8_scales(spec)
    if options.draft_head:
        spec = with_draft_head(spec, elsewhere=options.draft_head_directory)
    of_model = KernelFacts(DeviceFacts.of(device), text, dtype)
    if spec.checkpoint.quantization is not None:  # layers have formats of their own
        of_model = replace(of_model, weight_format="quantized")
    facts = _attention_facts(of_model, options, limit, fp8_cache=fp8_cache)
    backend = create_backend(facts, device, parse_overrides(options.kernels))
    model = _load(spec, backend, options, device, dtype, ranks)
    shape = _shape(text, options, E4M3 if fp8_cache else dtype)
    images = _image_reader(spec, options, arena, device, dtype)
    states = _states(text, options.max_num_sequences + 1, dtype, device)  # with a scratch state
    kept = _kept_inputs(text, options, dtype, device)

    def make(info: EngineInfo) -> ModelRunner:
        pool = kv_cache.allocate(shape, info.num_blocks, device)
        max_blocks = -(-info.max_model_len // info.block_size)
        rows = DeviceRows.allocate(options.max_num_sequences, max_blocks, device)
        checkpoints = _states(text, info.num_checkpoints, dtype, device)
        state = DeviceState(pool, states, checkpoints, rows, kept)
        drafter = None
        if isinstance(head := getattr(model, DRAFT_HEAD, None), DraftHead):
            drafter = Drafter(info, model, head, backend, rows.blocks, pool)
        computer = StepComputer(info, model, backend, state, images, ranks, drafter)
        if drafter is not None:
            return DraftingRunner(computer, drafter)
        return ModelRunner(computer) if pooler is None else PoolingRunner(computer, pooler)

    info = _info(spec, options, dtype)
    with model.ops.warming_up():
        pooler = _pooler(spec, model)
        if fp8_cache:
            finish_scales(model, text, device, dtype, options.max_batched_tokens)
        budget = _fixed_budget(options, device)
        if budget is None:
            peak = _run_largest_step(make(info))
            budget = _device_budget(options, device, peak, _state_bytes(text, dtype))
        budget = min(ranks.exchange(budget))
        num_checkpoints, budget = _count_checkpoints(text, options, dtype, budget)
        longest = options.max_model_len or options.block_size
        num_blocks = kv_cache.count_blocks(shape, budget, longest)
        max_model_len = min(limit, num_blocks * options.block_size)
        runner = make(
            structs.replace(
                info,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                num_checkpoints=num_checkpoints,
                **_host_slots(text, options, shape, dtype, num_checkpoints),
                num_weight_tokens=_weight_bytes(model) * shape.block_size // shape.block_bytes,
                wave_tokens=wave_tokens(facts),
            )
        )
        with_graphs = options.cuda_graphs and info.on_gpu
        _warm_up(runner, model, backend, ranks, with_graphs=with_graphs)
    _log_ready(runner.info, device, backend, model, shape, time.monotonic() - started)
    return runner


def _load(
    spec: ModelSpec,
    backend: AttentionBackend,
    options: RunnerOptions,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
) -> Transformer:
    checkpoint = None
    if options.load_format == "auto":
        checkpoint = open_checkpoint(spec, options.merge_adapter, dtype)
        spec = as_stored(spec, checkpoint)
        if options.draft_head and options.draft_head_directory is not None:
            read_elsewhere(checkpoint, options.draft_head_directory)
    elif options.load_format != "dummy":
        raise ValueError(f"load_format {options.load_format!r} is not known; use auto or dummy")
    elif options.merge_adapter is not None:
        raise ValueError("an adapter cannot be folded into random weights (load_format dummy)")
    kind, built = (Transformer, spec)
    if spec.search is not None:
        kind, built = PoolingTransformer, pooling_text(spec)
    with torch.device("meta"):
        model = kind(built, backend, PlainOps(), ranks=ranks)
        if options.draft_head:
            add_draft_head(model, spec, backend, checkpoint, ranks)
    # Drafts are verified, so that the layer that makes them may be rounded where this saves time.
    is_rounded = options.draft_head and device.type == "cuda" and dtype.itemsize == 2
    if checkpoint is None:
        if is_rounded:
            quantize_layer(model, None)
        load_dummy(
            model,
            device=device,
            dtype=dtype,
            weight_map=model.weight_map,
            quantization=spec.checkpoint.quantization,
        )
    else:
        if _has_fp8_scales(spec):
            read_scales(model, spec, checkpoint)
        ignore_query_scales(model, spec, checkpoint)
        set_methods(model, checkpoint, model.weight_map, spec.checkpoint.quantization)
        if is_rounded:
            quantize_layer(model, checkpoint)
        load_weights(
            model, checkpoint, model.weight_map, device=device, dtype=dtype, spec=spec.checkpoint
        )
    if is_rounded:
        round_output(model)
    # The formats of the weights decide which kernels can read them, and are known now.
    formats = rows_of_layers(model.layers)
    if isinstance(head := getattr(model, DRAFT_HEAD, None), DraftHead):
        formats = {**formats, **rows_of_layers(head)}
    log_progress("kernels")
    model.ops = create_ops(
        device,
        rank_spec(spec.text, ranks),
        dtype,
        formats=formats,
        overrides=options.kernels,
        attention=backend.table,
        num_ranks=ranks.count,
    )
    set_kernels(model, model.ops.table)
    if options.max_adapters:
        _load_adapters(model, options, ranks, takes_images=spec.vision is not None)
        log_progress("kernels")
    return model.eval()


def _load_adapters(
    model: Transformer, options: RunnerOptions, ranks: Ranks, *, takes_images: bool
) -> None:
    """Makes the slots of adapters, and loads the adapters that the options name."""
    found = [Adapter.read(AdapterConfig.read(directory)) for directory in options.adapters]
    rank = options.max_adapter_rank or max(
        [_ADAPTER_RANK, *(adapter.config.max_rank for adapter in found)]
    )
    model.adapters = Adapters(
        model, model.embed_tokens, model.lm_head, ranks, options.max_adapters, rank, takes_images
    )
    if len(found) < options.max_adapters:
        model.adapters.reserve()
    for slot, adapter in enumerate(found):
        log_progress("adapters", slot, len(found))
        model.adapters.load_together(slot, adapter)
    log_progress("adapters", len(found), len(found))


@torch.inference_mode()
def _pooler(spec: ModelSpec, model: Transformer) -> Pooler | None:
    """Makes the pooler of a model for search. Returns None if the model generates text."""
    if spec.search is None:
        return None
    assert isinstance(model, PoolingTransformer)
    return Pooler.of(spec.search, model)


def _image_reader(
    spec: ModelSpec,
    options: RunnerOptions,
    arena: mmap.mmap | None,
    device: torch.device,
    dtype: torch.dtype,
) -> ImageReader | None:
    if arena is None or spec.vision is None:
        return None
    num_features, rows = spec.vision.tower.num_features, options.max_batched_tokens
    return ImageReader(arena, num_features, spec.text.hidden_size, dtype, device, rows)


def _has_fp8_scales(spec: ModelSpec) -> bool:
    quantization = spec.checkpoint.quantization
    return quantization is not None and quantization.fp8_cache


def _shape(text: TextSpec, options: RunnerOptions, dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(
        len(text.attention_layers) + options.draft_head,
        options.block_size,
        text.num_kv_heads,
        text.head_dim,
        dtype,
    )


def _weight_bytes(model: nn.Module) -> int:
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers()))


def _attention_facts(
    facts: KernelFacts, options: RunnerOptions, max_model_len: int, *, fp8_cache: bool
) -> AttentionFacts:
    return attention_facts(
        facts,
        block_size=options.block_size,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        fp8_cache=fp8_cache,
        max_num_sequences=options.max_num_sequences,
        max_num_blocks=-(-max_model_len // options.block_size),
    )


def _info(spec: ModelSpec, options: RunnerOptions, dtype: torch.dtype) -> EngineInfo:
    """Returns the info of a runner without KV blocks, for a sequence as long as a step."""
    moe, on_gpu = spec.text.moe, resolve_device(options.device).type == "cuda"
    return EngineInfo(
        model_name=spec.name,
        dtype=str(dtype).removeprefix("torch."),
        num_features=0 if spec.vision is None else spec.vision.tower.num_features,
        hidden=spec.text.hidden_size,
        vocab_size=spec.text.vocab_size,
        max_model_len=options.max_batched_tokens,
        block_size=options.block_size,
        num_blocks=0,
        max_num_sequences=options.max_num_sequences,
        max_batched_tokens=options.max_batched_tokens,
        max_drafts=options.max_drafts,
        has_draft_head=options.draft_head,
        expert_share=moe.top_k / moe.num_experts if moe is not None else 0.0,
        on_gpu=on_gpu,
        has_states=spec.text.linear_attention is not None,
        state_tokens=PIECE if on_gpu else 1,
        task=spec.task,
        max_adapters=options.max_adapters,
    )


def _states(
    text: TextSpec, count: int, dtype: torch.dtype, device: torch.device
) -> StateCache | None:
    """Allocates `count` recurrent states. Returns None if the model has none, or for no states."""
    if text.linear_attention is None or not count:
        return None
    num_layers = len(text.linear_layers)
    return StateCache.allocate(text.linear_attention, num_layers, count, dtype, device)


def _kept_inputs(
    text: TextSpec, options: RunnerOptions, dtype: torch.dtype, device: torch.device
) -> KeptInputs | None:
    """Allocates the inputs of drafts that rows keep. Returns None if rows need to keep none."""
    spec = text.linear_attention
    if spec is None or not options.max_drafts:
        return None
    sizes = len(text.linear_layers), options.max_num_sequences + 1, options.max_drafts
    return KeptInputs.allocate(spec.num_channels, spec.num_value_heads, sizes, dtype, device)


def _fixed_budget(options: RunnerOptions, device: torch.device) -> int | None:
    """Returns the bytes of the KV pool, or None if they depend on what a step leaves of a GPU."""
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    return None if device.type == "cuda" else _CPU_KV_CACHE_BYTES


def _device_budget(
    options: RunnerOptions, device: torch.device, forward_peak: int, state_bytes: int
) -> int:
    """Returns the bytes of the KV pool that the largest step has left of a GPU."""
    memory = DeviceMemory.measure(device)
    budget = kv_cache.device_budget(memory, options.memory_fraction, forward_peak)
    return budget - (buffer_bytes(state_bytes) if options.kv_host_bytes else 0)


def _host_slots(
    text: TextSpec,
    options: RunnerOptions,
    shape: KVCacheShape,
    dtype: torch.dtype,
    checkpoints: int,
) -> dict[str, int]:
    """Returns the numbers of the host's slots. Of a model with recurrent states, which has
    `checkpoints` of them on the device, a quarter of the memory is for states.
    """
    budget, num_states = options.kv_host_bytes, 0
    if checkpoints:
        size = _state_bytes(text, dtype)
        num_states = budget // 4 // size
        budget -= num_states * size
    num_blocks = budget // shape.block_bytes
    return {
        "num_host_blocks": num_blocks,
        "num_host_states": num_states if num_blocks else 0,  # a state is of no use alone
    }


def _state_bytes(text: TextSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of a recurrent state. 0 if the model has none."""
    if text.linear_attention is None:
        return 0
    return StateCache.slot_bytes(text.linear_attention, len(text.linear_layers), dtype)


def _count_checkpoints(
    text: TextSpec, options: RunnerOptions, dtype: torch.dtype, budget: int
) -> tuple[int, int]:
    """Returns how many checkpoints of recurrent states fit, and the bytes for the KV pool."""
    if text.linear_attention is None:
        return 0, budget
    size = _state_bytes(text, dtype)
    wanted = options.checkpoint_bytes
    count = (budget // 8 if wanted is None else wanted) // size
    return count, budget if options.kv_cache_bytes is not None else budget - count * size


def _log_ready(
    info: EngineInfo,
    device: torch.device,
    backend: AttentionBackend,
    model: nn.Module,
    shape: KVCacheShape,
    seconds: float,
) -> None:
    fields = {
        "device": str(device),
        "dtype": info.dtype,
        "backend": type(backend).__name__,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "weight_bytes": _weight_bytes(model),
        "block_bytes": shape.block_bytes,
        "kv_cache_dtype": str(shape.dtype).removeprefix("torch."),
        "num_checkpoints": info.num_checkpoints,
        "num_host_blocks": info.num_host_blocks,
        "num_host_states": info.num_host_states,
        "max_model_len": info.max_model_len,
        "seconds": round(seconds, 2),
    }
    logger.info("runner is ready", extra={"fields": fields})
    if 0 < info.num_host_blocks <= info.num_blocks:  # see `HostSlots`
        share = 4 / 3 if info.num_host_states else 1  # the rest of the memory is for states
        logger.info(
            "DECODER_KV_HOST_BYTES holds %d blocks and the KV cache %d, so a block is copied when "
            "it leaves the cache and not ahead of time, which takes more than %.1f GB",
            info.num_host_blocks,
            info.num_blocks,
            (info.num_blocks + 1) * shape.block_bytes * share / 1e9,
        )


def _run_largest_step(runner: ModelRunner) -> int:
    """Runs the largest step, and returns the peak bytes that torch reserved before sampling."""
    info = runner.info
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ones = min(info.max_num_sequences, info.max_batched_tokens) - 1
    runner.computer.forward_scratch([1] * ones + [info.max_batched_tokens - ones])
    forward_peak = torch.cuda.max_memory_reserved()
    runner.sample_scratch(info.max_num_sequences)
    torch.cuda.synchronize()
    return forward_peak


def _warm_up(
    runner: ModelRunner,
    model: Transformer,
    backend: AttentionBackend,
    ranks: Ranks,
    *,
    with_graphs: bool,
) -> None:
    """Runs decode, prefill and mixed steps, and each way of sampling, once.

    Steps behind a long context run by other kernels than those without. A user's first long prompt
    would wait for the kernels that did not run here.
    """
    info = runner.info
    longest = min(info.max_batched_tokens, info.max_model_len)
    steps = [[1], [2], [1, 2]]
    if backend.captures("prompts"):  # the number of decodes selects the kernels of large steps
        counts = {1, 128, 256, info.max_num_sequences - 1}
        steps += [[1] * decodes + [longest - decodes] for decodes in sorted(counts)]
    num_rows, num_tokens = info.max_num_sequences, info.max_batched_tokens
    fit = [s for s in steps if len(s) <= num_rows and sum(s) <= num_tokens and s[-1] > 0]
    behind = [
        [1] * decodes + [min(n, longest - decodes)] for decodes in (0, 1, 8) for n in (128, 1024)
    ]
    behind = [s for s in behind if info.on_gpu and len(s) <= num_rows and s[-1] > 0]
    differ = True
    while differ:
        for lengths in fit:
            runner.computer.forward_scratch(lengths)
        for lengths in behind:
            num_cached = min(_CONTEXT, info.max_model_len - lengths[-1])
            runner.computer.forward_scratch(lengths, num_cached)
        runner.sample_scratch(1)
        differ = _agree(model.ops, ranks)
    if with_graphs and backend.captures("decodes"):
        prompts = prompt_buckets(longest) if backend.captures("prompts") else []
        mixed = mixed_buckets(longest) if backend.captures("mixed") else []
        hiding = model.ops.table.facts.launch_hiding_tokens
        crowded = crowded_buckets(longest if mixed else 0, info.max_num_sequences, hiding)
        decodes = list(decode_buckets(info.max_num_sequences))
        parts, memory = runner.computer.parts, GraphMemory()
        wanted: list[tuple[Graphs, list[int]]] = [(MixedGraphs(parts, memory), mixed)]
        if crowded:
            wanted.append((CrowdedGraphs(parts, memory), crowded))
        if backend.captures("long"):
            wanted.append((LongGraphs(parts, memory), long_buckets(longest, hiding)))
        wanted.append((PromptGraphs(parts, memory), prompts))
        wanted.append((DecodeGraphs(parts, memory), decodes))
        runner.computer.capture_graphs(wanted)
        if isinstance(runner, DraftingRunner):
            capture_drafts(runner.drafter, model.ops, memory, decodes, ranks)
        _agree(model.ops, ranks)


def _agree(ops: Ops, ranks: Ranks) -> bool:
    """Drops kernels that some rank cannot run; returns whether any rank could run others."""
    in_use: list[dict[str, list[str]]] = ranks.exchange(ops.table.in_use())
    ops.keep({key: set.intersection(*(set(each[key]) for each in in_use)) for key in in_use[0]})
    return any(each != in_use[0] for each in in_use)
