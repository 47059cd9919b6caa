"""A KV cache in e4m3: our logits are those of Hugging Face's model whose attention rounds keys and
values, and differ from those of an unrounded cache by as much as is said here.

Float32, CPU. The rounding of the test looks for the nearest value in a table, and shares no code
with ours.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.attention.fp8_pages import E4M3
from services.common.nn.checkpoint import CheckpointError
from services.decoder.attention import sdpa
from services.decoder.models.transformer import Attention
from tests.decoder_harness import Harness
from tests.fp4_checkpoints import MODELOPT, compressed, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import TEXTS, Quantized
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE

# isort: split
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

pytestmark = pytest.mark.usefixtures("one_thread")

# A key or value is rounded to 4 significant bits: where two computations differ by float32's
# rounding alone it may become either of two neighbours. A few of these are less than this.
ROUNDED_TOLERANCE = 0.5
# What rounding may change, of logits up to 30 and more: norm of the difference over the norm.
STATED_ERROR = 0.06

_VALUES = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8 - (e == 15))]
)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
HEADS, LAYERS = 2, 2


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """`[B, H, T, D]`, to the nearest e4m3 value times the head's scale."""
    wide = x / scales[:, None, None]
    nearest = (wide.abs()[..., None] - _VALUES).abs().argmin(-1)
    return _VALUES[nearest] * wide.sign() * scales[:, None, None]


@contextmanager
def rounding(model: torch.nn.Module, scales: Tensor) -> Iterator[None]:
    """Hugging Face's model attends to rounded keys and values; `scales`: `[layers, 2, heads]`."""

    def attend(module, query, key, value, attention_mask, **options):
        keys, values = scales[module.layer_idx]
        return sdpa_attention_forward(
            module, query, rounded(key, keys), rounded(value, values), attention_mask, **options
        )

    AttentionInterface.register("rounding", attend)
    AttentionMaskInterface.register("rounding", sdpa_mask)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("rounding")  # type: ignore[operator]
    yield
    model.set_attn_implementation(before)  # type: ignore[operator]


@pytest.fixture(scope="module", params=["qwen3", "llama-biases"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(TEXTS[request.param], tmp_path_factory.mktemp("fp8-cache"), write)


def add_scales(directory: Path, kind: str) -> Tensor:
    """Puts scales into a checkpoint's file; returns what they mean, `[layers, 2, heads]`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    meant = torch.zeros(LAYERS, 2, HEADS)
    for layer in range(LAYERS):
        for part, (letter, own) in enumerate((("k", (0.05, 0.3)), ("v", (0.01, 0.125)))):
            values = torch.tensor(own) * (1 + layer)
            if kind != "heads":
                values = values[:1]
            name = f"{letter}_proj.{letter}_scale" if kind == "modelopt" else f"{letter}_scale"
            stored = values.view(-1, 1, 1) if kind == "heads" else values
            tensors[f"model.layers.{layer}.self_attn.{name}"] = stored.clone()
            meant[layer, part] = 2 ** values.log2().ceil()
    save_file(tensors, path)
    return meant


def written(model: Quantized, kind: str) -> tuple[Path, dict[str, Tensor], Tensor]:
    """A checkpoint that asks for a cache in e4m3: its directory, weights and scales."""
    if kind == "modelopt":
        name, config = "modelopt", MODELOPT | {"kv_cache_quant_algo": "FP8"}
    else:
        strategy = "attn_head" if kind == "heads" else "tensor"
        name = "nvfp4"
        config = compressed(name, kv_cache_scheme=SCHEME | {"strategy": strategy})
    directory, meant = model.write(name, config=config)
    return directory, meant, add_scales(directory, kind)


def scales_of(harness: Harness) -> Tensor:
    model = harness.model
    found = [layer.kv_scales for layer in model.modules() if isinstance(layer, Attention)]  # type: ignore[attr-defined]
    return torch.stack([scales for scales in found if scales is not None])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["tensor", "heads", "modelopt"])
def test_logits_are_those_of_a_rounding_attention(
    model: Quantized, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, weights, scales = written(model, kind)
    harness = Harness(directory)
    assert harness.state.kv_cache.dtype == E4M3
    assert torch.equal(scales_of(harness), scales)
    exact = model.expected(weights)
    with rounding(model.oracle.model, scales):
        expected = model.expected(weights)
    assert error(model.run(harness), expected) < ROUNDED_TOLERANCE
    assert error(model.run(harness, 3), expected) < ROUNDED_TOLERANCE
    assert error(expected, exact) > ROUNDED_TOLERANCE  # else a cache that does not round would pass
    assert distance(model.run(harness), exact) < STATED_ERROR
    # Controls: scales that are not applied where the cache is read, or another head's.
    read = sdpa.read_kv
    for wrong in (torch.ones_like(scales[0]), scales[0].roll(1, 0), scales[0].roll(1, 1)):
        if torch.equal(wrong, scales[0]):
            continue  # heads that share a scale

        def misread(x: Tensor, part: int, dtype: torch.dtype, _: Tensor, given=wrong) -> Tensor:
            return read(x, part, dtype, given)

        monkeypatch.setattr(sdpa, "read_kv", misread)
        found = model.run(harness)
        assert error(found, expected) > CLEARLY_WRONG and distance(found, exact) > STATED_ERROR


def test_a_measured_scale_follows_the_values(model: Quantized) -> None:
    """Values a thousand times smaller, and an output projection that makes up for it: the same
    model, which a scale of one would round to nothing.
    """
    directory = model.directory / "source"
    small = model.directory / "small"
    small.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.suffix == ".json":
            (small / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if ".v_proj." in name:
            tensors[name] = tensors[name] * 2.0**-10
        elif name.endswith("o_proj.weight"):
            tensors[name] = tensors[name] * 2.0**10
    save_file(tensors, small / "model.safetensors")
    exact = model.expected(model.original)
    first, second = (Harness(path, fp8_cache=True) for path in (directory, small))
    scales, others = scales_of(first), scales_of(second)
    assert torch.equal(others, scales * torch.tensor([1.0, 2.0**-10])[:, None])
    assert torch.equal(scales, 2 ** scales.log2().round())  # powers of two
    found = model.run(first)
    assert torch.equal(found, model.run(second))
    assert distance(found, exact) < STATED_ERROR
    pool = first.state.kv_cache.float().abs()
    largest = pool.amax(dim=(1, 3, 5))  # [layers, 2, heads], without scales
    assert (largest > 448 / 64).all() and (largest < 448).all()
    for layer in second.model.modules():  # type: ignore[attr-defined]
        if isinstance(layer, Attention):
            assert layer.kv_scales is not None
            layer.kv_scales = torch.ones_like(layer.kv_scales)
    assert distance(model.run(second), exact) > 2 * distance(found, exact)


@pytest.mark.parametrize("kind", ["tensor", "modelopt"])
def test_scales_that_the_files_ask_for_and_do_not_hold_are_measured(
    model: Quantized, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As ModelOpt writes them where it casts keys and values, and has not calibrated."""
    directory, weights, _ = written(model, kind)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if not k.endswith(("k_scale", "v_scale"))}, path)
    harness = Harness(directory)
    assert "hold no scales" in caplog.text
    assert harness.state.kv_cache.dtype == E4M3
    assert distance(model.run(harness), model.expected(weights)) < STATED_ERROR


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.q_scale", "self_attn.prob_scale"),
        ("self_attn.q_proj.q_scale", "self_attn.prob_output_scale"),
        ("self_attn.qkv_proj.q_scale", "self_attn.q_zero_point"),
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "heads"])
def test_scales_of_queries_are_left_out_with_a_warning(
    model: Quantized, kind: str, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Queries and probabilities are not quantized: the logits are those without such scales."""
    directory, _, _ = written(model, kind)
    expected = model.run(Harness(directory))
    path = directory / "model.safetensors"
    more = {f"model.layers.{at}.{name}": torch.ones(1) for at in range(LAYERS) for name in names}
    save_file(load_file(path) | more, path)
    caplog.clear()
    assert torch.equal(model.run(Harness(directory)), expected)
    (record,) = [record for record in caplog.records if "neither queries" in record.message]
    assert all(name in record.message for name in more)


def test_attention_in_8_bits_is_declared_by_a_group_without_weights(
    model: Quantized, caplog: pytest.LogCaptureFixture
) -> None:
    queries = {"targets": ["Qwen3Attention"], "weights": None, "input_activations": SCHEME}
    config = compressed("nvfp4")
    config["config_groups"]["attention"] = queries
    directory, weights = model.write("nvfp4", config=config)
    assert error(model.ours(directory), model.expected(weights)) < TOLERANCE
    assert "not used: input_activations: 8-bit float, static, per tensor" in caplog.text


def test_twice_as_many_tokens_fit(model: Quantized) -> None:
    directory, budget = model.directory / "source", {"kv_cache_bytes": 1 << 20, "max_model_len": 64}
    wide = Harness(directory, dtype="bfloat16", **budget).runner.info
    narrow = Harness(directory, dtype="bfloat16", fp8_cache=True, **budget).runner.info
    assert narrow.num_blocks + 1 == 2 * (wide.num_blocks + 1)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("missing", "promises are missing: model.layers.1.self_attn.v_scale"),
        ("shape", r"layers.0.self_attn.k_scale \[3\] must hold one positive number"),
        ("zero", "layers.0.self_attn.k_scale .* one positive number"),
        ("unasked", "unexpected tensors: model.layers.0.self_attn.k_scale"),
    ],
)
def test_broken_scales_are_refused_by_name(model: Quantized, fault: str, named: str) -> None:
    directory, _, _ = written(model, "tensor")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    first = "model.layers.0.self_attn.k_scale"
    match fault:
        case "missing":
            del tensors["model.layers.1.self_attn.v_scale"]
        case "shape":
            tensors[first] = torch.ones(3)
        case "zero":
            tensors[first] = torch.zeros(1)
        case "unasked":
            config = json.loads((directory / "config.json").read_text())
            config["quantization_config"]["kv_cache_scheme"] = None
            (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=named):
        Harness(directory)
