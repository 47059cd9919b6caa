"""Which files count, whether the head is tied, and prefixes: our logits are those of the model that
transformers loads from the same directory, float32, CPU. Tolerance as in test_language_model.py.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.common.nn.checkpoint import CheckpointError
from tests.decoder_harness import Harness
from tests.parity.oracle import CONFIGS as VISION_CONFIGS
from tests.parity.oracle import Oracle, largest_difference, make_oracle
from tests.parity.qwen3_5_oracle import CONFIGS as HYBRID_CONFIGS
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.text_oracle import CONFIGS as TEXT_CONFIGS
from tests.parity.text_oracle import make_text_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = "lm_head.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = dict[str, Tensor]
MAKERS: dict[str, Callable[[Path], Oracle]] = {
    "text": lambda path: make_text_oracle(TEXT_CONFIGS["qwen3-odd-heads-tied"](), path),
    "vision": lambda path: make_oracle(VISION_CONFIGS["gqa1-hd16-one-tap"], path),
    "hybrid": lambda path: make_qwen3_5(HYBRID_CONFIGS["repeated-twice-tied"], path),
}


@pytest.fixture(params=MAKERS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    MAKERS[request.param](tmp_path)
    return tmp_path


def of(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def write(directory: Path, made: Tensors, layout: str = "whole") -> None:
    """Writes the files anew. Layouts: whole, shards, whole beside a stale index with its shards or
    without, shards beside a file that the index does not name.
    """
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    if layout.startswith("whole"):
        save_file(made, directory / "model.safetensors", {"format": "pt"})
    if layout == "whole":
        return
    names = sorted(made)
    index = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    if layout == "whole, index alone":
        return
    old = {name: tensor * 1.25 for name, tensor in made.items()} if "old" in layout else made
    for shard in SHARDS:
        part = {name: old[name] for name in names if index[name] == shard}
        save_file(part, directory / shard, {"format": "pt"})
    if layout == "shards and more":
        save_file({"other": torch.zeros(1)}, directory / "consolidated.safetensors")


def set_tied(directory: Path, tied: bool | None) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", config)):
        part.pop("tie_word_embeddings", None)
        if tied is not None:
            part["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config))


@torch.no_grad()
def error(directory: Path) -> float:
    """The largest difference of a prompt's logits from transformers'."""
    config = json.loads((directory / "config.json").read_text())
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.arange(40) * 7 % 300
    harness = Harness(directory)
    ours = harness.prompt_logits(harness.start(ids.tolist()))
    return largest_difference(ours, model(input_ids=ids[None]).logits[0])


def embedding_of(made: Tensors) -> str:
    return next(name for name in made if name.endswith("embed_tokens.weight"))


@pytest.mark.parametrize("head", ["equal", "another", "none"])
@pytest.mark.parametrize("tied", [True, False, None])
def test_the_files_decide_whether_the_head_is_tied(
    directory: Path, tied: bool | None, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = of(directory)
    table = made[embedding_of(made)]
    made.pop(HEAD, None)
    if head != "none":
        made[HEAD] = table.clone() if head == "equal" else table.flip(0).contiguous()
    write(directory, made)
    set_tied(directory, tied)
    if head == "none" and not tied:  # transformers makes random numbers of it
        with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
            Harness(directory)
        return
    with caplog.at_level(logging.WARNING):
        assert error(directory) < TOLERANCE
    contradicts = bool(tied) and head == "another"
    assert ("tie_word_embeddings" in caplog.text) == contradicts


LAYOUTS = ["shards", "whole, index alone", "whole, old shards", "shards and more"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_files_count_in_transformers_order(directory: Path, layout: str) -> None:
    made = of(directory)
    write(directory, made, layout)
    assert error(directory) < TOLERANCE


def test_old_shards_would_be_seen(directory: Path) -> None:
    made = of(directory)
    write(directory, made, "whole, old shards")
    before = Harness(directory)
    (directory / "model.safetensors").unlink()
    after = Harness(directory)
    first, second = (each.prompt_logits(each.start([1, 2, 3])) for each in (before, after))
    assert largest_difference(first, second) > CLEARLY_WRONG


def test_a_text_model_may_lie_where_it_lies_in_a_larger_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """People extract the language model of a Qwen3.5 and keep its names."""
    make_qwen3_5(HYBRID_CONFIGS["repeated-twice-tied"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    path.write_text(json.dumps(text | {"tie_word_embeddings": True}))
    made = {name: tensor for name, tensor in of(tmp_path).items() if "language" in name}
    assert embedding_of(made) == "model.language_model.embed_tokens.weight"
    for prefix in ("model.language_model.", "model.", ""):
        old = embedding_of(made).removesuffix("embed_tokens.weight")
        made = {prefix + name.removeprefix(old): tensor for name, tensor in made.items()}
        write(tmp_path, made)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert error(tmp_path) < TOLERANCE, prefix
        assert ("not model.*" in caplog.text) == (prefix != "model.")


def test_two_language_models_are_refused(directory: Path) -> None:
    made = of(directory)
    name = embedding_of(made)
    table = made.pop(name)
    write(directory, made | {"a.embed_tokens.weight": table, "b.embed_tokens.weight": table + 1})
    with pytest.raises(CheckpointError, match=r"a\.embed_tokens\.weight"):
        Harness(directory)
