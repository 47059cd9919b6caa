"""The vision tower agrees with Hugging Face's on random weights, float32, CPU.

Tolerance: 2e-5 of the largest value, about a hundred roundings of float32. The controls show that
the check can fail.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVLConfig
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVLModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel as HfWindowModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel as HfPlainModel,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as HfVisionModel

from kernels.attention.segments import BatchSegments
from services.common.families.paddleocr_vl import SiglipTower
from services.common.families.qwen2_5_vl import WindowTower
from services.common.families.qwen2_vl import PlainTower
from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Grid
from services.common.model_spec import TowerSpec
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weights import load_weights
from services.encoder.models import (
    create_tower,
    positions,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    window_layout,
)
from services.encoder.models.qwen3_vl import VisionTower
from tests.parity.oracle import in_rows
from tests.tower import cpu_ops

TOLERANCE = 2e-5

CONFIGS: dict[str, TowerSpec] = {
    "one tap, 3 heads of 16": DeepStackTower(3, 48, 96, 3, 3, 16, 2, 2, 40, 36, (1,)),
    "two taps, 1 head of 32": DeepStackTower(4, 32, 72, 1, 3, 16, 2, 2, 64, 64, (0, 2)),
    "three taps, 5 heads of 16": DeepStackTower(5, 80, 100, 5, 3, 16, 2, 2, 48, 144, (0, 2, 4)),
    "head_dim 64": DeepStackTower(3, 128, 256, 2, 3, 16, 2, 2, 96, 2304, (0, 1)),
    "head_dim 72, 8B's": DeepStackTower(3, 216, 430, 3, 3, 16, 2, 2, 128, 2304, (0, 1, 2)),
    "patch 14, 7 heads of 8": DeepStackTower(2, 56, 64, 7, 3, 14, 2, 2, 32, 49, (1,)),
    "merge 1, one channel": DeepStackTower(2, 32, 64, 2, 1, 8, 2, 1, 32, 100, (0,)),
    "Qwen2-VL, 3 heads of 16": PlainTower(3, 48, 144, 3, 3, 14, 2, 2, 40),
    "Qwen2-VL, head_dim 80": PlainTower(2, 160, 320, 2, 3, 14, 2, 2, 64),
    "Qwen2.5-VL, windows of 4": WindowTower(4, 48, 70, 3, 3, 14, 2, 2, 40, 112, (1, 3)),
    "Qwen2.5-VL, windows of 3": WindowTower(3, 160, 200, 2, 3, 14, 2, 2, 64, 84, (2,)),
    "PaddleOCR-VL, 3 heads of 16": SiglipTower(3, 48, 70, 3, 3, 14, 1, 2, 40, 36),
    "PaddleOCR-VL, head_dim 72": SiglipTower(
        2, 144, 200, 2, 3, 14, 1, 2, 64, 729, 1e-5, "projector."
    ),
    "Qwen2.5-VL, no window": WindowTower(2, 32, 40, 2, 3, 8, 2, 2, 64, 32, (0, 1)),
}
IMAGES: list[Grid] = [(1, 4, 6), (1, 6, 4), (1, 2, 2), (1, 10, 14), (1, 2, 26), (1, 4, 6)]


@dataclass
class Pair:
    """One set of weights, as Hugging Face's module and as ours."""

    config: TowerSpec
    theirs: PreTrainedModel
    ours: VisionTower

    def expected(self, patches: Tensor, grids: list[Grid]) -> Tensor:
        if isinstance(self.config, SiglipTower):
            rows = in_rows(patches, [grid[1:] for grid in grids], self.config)
            with torch.no_grad():
                theirs: Any = self.theirs
                out = theirs.get_image_features(rows, torch.tensor(grids))
            return torch.cat(out.pooler_output)[None]
        with torch.no_grad():
            out = self.theirs(patches, grid_thw=torch.tensor(grids))
        return torch.stack([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())])

    def actual(self, patches: Tensor, grids: list[Grid]) -> Tensor:
        with torch.inference_mode():
            return self.ours(patches, self.ours.layout(grids))

    def patches(self, grids: list[Grid], seed: int = 0) -> Tensor:
        config = self.config
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        num_patches = sum(t * h * w for t, h, w in grids)
        return torch.rand(num_patches, pixels, generator=_generator(seed)) * 2 - 1


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hf_config(config: TowerSpec) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The configuration and the class of Hugging Face's tower."""
    if isinstance(config, SiglipTower):
        side = round(config.num_position_embeddings**0.5)
        vision = {
            "num_hidden_layers": config.depth, "num_attention_heads": config.num_heads,
            "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "image_size": side * config.patch_size, "layer_norm_eps": config.layer_norm_eps,
        }  # fmt: skip
        text = {
            "vocab_size": 8, "hidden_size": config.out_hidden_size, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "pad_token_id": None,
        }  # fmt: skip
        return PaddleOCRVLConfig(vision_config=vision, text_config=text), PaddleOCRVLModel
    sizes: dict[str, Any] = {
        "depth": config.depth, "num_heads": config.num_heads, "in_channels": config.in_channels,
        "patch_size": config.patch_size, "temporal_patch_size": config.temporal_patch_size,
        "spatial_merge_size": config.spatial_merge_size,
    }  # fmt: skip
    if isinstance(config, PlainTower):
        ratio = config.intermediate_size // config.hidden_size
        sizes |= {"embed_dim": config.hidden_size, "hidden_size": config.out_hidden_size}
        return Qwen2VLVisionConfig(mlp_ratio=ratio, **sizes), HfPlainModel
    sizes |= {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "out_hidden_size": config.out_hidden_size,
    }  # fmt: skip
    if isinstance(config, WindowTower):
        blocks = list(config.full_attention_blocks)
        made = Qwen2_5_VLVisionConfig(
            window_size=config.window_size, fullatt_block_indexes=blocks, **sizes
        )
        return made, HfWindowModel
    assert isinstance(config, DeepStackTower)
    made = Qwen3VLVisionConfig(
        num_position_embeddings=config.num_position_embeddings,
        deepstack_visual_indexes=list(config.deepstack_indexes),
        **sizes,
    )
    return made, HfVisionModel


def make_pair(config: TowerSpec, directory: Path) -> Pair:
    hf, kind = hf_config(config)
    theirs = kind._from_config(hf).eval()
    generator = _generator(1)
    for parameter in theirs.parameters():
        wide = 0.5 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5
        parameter.data.normal_(0.0, wide, generator=generator)
    prefix = "" if isinstance(config, SiglipTower) else "model.visual."
    tensors = {f"{prefix}{k}": v.contiguous() for k, v in theirs.state_dict().items()}
    if isinstance(config, SiglipTower):  # the files have the names of the whole model
        tensors = {
            name.replace("visual.", "model.visual.").replace(
                "projector.", config.projector_prefix
            ): v
            for name, v in tensors.items()
            if not name.startswith("language_model.")
        }
    save_file(tensors, directory / "model.safetensors")
    with torch.device("meta"):
        ours = create_tower(config, cpu_ops(config), "model.visual.")
    load_weights(
        ours, Checkpoint.open(directory), ours.weight_map, device="cpu", dtype=torch.float32
    )
    return Pair(config, theirs, ours)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("tower"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = CONFIGS["two taps, 1 head of 32"]
    return make_pair(config, tmp_path_factory.mktemp("small"))


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value of its feature."""
    assert actual.shape == expected.shape
    scale = expected.abs().amax(dim=(1, 2), keepdim=True)
    return float(((actual - expected).abs() / scale).max())


def test_a_packed_batch_agrees(pair: Pair) -> None:
    patches = pair.patches(IMAGES)
    assert error(pair.actual(patches, IMAGES), pair.expected(patches, IMAGES)) < TOLERANCE


def test_an_image_is_the_same_alone_and_in_a_batch(pair: Pair) -> None:
    patches = pair.patches(IMAGES)
    together = pair.actual(patches, IMAGES)
    merge = pair.config.spatial_merge_size**2
    start = 0
    for grid in IMAGES:
        count = grid[1] * grid[2]
        alone = pair.actual(patches[start : start + count], [grid])
        rows = slice(start // merge, (start + count) // merge)
        assert error(alone, together[:, rows]) < TOLERANCE
        start += count


def test_still_patches_without_their_time_axis(pair: Pair) -> None:
    config = pair.config
    if config.temporal_patch_size == 1:
        return
    whole = pair.patches(IMAGES).unflatten(1, (config.in_channels, config.temporal_patch_size, -1))
    whole[:, :, 1:] = whole[:, :, :1]
    expected = pair.expected(whole.flatten(1), IMAGES)
    assert error(pair.actual(whole[:, :, 0].flatten(1), IMAGES), expected) < TOLERANCE


@pytest.mark.parametrize("is_still", [False, True])
def test_pixels_are_normalized_by_the_checkpoints_constants(tmp_path: Path, is_still: bool) -> None:
    levels = (120.0, 117.0, 104.0), (68.0, 66.0, 70.0)
    config = replace(CONFIGS["two taps, 1 head of 32"], pixel_mean=levels[0], pixel_std=levels[1])
    pair = make_pair(config, tmp_path)
    scaled = pair.patches(IMAGES).unflatten(1, (3, 2, -1))
    if is_still:
        scaled[:, :, 1:] = scaled[:, :, :1]
    mean, std = (torch.tensor(level)[:, None, None] for level in levels)
    expected = pair.expected(((127.5 * scaled + 127.5 - mean) / std).flatten(1), IMAGES)
    given = (scaled[:, :, 0] if is_still else scaled).flatten(1)
    assert error(pair.actual(given, IMAGES), expected) < TOLERANCE
    unread = make_pair(replace(config, pixel_std=(127.5,)), tmp_path)
    assert error(unread.actual(given, IMAGES), expected) > 4 * TOLERANCE


def test_a_grid_larger_than_the_table(small: Pair) -> None:
    grids: list[Grid] = [(1, 64, 96)]
    patches = small.patches(grids)
    assert error(small.actual(patches, grids), small.expected(patches, grids)) < TOLERANCE


def test_the_table_itself_at_its_own_size(small: Pair) -> None:
    side = 8
    rows, columns = positions.merge_block_order(side, side, 2)
    table = small.ours.pos_embed.weight
    found = positions.interpolate(table, side, side, rows, columns)
    assert torch.equal(found, table[rows * side + columns])


@pytest.mark.parametrize("skipped", [0, 3])
def test_gemms_that_add_the_residual_agree(
    pair: Pair, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of many patches, where a GEMM's epilogue adds the residual: in all of them, or in
    all but every third, which the next norm adds.
    """
    asked: list[int] = []

    def linear_add(
        self: object, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor
    ) -> Tensor | None:
        asked.append(len(x))
        out = torch.nn.functional.linear(x, weight, bias)
        if skipped and len(asked) % skipped == 0:
            return out
        residual += out
        return None

    monkeypatch.setattr(type(pair.ours.ops), "linear_add", linear_add)
    patches = pair.patches(IMAGES)
    assert error(pair.actual(patches, IMAGES), pair.expected(patches, IMAGES)) < TOLERANCE
    assert len(asked) == 2 * pair.config.depth


def test_features_come_as_their_blocks_are_done(small: Pair) -> None:
    grids: list[Grid] = [(1, 4, 4)]
    with torch.inference_mode():
        embedded = small.ours.patch_embed(small.patches(grids))
        features = small.ours.features(embedded, small.ours.layout(grids))
        assert [feature for feature, _ in features] == [1, 2, 0]


def test_positions_are_evicted_when_they_take_too_much(small: Pair) -> None:
    cache = positions.PositionCache(small.ours.pos_embed.weight, 32, 2, max_bytes=20_000)
    frames = [(2 * n, 4) for n in range(1, 9)]
    whole = cache.of(frames)
    assert cache._cached_bytes <= 20_000 and len(whole.embeddings) == sum(h * w for h, w in frames)
    again = positions.PositionCache(small.ours.pos_embed.weight, 32, 2).of(frames)
    assert torch.equal(whole.embeddings, again.embeddings) and torch.equal(whole.cos, again.cos)


Break = Callable[[pytest.MonkeyPatch, Pair], Pair]


def _swap_gelu(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    original = torch.nn.functional.gelu
    patch.setattr(qwen3_vl.F, "gelu", lambda x, approximate="tanh": original(x, approximate="tanh"))
    return pair


def _exact_gelu_for_quick(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(qwen2_vl.torch, "sigmoid", lambda x: (x / 1.702 / 2**0.5).erf() / 2 + 0.5)
    return pair


def _full_attention(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(pair.ours, "spec", replace(pair.config, full_attention_blocks=(0, 1, 2, 3)))
    return pair


def _raster_windows(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    """Windows of the right sizes, with the tokens in the order of rows."""
    original = window_layout.windows_of

    def windows_of(*sizes: int) -> window_layout.Windows:
        found = original(*sizes)
        return found._replace(order=np.arange(len(found.order)))

    patch.setattr(window_layout, "windows_of", windows_of)
    return pair


def _without_the_norm_behind_the_blocks(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    norm: Any = pair.ours.post_layernorm
    norm.weight.data.fill_(1.0)
    return pair


def _not_put_back(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    original = qwen2_5_vl.batch_layout

    def batch_layout(*arguments) -> window_layout.WindowLayout:
        found = original(*arguments)
        return found._replace(inverse=torch.arange(len(found.order)))

    patch.setattr(qwen2_5_vl, "batch_layout", batch_layout)
    return pair


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("Qwen2-VL, 3 heads of 16", _exact_gelu_for_quick),
        ("PaddleOCR-VL, 3 heads of 16", _without_the_norm_behind_the_blocks),
        ("Qwen2.5-VL, windows of 4", _full_attention),
        ("Qwen2.5-VL, windows of 4", _raster_windows),
        ("Qwen2.5-VL, windows of 4", _not_put_back),
    ],
)
def test_control_a_wrong_tower_of_another_kind_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Break, tmp_path: Path
) -> None:
    pair = make_pair(CONFIGS[name], tmp_path)
    patches = pair.patches(IMAGES)
    expected = pair.expected(patches, IMAGES)
    assert error(broken(monkeypatch, pair).actual(patches, IMAGES), expected) > 4 * TOLERANCE


def _raster_order(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(
        positions, "merge_block_order",
        lambda h, w, _: (torch.arange(h * w) // w, torch.arange(h * w) % w),
    )  # fmt: skip
    pair.ours.reset_buffers(torch.device("cpu"))
    return pair


def _other_taps(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(pair.ours, "spec", replace(pair.config, deepstack_indexes=(1, 3)))
    return pair


def _unrotated(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(pair.ours.ops, "rotary", lambda x, cos, sin: x)
    return pair


def _one_segment(patch: pytest.MonkeyPatch, pair: Pair) -> Pair:
    patch.setattr(
        positions, "BatchSegments", lambda lengths, device: BatchSegments([sum(lengths)], device)
    )
    return pair


@pytest.fixture
def restored_positions(small: Pair) -> Iterator[None]:
    small.ours.reset_buffers(torch.device("cpu"))
    yield
    small.ours.reset_buffers(torch.device("cpu"))


@pytest.mark.usefixtures("restored_positions")
@pytest.mark.parametrize(
    "broken", [_swap_gelu, _raster_order, _other_taps, _unrotated, _one_segment]
)
def test_control_a_wrong_tower_is_noticed(
    monkeypatch: pytest.MonkeyPatch, small: Pair, broken: Break
) -> None:
    patches = small.patches(IMAGES)
    expected = small.expected(patches, IMAGES)
    actual = broken(monkeypatch, small).actual(patches, IMAGES)
    assert error(actual, expected) > 4 * TOLERANCE
