"""A mixture of experts on a GPU: each implementation against the plain twin, and a small model's
decode and prefill with CUDA graphs against the same without fast kernels. Tolerance as in `twins`,
twice: an expert's activation and its output are both rounded. Four times where the activation is
then quantized to FP8: a bf16 unit beside a code's edge is a sixteenth of the value.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.decoder_harness import Harness
from tests.gpu.twins import CUDA, TOLERANCE, error, random
from tests.quantized_experts import quantized_activations

pytest.importorskip("triton")
from benchmarks.kernels.moe import Layer
from benchmarks.kernels.moe_variants import Variants, compile_ahead
from benchmarks.text_shapes import TEXT_SHAPES
from kernels import plain
from kernels.device import DeviceFacts
from kernels.experts import moe_routing
from kernels.tuning import MoEGemvConfig
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.experts import moe as plain_moe
from services.decoder.operations import table
from services.decoder.operations.table import KernelFacts

pytestmark = pytest.mark.gpu
TEXT = TEXT_SHAPES["30b-a3b"]
COUNTS = [1, 2, 3, 4, 5, 16, 63, 64, 65, 200, 1008, 2500, 8192]
FORMATS = ["plain", "fp8_block", "fp8_channel"]  # of the first two kernels
OTHERS = ["w4a16", "w8a16", "nvfp4", "mxfp4", "mxfp8", "int8"]


@pytest.fixture(scope="module", params=[*FORMATS, *OTHERS])
def layer(request: pytest.FixtureRequest) -> Layer:
    with torch.device("meta"):
        made = Layer(TEXT, request.param)
    load_dummy(made, device=CUDA, dtype=torch.bfloat16)
    made.requires_grad_(False)
    made.weight_format = request.param  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("name", ["gemv", "grouped_gemm", "packed", "int8"])
@torch.inference_mode()
def test_every_implementation_agrees_with_its_twin(layer: Layer, name: str) -> None:
    facts = KernelFacts(DeviceFacts.of(CUDA), TEXT, torch.bfloat16, str(layer.weight_format))
    (row,) = [row for row in table.ROWS if (row.operation, row.name) == ("moe", name)]
    if row.obstacle(facts):
        pytest.skip(row.obstacle(facts))
    kernel = row.create(facts)
    assert kernel is not None
    for count in COUNTS:
        if name == "gemv" and count > 16:
            continue
        x, residual = random(count, TEXT.hidden_size), random(count, TEXT.hidden_size) * 0.01
        w8a8 = name == "grouped_gemm" and layer.weight_format != "plain"
        with quantized_activations(are_quantized=w8a8):
            expected = residual + plain_moe(x, layer.router, layer.experts, residual)
        found = residual.clone()
        assert kernel(x, layer.router, layer.experts, found) is None
        clear = _is_clear(x, layer)
        assert clear.sum() >= count // 2 - 2
        if clear.any():
            found_sum, expected_sum = (found - residual)[clear], (expected - residual)[clear]
            assert error(found_sum, expected_sum) <= (4 if w8a8 else 2) * TOLERANCE, count
        again = residual.clone()
        kernel(x, layer.router, layer.experts, again)
        assert torch.equal(found, again), "not deterministic"


def _is_clear(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Whether each token's last expert has a better score than the next one by more than two units
    in the last place: else the order of the scores' sums decides, which is a kernel's own.
    """
    scores = layer.router(x).float().topk(layer.router.top_k + 1).values
    last, after = scores[:, -2], scores[:, -1]
    return last - after > 2 * torch.finfo(x.dtype).eps * last.abs()


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (256, 8), (60, 4)])
@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 8192])
def test_routing_agrees_with_its_twin(num_experts: int, top_k: int, count: int) -> None:
    logits = random(count, num_experts) * 2  # of bf16: with many ties
    found = moe_routing.route(logits, top_k, normalize=True, dtype=torch.bfloat16, tile=16)
    experts, weights = plain.route(logits, top_k, normalize=True)
    assert torch.equal(found.experts.long(), experts)
    torch.testing.assert_close(found.weights, weights.float(), atol=1e-4, rtol=1e-2)
    order = found.experts.flatten().sort(stable=True).indices
    assert torch.equal(found.order.long(), order)
    assert torch.equal(found.places[found.order.long()].long(), torch.arange(len(order)).to(CUDA))


@torch.inference_mode()
def test_a_tokens_output_does_not_depend_on_its_batch_mates(layer: Layer) -> None:
    """Within an implementation, and of any place in the batch."""
    facts = KernelFacts(DeviceFacts.of(CUDA), TEXT, torch.bfloat16, str(layer.weight_format))
    rows = {row.name: row for row in table.ROWS if row.operation == "moe"}
    x = random(64, TEXT.hidden_size)
    some = (1, 17, 64)
    for name, sizes in (
        ("gemv", (1, 2, 4)), ("grouped_gemm", (5, 17, 64)), ("packed", some), ("int8", some)
    ):  # fmt: skip
        if rows[name].obstacle(facts):
            continue
        kernel = rows[name].create(facts)
        assert kernel is not None
        outputs = []
        for size in sizes:
            out = torch.zeros_like(x[:size])
            kernel(x[:size], layer.router, layer.experts, out)
            outputs.append(out)
        for out in outputs[:-1]:
            # The router's scores may come from another GEMM: where its choice is the same, so is
            # the output, to the last bit.
            same = (out == outputs[-1][: len(out)]).all(1)
            print(f"{name}: {int(same.sum())} of {len(out)} tokens are equal")
            assert error(out, outputs[-1][: len(out)]) <= 2 * TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_kernels_that_start_early_wait_for_their_input(weight_format: str) -> None:
    """A chain of layers in a CUDA graph, where memory still has the values of the layer before,
    leaves bit for bit what it leaves without programmatic dependent launch.
    """
    config, counts = MoEGemvConfig(), (1, 2, 4)
    compile_ahead(TEXT, weight_format, counts, [config])
    variants = Variants(TEXT, weight_format, num_layers=3)
    weight = variants.layers[1][0].router.weight.data
    weight[1::2] = weight[::2]  # ties
    for count in counts:
        assert variants.error(config, count) <= 2 * TOLERANCE, count
        assert variants.is_exact(config, count), count


@pytest.fixture(scope="module", params=["plain", "fp8_block"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 2048, "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096, "norm_topk_prob": True, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 256, "eos_token_id": 0,
        "tie_word_embeddings": False, "mlp_only_layers": [1],
    }  # fmt: skip
    if request.param != "plain":
        config["quantization_config"] = {
            "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"],
        }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_graphs_and_kernels_generate_what_torch_does(small: Path) -> None:
    """A token may be another than the twin's where rounding chooses another expert. So what the
    twin's logits of all tokens of an answer lose by it is within a tenth of their standard
    deviation on average; by tokens at random it is more than three.
    """
    answers: dict[int, list[int]] = {}
    losses: list[float] = []
    for kernels in ("", "plain"):
        options: dict[str, object] = {
            "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
            "kv_cache_bytes": 64 << 20,
            "cuda_graphs": not kernels,  # `plain` waits for the device
        }  # fmt: skip
        with closing(Harness(small, **options, kernels=kernels)) as harness:
            for length in (1, 30, 300):
                ids = torch.randint(0, 2048, (length,), generator=_seeded(length)).tolist()
                if kernels:
                    sequence = harness.start(ids + answers[length][:-1])
                    logits = harness.prompt_logits(sequence)[length - 1 :].float()
                    chosen = logits[torch.arange(16), answers[length]]
                    losses += ((logits.amax(-1) - chosen) / logits.std()).tolist()
                else:
                    sequence = harness.start(ids)
                    answers[length] = harness.generate(sequence, 16)
                    harness.finish(sequence)
            calls = harness.runner.kernel_calls
            assert ("moe=plain" in calls) == (kernels == "plain"), calls
    print(f"loss {sum(losses) / len(losses):.4f} on average, {max(losses):.4f} at most")
    assert sum(losses) / len(losses) <= 0.1


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
