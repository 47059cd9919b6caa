"""The decoder on a GPU: each fast path against a plain twin. One command:

    python -m pytest -m gpu tests/gpu/test_decoder_gpu.py -s

Metrics. Rows of logits or outputs are compared by relative L2, |a - b| / |b|. bf16 has eight bits
of mantissa: one rounding is up to 0.4 %, and 28 layers of them add up to a few percent. How much is
right is measured, not guessed: Hugging Face's bf16 model is compared with its own float32 model,
and ours may be at most 1.3 times as far from float32 as theirs. With random weights tokens are
compared where the best logit leads by more than the noise.
"""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.decoder.attention import create_backend
from services.decoder.attention.base import AttentionMetadata
from services.decoder.engine.messages import SamplingParams
from services.decoder.engine.run.sampler import Sampler
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.step import RowSampling, SampleStep
from services.decoder.operations.ops import PlainOps
from tests.block_tables import first_blocks
from tests.decoder_harness import Harness, write_checkpoint
from tests.gpu.decoder_2b import (
    BLOCK_SIZE,
    GPU,
    IDS,
    ROPE,
    TEXT_2B,
    VISION,
    needs_flashinfer,
    options,
    prompts,
    relative,
)
from tests.gpu.twins import attention_facts, fused
from tests.image_processor import write_image_processor
from tests.noise import wait_until
from tests.sampling_twins import mask_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# Attention.


def layout(lengths: list[tuple[int, int]], device: torch.device) -> AttentionMetadata:
    """Sequences of (context, query) tokens, decodes first, blocks shuffled."""
    counts = [-(-context // BLOCK_SIZE) for context, _ in lengths]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    seq_lens = np.array([context for context, _ in lengths], np.int32)
    queries = [query for _, query in lengths]
    return AttentionMetadata(
        num_decodes=sum(query == 1 for query in queries),
        cu_query_lens=np.cumsum([0, *queries]).astype(np.int32),
        seq_lens=seq_lens,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        first_blocks=(firsts := first_blocks(seq_lens, BLOCK_SIZE)),
        block_ids=ids.to(device),
        first_blocks_device=torch.from_numpy(firsts).to(device),
        seq_lens_device=torch.from_numpy(seq_lens).to(device),
    )


@needs_flashinfer
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (64, 8), (4, 2)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)], [(1000, 1)], [(n * 17 + 1, 1) for n in range(64)], [(300, 300)],
        [(2000, 500), (33, 33)], [(5, 1), (700, 1), (64, 64), (1030, 17)],
        [(4000, 1), *[(40, 1)] * 50, (100, 100)],
    ],
    ids=["first", "one", "many", "prefill", "chunks", "mixed", "many mixed"],
)  # fmt: skip
def test_the_paged_backend_agrees_with_sdpa(head_dim, heads, kv_heads, lengths) -> None:
    facts = replace(
        attention_facts(heads, kv_heads, head_dim), max_num_sequences=64, max_num_blocks=256
    )
    metadata = layout(lengths, GPU)
    torch.manual_seed(0)
    pool = torch.randn(len(metadata.block_ids) + 1, 2, BLOCK_SIZE, kv_heads, head_dim, device=GPU)
    query = torch.randn(int(metadata.cu_query_lens[-1]), heads, head_dim, device=GPU)
    pool, query = pool.bfloat16(), query.bfloat16()
    plain = create_backend(replace(facts, dtype=torch.float32), GPU)
    metadata.plan = plain.plan(metadata)
    expected = plain.forward(query.float(), pool.float(), metadata)
    fast = create_backend(facts, GPU)
    metadata.plan = fast.plan(metadata)
    actual = fast.forward(query, pool, metadata)
    assert torch.isfinite(actual).all()
    assert relative(actual.flatten(0, 1), expected.flatten(0, 1)) < 1e-2


# Graphs, overlap, batches.


def test_steps_in_flight_do_not_matter(dummy: Harness) -> None:
    """The same kernels on the same batches: all tokens equal, read at once or a step late."""
    results = []
    for depth in (1, 2):
        running = [dummy.start(ids, row) for row, ids in enumerate(prompts(24))]
        for sequence in running:
            dummy.step(dummy.chunk(sequence))
        flying: list[tuple] = []
        for _ in range(40):
            chunks = [dummy.chunk(sequence) for sequence in running]
            flying.append((dummy.launch(*chunks), chunks))
            if len(flying) == depth:
                dummy.take(*flying.pop(0))
        while flying:
            dummy.take(*flying.pop(0))
        results.append([sequence.token_ids for sequence in running])
        for sequence in running:
            dummy.finish(sequence)
    assert results[0] == results[1]


def test_a_batch_agrees_with_one_alone(dummy: Harness) -> None:
    running = [dummy.start(ids, row) for row, ids in enumerate(prompts(32, seed=1))]
    alone = torch.cat([dummy.logits(dummy.chunk(sequence))[-1:] for sequence in running])
    for sequence in running:
        sequence.num_in_flight = 0
        dummy.restart(sequence, sequence.row)
    for sequence in running:
        dummy.step(dummy.chunk(sequence, len(sequence.token_ids) - 1))
    together = dummy.logits(*[dummy.chunk(sequence) for sequence in running])
    assert relative(together, alone) < 5e-2
    for sequence in running:
        dummy.finish(sequence)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=20, presence_penalty=1.5),
    ],
)
def test_execute_waits_for_nothing(dummy: Harness, params: SamplingParams, masked: bool) -> None:
    running = [dummy.start(ids, row, params) for row, ids in enumerate(prompts(8))]
    for sequence in running:
        dummy.step(dummy.chunk(sequence))
    dummy.step(*[dummy.chunk(sequence) for sequence in running])
    chunks = [dummy.chunk(sequence) for sequence in running]
    if masked:  # as the engine has it: the ids of a masked sequence are known, and come last
        allowed = np.zeros(dummy.runner.info.vocab_size, np.bool_)
        allowed[1000:1100] = True
        running[-1].token_mask = mask_of(allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = dummy.launch(*chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # In that mode whatever waits for the device raises.
    assert len(pending.result().token_ids) == len(chunks)
    if masked:
        assert 1000 <= int(pending.result().token_ids[-1, 0]) < 1100
    dummy.take(pending, chunks)
    for sequence in running:
        dummy.finish(sequence)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("eager", [False, True])
def test_late_masks_are_sampled_under_without_waiting(dummy: Harness, eager: bool) -> None:
    """As the engine has it: planned ahead, the step launched before the masks are there."""
    running = [dummy.start(ids, row) for row, ids in enumerate(prompts(8))]
    for sequence in running:
        dummy.step(dummy.chunk(sequence))
    dummy.step(*[dummy.chunk(sequence) for sequence in running])
    graphs = dummy.runner.computer.graphs
    first, second = [dummy.chunk(s) for s in running], [dummy.chunk(s) for s in running]
    for chunk in second[::2]:
        chunk.is_late = True
    try:
        dummy.runner.computer.graphs = [] if eager else graphs
        torch.cuda.set_sync_debug_mode("error")
        before = dummy.launch(*first)
        pending = dummy.launch(*second)
        for index in range(4):
            allowed = np.zeros(dummy.runner.info.vocab_size, np.bool_)
            allowed[1000 + index] = True
            pending.put_mask(index, mask_of(allowed))
        pending.sample()
        after = dummy.launch(*[dummy.chunk(s) for s in running])  # reads what was sampled
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dummy.runner.computer.graphs = graphs
    found = pending.result().token_ids[:, 0].tolist()
    assert pending.is_computed() and found[::2] == [1000, 1001, 1002, 1003]
    assert dummy.state.rows.last_tokens[:8].min() >= 0
    assert len(before.result().token_ids) == len(after.result().token_ids) == 8
    for sequence in running:
        dummy.finish(sequence)


# Sampling, images, plain path.


@pytest.mark.parametrize("penalized", [False, True])
def test_sampling_agrees_with_the_cpu(penalized: bool) -> None:
    params = [
        SamplingParams(
            temperature=1.0,
            seed=n,
            top_k=[0, 20, 2000][n % 3],
            top_p=[1.0, 0.8][n % 2],
            presence_penalty=[0.0, 1.5][penalized and n % 5 == 0],
        )
        for n in range(96)
    ]
    logits = torch.randn(96, 8192, generator=torch.Generator().manual_seed(0)) * 3
    masked = np.arange(0, 96, 7)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (len(masked), 256), np.int32)
    results: list[list[list[int]]] = []
    for device, ops in ((torch.device("cpu"), PlainOps()), (GPU, PlainOps()), (GPU, fused())):
        staging, sampler = Staging(1 << 20, device), Sampler(96, 8192, device, ops)
        for row, one in enumerate(params):
            seen = np.array([1, 2], np.int32), np.arange(0, 8192, 2, dtype=np.int32)
            sampler.start_row(RowSampling(row, one, 0, *(ids.tobytes() for ids in seen)))
        results.append([])
        for generated in range(3):
            staging.begin()
            rows, before = np.arange(96), np.full(96, generated)
            step = SampleStep(masked=masked, token_masks=masks)
            inputs = sampler.prepare(rows, before, staging, step)
            assert inputs is not None and (inputs.seen is not None) == penalized
            staging.upload()
            sampled = sampler.sample(logits.to(device), inputs)
            results[-1].append(sampled.token_ids.tolist())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_float32_on_the_gpu_gives_the_cpus_tokens(tmp_path: Path, chunk_size: int | None) -> None:
    """Images included: copied from the registered arena here, read in place there."""
    checkpoint = write_checkpoint(tmp_path)
    token_ids = np.random.default_rng(0).integers(0, 90, 24).tolist()
    token_ids[5:14] = [95] * 9
    image = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(0))
    completions = []
    for device in ("cpu", "cuda:0"):
        chosen = {"device": device, "dtype": "float32"}
        with closing(Harness(checkpoint, **chosen)) as harness:
            sequence = harness.start(token_ids, images=[(5, image)])
            completions.append(harness.generate(sequence, 12, chunk_size))
    assert completions[0] == completions[1]


def test_the_pool_takes_what_the_fraction_leaves(directory: Path) -> None:
    """Needs a card on which nobody else allocates meanwhile: a process's memory is what the card
    has less.
    """

    def used() -> int:
        free, total = torch.cuda.mem_get_info(GPU)
        return total - free

    others = used()
    told = [str(directory), "0.5", str(others)]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.pool_memory", *told], stdout=subprocess.PIPE, check=True
    )
    try:
        wait_until(lambda: used() == others, "others have what they had")
    except AssertionError:
        pytest.skip("others allocated on this card meanwhile, which counts as the decoder's")
    ready, worked, num_blocks = json.loads(ran.stdout.splitlines()[-1])
    print(f"\nleft of its share: {ready / 2**30:.2f} GiB when ready, {worked / 2**30:.2f} after "
          f"the largest step; {num_blocks} blocks")  # fmt: skip
    assert 0 <= worked <= ready < 2 << 30


# Against Hugging Face.


def test_logits_are_as_close_to_float32_as_hugging_faces(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TEXT_2B | {"rope_parameters": ROPE}, vision_config=VISION, **IDS
    )
    torch.manual_seed(0)
    with torch.device(GPU):
        theirs = Qwen3VLForConditionalGeneration(config).eval()  # float32
    theirs.bfloat16().float()  # weights that bf16 holds exactly
    rotary = theirs.model.language_model.rotary_emb
    rotary.inv_freq = rotary.compute_default_rope_parameters(config.text_config)[0].to(GPU)
    tensors = {k: v.bfloat16().contiguous() for k, v in theirs.state_dict().items()}
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    written = config.to_dict() | {"architectures": ["Qwen3VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    write_image_processor(tmp_path, 65536, 1 << 24)
    ids = torch.tensor([prompts(1, seed=3)[0]], device=GPU)
    with torch.no_grad():
        exact = theirs(input_ids=ids).logits[0].float()
        frequencies = rotary.inv_freq.clone()
        theirs.bfloat16()
        rotary.inv_freq = frequencies  # `.bfloat16()` casts buffers too
        rounded = theirs(input_ids=ids).logits[0].float()
    del theirs, tensors
    torch.cuda.empty_cache()
    ours = Harness(tmp_path, **options(cuda_graphs=False))
    actual = ours.logits(ours.chunk(ours.start(ids[0].tolist()))).float()
    ours.close()
    noise, error = relative(rounded, exact), relative(actual, exact)
    divergence = float((exact.softmax(-1) * (exact.log_softmax(-1) - actual.log_softmax(-1)))
                       .sum(-1).max())  # fmt: skip
    print(f"\nfrom float32: HF {noise:.4f}, ours {error:.4f}; KL {divergence:.2e}")
    assert error < 1.3 * noise
    leads = exact.topk(2).values
    sure = (leads[:, 0] - leads[:, 1]) > 4 * (rounded - exact).abs().amax(-1)
    assert torch.equal(actual.argmax(-1)[sure], exact.argmax(-1)[sure])
