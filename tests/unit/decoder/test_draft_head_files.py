"""Layers for multi-token prediction are read from files of every format, tensor by tensor, or the
start is refused by name. Their drafts change no answer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.families import read_spec
from services.common.model_spec import UnsupportedOption
from services.common.nn.checkpoint import Checkpoint, CheckpointError
from services.common.nn.linear import Linear
from services.common.nn.weights import load_weights
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine_options import speculation_of
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.draft_head_files import (
    add_draft_head,
    quantize_layer,
    round_output,
    with_draft_head,
)
from services.decoder.models.transformer import Transformer
from services.decoder.operations.ops import PlainOps
from services.decoder.settings import DecoderSettings
from tests.decoder_harness import Harness, write_draft_head, write_hybrid
from tests.engine_harness import Untimed
from tests.fp8_checkpoints import MODELOPT, compressed, write

_IGNORED = ["lm_head", r"re:.*visual\..*"]
# Configurations of files whose head is not quantized, and one of files whose head is.
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "ignored by a pattern": (
        "compressed-channel", compressed(ignore=[*_IGNORED, "re:^mtp.*"]), False
    ),
    "ignored by fused names": (
        "compressed-channel",
        compressed(ignore=[*_IGNORED, "mtp.layers.0.self_attn.qkv_proj", "mtp.fc"]), False,
    ),
    "not mentioned": ("modelopt", MODELOPT, False),
    "quantized": ("compressed-channel", compressed(), True),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft_head(write_hybrid(tmp_path_factory.mktemp("head")))


def tokens_of(directory: Path, *, max_drafts: int = 0, **options: Any) -> list[int]:
    """Greedy tokens of a prompt."""
    harness = Harness(directory, max_drafts=max_drafts, draft_head=max_drafts > 0, **options)
    engine = Engine(harness.runner, overlap=False, max_drafts=max_drafts, step_cost=Untimed())
    prompt = np.arange(20, dtype=np.int32).tobytes()
    engine.add(AddSequence(0, prompt, b"", 0, [], SamplingParams(max_tokens=30)))
    found: list[int] = []
    while engine.has_work:
        done = engine.step()
        found += [t for event in (done.events if done else []) for t in event.token_ids]
    stats = engine.stats().drafts
    assert (stats is not None and stats.num_drafts > 0) == (max_drafts > 0)
    harness.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_read_from_quantized_files(source: Path, tmp_path: Path, layout: str) -> None:
    name, config, is_quantized = LAYOUTS[layout]

    def is_written(module: str) -> bool:
        is_own = module.startswith("mtp.layers") and is_quantized
        is_gate = module.endswith(("in_proj_a", "in_proj_b", "conv1d"))
        return is_own or (module.startswith("model.language_model.layers") and not is_gate)

    directory = tmp_path / "quantized"
    write(source, directory, name, config=config, modules=is_written)
    harness = Harness(directory, max_drafts=3, draft_head=True)
    head, files = harness.model.mtp, load_file(source / "model.safetensors")
    assert torch.equal(head.fc.weight, files["mtp.fc.weight"])
    down = head.layers[0].mlp.down_proj
    assert (down.weight_format == "fp8_channel") == is_quantized
    if not is_quantized:
        assert torch.equal(down.weight, files["mtp.layers.0.mlp.down_proj.weight"])
    assert harness.model.layers[0].mlp.down_proj.weight_format != "unquantized"
    harness.close()
    assert tokens_of(directory, max_drafts=3) == tokens_of(directory)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_each_tensor_of_a_head_is_read_or_named(source: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for file in source.glob("*processor*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(source / "model.safetensors")
    if change == "missing":
        del tensors["mtp.layers.0.self_attn.q_norm.weight"]
    else:
        tensors["mtp.layers.1.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.[01]\.self_attn\.q_norm\.weight"):
        Harness(tmp_path, max_drafts=3, draft_head=True)
    assert len(tokens_of(tmp_path)) == 30  # without speculation, the head is ignored


def test_a_model_without_a_head_is_refused_with_what_to_use_instead(
    source: Path, tmp_path: Path
) -> None:
    stripped = write_hybrid(tmp_path)
    with pytest.raises(UnsupportedOption, match=r"mtp_num_hidden_layers 0.* --speculation lookup"):
        Harness(stripped, max_drafts=3, draft_head=True)
    (stripped / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(UnsupportedOption, match=r"no tensors mtp\.\*.* --speculation lookup"):
        Harness(stripped, max_drafts=3, draft_head=True)


def test_a_head_is_read_from_another_model_of_the_same_sizes(source: Path, tmp_path: Path) -> None:
    stripped = write_hybrid(tmp_path / "stripped", seed=5)
    harness = Harness(stripped, max_drafts=3, draft_head=True, draft_head_directory=source)
    files = load_file(source / "model.safetensors")
    assert torch.equal(harness.model.mtp.fc.weight, files["mtp.fc.weight"])
    assert not torch.equal(
        harness.model.embed_tokens.weight, files["model.language_model.embed_tokens.weight"]
    )
    harness.close()
    other = write_draft_head(write_hybrid(tmp_path / "other", intermediate_size=64))
    with pytest.raises(UnsupportedOption, match="other sizes: intermediate_size 64, not 48"):
        Harness(stripped, max_drafts=3, draft_head=True, draft_head_directory=other)


def test_drafts_with_keys_and_values_in_fp8_change_no_answer(source: Path) -> None:
    """The layer's scales are measured, since no files have them."""
    harness = Harness(source, max_drafts=3, draft_head=True, fp8_cache=True)
    scales = harness.model.mtp.attention.kv_scales
    harness.close()
    assert scales.shape == (2, 2) and (scales > 0).all()
    found = tokens_of(source, max_drafts=3, fp8_cache=True)
    assert found == tokens_of(source, fp8_cache=True)


def test_auto_takes_the_head_that_the_files_have(source: Path, tmp_path: Path) -> None:
    def chosen(model: Path, device: str = "cuda:0", **values: object) -> str:
        settings = DecoderSettings.model_validate({"speculation": "auto", "model": model} | values)
        return speculation_of(settings, device)

    assert [chosen(source), chosen(source, "cpu")] == ["mtp", "lookup"]
    assert chosen(source, kv_host_bytes=1 << 20) == "lookup"
    assert chosen(source, speculation="off") == "off"
    stripped = write_hybrid(tmp_path / "stripped")
    assert chosen(stripped) == "lookup"
    (stripped / "config.json").write_text((source / "config.json").read_text())
    assert chosen(stripped) == "lookup"


def test_a_head_computes_in_bfloat16(source: Path) -> None:
    """Sums of other batches round differently, so that answers may differ."""
    assert len(tokens_of(source, max_drafts=3, dtype="bfloat16")) == 30


@pytest.mark.parametrize(("vocab_size", "of_output"), [(512, "w4a16"), (528, "fp8_channel")])
def test_drafts_read_rounded_weights_and_the_model_its_own(
    tmp_path: Path, vocab_size: int, of_output: str
) -> None:
    """As on a GPU: the layer's matrices in 8 bits, and a copy of the output layer in 4, or in 8 if
    its sizes are not those of tiles.
    """
    directory = write_draft_head(write_hybrid(tmp_path, hidden_size=128, vocab_size=vocab_size))
    spec = with_draft_head(read_spec(directory))
    checkpoint = Checkpoint.open(directory)
    with torch.device("meta"):
        model = Transformer(spec, backend=None, ops=PlainOps())  # type: ignore[arg-type]
        add_draft_head(model, spec, None, checkpoint)  # type: ignore[arg-type]
    quantize_layer(model, checkpoint)
    load_weights(
        model, checkpoint, model.weight_map, device="cpu", dtype=torch.float32, spec=spec.checkpoint
    )
    round_output(model)
    formats = {
        name: layer.weight_format
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
    }
    rounded = {name for name, each in formats.items() if each == "fp8_channel"}
    of_layer = {name for name in formats if name.startswith("mtp.")} - {"mtp.lm_head"}
    assert {"mtp.fc", "mtp.layers.0.mlp.down_proj"} < of_layer
    assert rounded - {"mtp.lm_head"} == of_layer and formats["mtp.lm_head"] == of_output
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    head, own = model.get_submodule("mtp"), model.lm_head
    assert isinstance(head, DraftHead) and own is not None
    exact = model.logits(x)
    found = head.logits(x, model)
    error = (found - exact).norm() / exact.norm()
    if of_output == "w4a16":
        best, most_likely = exact[:64].argmax(1), head.most_likely(x[:64], model)
        is_right, was_right = most_likely == best, found[:64].argmax(1) == best
        assert was_right.sum() < 60 < 62 <= is_right.sum(), "the model's own rows do not decide"
        assert torch.equal(head.most_likely(x, model), exact.argmax(1).int())
        assert 0.05 < error < 0.2
    else:
        assert torch.equal(head.most_likely(x, model), found.argmax(1).int())
        assert 0 < error < 0.04  # three bits behind the point
    files = load_file(directory / "model.safetensors")
    assert torch.equal(own.weight, files["lm_head.weight"])


def test_slots_of_adapters_take_no_memory_for_the_layer(source: Path) -> None:
    """Its drafts are those of the base model, so an adapter's change of it would do nothing."""
    model = Harness(source, draft_head=True, max_drafts=1, max_adapters=1).model
    named = {path for path, each in model.named_modules() if isinstance(each, Linear)}
    changed = {path for path in named if model.get_submodule(path).adapters is not None}
    assert changed == {path for path in named if not path.startswith("mtp.")} < named
