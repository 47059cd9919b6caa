"""Ranks that read their parts of a checkpoint give the whole model's logits: processes over gloo,
float32, CPU. Tolerance 2e-4, where logits are of the order of 60: each projection back is a sum of
partial sums instead of one.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from kernels.gemm.int8_weight import Int8Weight, w8a8_linear
from services.common.nn.checkpoint import Reader
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.int8 import Int8Linear
from services.common.nn.linear import Linear
from tests import fp4_checkpoints, int8_checkpoints, mxfp8_checkpoints, packed_checkpoints
from tests.cases import THOROUGH
from tests.fp8_checkpoints import FP8_BLOCK, write
from tests.late_interaction import DIMENSIONS, Late
from tests.parity import rank_answers, rank_main
from tests.parity.mtp_oracle import make_with_head
from tests.parity.oracle import EOS_ID, EXPERTS, VOCAB_SIZE, Tiny, largest_difference, make_oracle
from tests.parity.qwen3_5_oracle import EXPERTS as SHARED_EXPERTS
from tests.parity.qwen3_5_oracle import Tiny as Hybrid
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.text_oracle import DEFAULT, _config, make_text_oracle
from tests.search_checkpoints import EMBED_FILES, SCORE_FILES, write_files

# isort: split
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.thorough, pytest.mark.timeout(400),
]  # fmt: skip

MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
WIDE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "eos_token_id": EOS_ID,
    "max_position_embeddings": 2048, "rope_parameters": DEFAULT,
}  # fmt: skip
WIDE_MOE = WIDE | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "mlp_only_layers": [1], "norm_topk_prob": True,
}  # fmt: skip
MAKERS: dict[str, Callable[[Path], object]] = {
    "qwen3": lambda path: make_text_oracle(_config(Qwen3Config, 8, 4, 64, head_dim=16), path),
    "qwen3-one-kv-head-tied": lambda path: make_text_oracle(
        _config(Qwen3Config, 4, 1, 64, head_dim=32, tie_word_embeddings=True), path
    ),
    "qwen2-biases": lambda path: make_text_oracle(_config(Qwen2Config, 4, 2, 64), path),
    "llama-biases": lambda path: make_text_oracle(
        _config(LlamaConfig, 4, 4, 64, attention_bias=True, mlp_bias=True), path
    ),
    "qwen3-moe": lambda path: make_text_oracle(
        _config(Qwen3MoeConfig, 4, 2, 64, head_dim=16, norm_topk_prob=True, **MOE), path
    ),
    "qwen3-vl": lambda path: make_oracle(
        Tiny(4, 2, 32, (6, 5, 5), (0, 2), True), path
    ),
    "qwen3-vl-moe-transposed": lambda path: make_oracle(
        Tiny(4, 2, 32, (6, 5, 5), (0, 2), False, experts=EXPERTS), path
    ),
    "qwen2-vl": lambda path: make_oracle(
        Tiny(4, 4, 16, (2, 3, 3), (), True, family="qwen2_vl"), path
    ),
    "qwen2.5-vl": lambda path: make_oracle(
        Tiny(4, 2, 16, (2, 3, 3), (), False, family="qwen2_5_vl"), path
    ),
    "paddleocr-vl-biases": lambda path: make_oracle(
        Tiny(4, 2, 16, (2, 3, 3), (), True, hidden=48, family="paddleocr_vl"), path
    ),
    "qwen3.5": lambda path: make_qwen3_5(Hybrid(4, 2, 32, (2, 1, 1), 2, 4, 16, 16, True), path),
    "qwen3.5-head": lambda path: make_with_head(
        Hybrid(4, 2, 32, (2, 1, 1), 2, 4, 16, 16, False, layers=4), path
    ),
    "qwen3.5-one-kv-head": lambda path: make_qwen3_5(
        Hybrid(2, 1, 64, (3, 3, 2), 2, 2, 16, 24, False, partial=0.25), path
    ),
    "qwen3.5-moe": lambda path: make_qwen3_5(
        Hybrid(4, 2, 32, (2, 1, 1), 2, 4, 16, 16, False, experts=SHARED_EXPERTS), path
    ),
}  # fmt: skip


def make_fp8(directory: Path, name: str, fields: dict, **options: Any) -> None:
    kind = Qwen3MoeConfig if "num_experts" in fields else Qwen3Config
    source = directory.parent / f"source of {directory.name}"
    make_text_oracle(kind(**fields), source)
    config = FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"]}
    write(
        source, directory, name, config=config if name == "fp8-block" else None,
        modules=lambda module: "layers" in module and not module.endswith("mlp.gate"), **options,
    )  # fmt: skip


def made_by(writer: Callable, directory: Path, name: str) -> None:
    source = directory.parent / f"source of {directory.name}"
    make_text_oracle(Qwen3Config(**WIDE), source)
    writer(source, directory, name)


def make_packed(directory: Path, name: str, fields: dict) -> None:
    kind = Qwen3MoeConfig if "num_experts" in fields else Qwen3Config
    source = directory.parent / f"source of {directory.name}"
    make_text_oracle(kind(**fields), source)
    packed_checkpoints.write(
        source, directory, name,
        modules=lambda module: "layers" in module and not module.endswith("mlp.gate"),
    )  # fmt: skip


def make_fp8_hybrid(directory: Path) -> None:
    """Queries, keys and values of linear attention are one module, of whose blocks ranks have some
    of each.
    """
    source = directory.parent / f"source of {directory.name}"
    sizes = Hybrid(4, 2, 128, (6, 5, 5), 2, 4, 128, 64, False, partial=0.25, hidden=256, layers=4)
    make_qwen3_5(sizes, source)
    plain = ("mlp", "in_proj_a", "in_proj_b", "conv1d")
    write(
        source, directory, "fp8-block",
        modules=lambda module: "layers" in module and "mtp" not in module
        and not any(name in module for name in plain),
        config=FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "re:.*mtp.*", "model.visual"]},
    )  # fmt: skip


MAKERS |= {
    "qwen3.5-fp8-block": make_fp8_hybrid,
    "fp8-channel-experts": lambda path: make_fp8(path, "compressed-channel", WIDE_MOE),
    "fp8-block": lambda path: make_fp8(path, "fp8-block", WIDE),
    "fp8-channel": lambda path: make_fp8(path, "compressed-channel", WIDE),
    "fp8-tensor": lambda path: make_fp8(path, "modelopt", WIDE),
    "modelopt-block": lambda path: make_fp8(path, "modelopt-block", WIDE),
    "modelopt-channel": lambda path: make_fp8(path, "modelopt-channel", WIDE),
    "modelopt-block-experts": lambda path: make_fp8(path, "modelopt-block", WIDE_MOE),
    "fp8-block-experts": lambda path: make_fp8(path, "fp8-block", WIDE_MOE),
    "int8": lambda path: made_by(int8_checkpoints.write, path, "int8"),
    "nvfp4": lambda path: made_by(fp4_checkpoints.write, path, "nvfp4-inputs"),
    "mxfp4": lambda path: made_by(fp4_checkpoints.write, path, "mxfp4"),
    "mxfp8": lambda path: made_by(mxfp8_checkpoints.write, path, "mxfp8-inputs"),
    "packed-ct": lambda path: make_packed(path, "ct-64-zeros", WIDE),
    "packed-awq": lambda path: make_packed(path, "awq-64", WIDE),
    "packed-gptq": lambda path: make_packed(path, "gptq-v2-32-8bit", WIDE),
    "packed-ct-experts": lambda path: make_packed(path, "ct-64-zeros", WIDE_MOE),
    "packed-gptq-experts": lambda path: make_packed(path, "gptq-64", WIDE_MOE),
}


def make_search(directory: Path, files: dict[str, object]) -> None:
    """Untied: the rows of "yes" and "no" are on two ranks."""
    make_text_oracle(_config(Qwen3Config, 8, 4, 64, head_dim=16), directory)
    write_files(directory, files)


MAKERS |= {
    "vectors": lambda path: make_search(path, EMBED_FILES),
    "scores": lambda path: make_search(path, SCORE_FILES),
    "vectors of tokens": lambda path: Late(
        make_oracle(Tiny(4, 2, 32, (6, 5, 5), (0, 2), False), path)
    ),
}
SEARCH = ["vectors", "scores", "vectors of tokens"]
REFUSED: dict[str, tuple[dict, str]] = {
    "blocks": (WIDE | {"intermediate_size": 384}, "gate_proj.weight_scale: 192 of 384 cut"),
    "kv heads": (WIDE | {"num_attention_heads": 6, "num_key_value_heads": 3}, "num_kv_heads 3"),
}


# An engine answers with these.
ENGINES = ["qwen3-vl", "qwen3.5-head"]
FOUR = ["qwen3-one-kv-head-tied"]  # more ranks than key heads
# What is cut in the same way as one of the others is cut every night.
_NIGHTLY = {
    "qwen2-biases", "qwen2-vl", "qwen3-vl-moe-transposed", "qwen3.5-one-kv-head", "fp8-channel",
    "modelopt-channel", "modelopt-block-experts",
    "fp8-channel-experts", "fp8-block-experts", "nvfp4", "mxfp8", "packed-awq",
    "packed-gptq", "packed-ct-experts",
}  # fmt: skip
assert MAKERS.keys() >= _NIGHTLY
NAMES = [name for name in MAKERS if THOROUGH or name not in _NIGHTLY]
if THOROUGH:
    ENGINES += ["qwen3.5", "packed-ct", "qwen3", "qwen3.5-moe", "qwen3-moe", "fp8-block"]
    FOUR += ["qwen2-biases"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes' logits of all checkpoints, in their directories."""
    root = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        MAKERS[name](root / name)
    for name, (fields, _) in REFUSED.items():
        make_fp8(root / name, "fp8-block", fields)
    for name in ("qwen3", "qwen3.5-moe"):
        shutil.copytree(root / name, root / f"{name} silent")
        (root / f"{name} silent" / "silent").touch()
    for name in (*ENGINES, *SEARCH):
        (root / name / "answers").touch()
    for name in FOUR:
        shutil.copytree(root / name, root / f"{name} four")
    of_two = [*NAMES, *REFUSED, "qwen3 silent", "qwen3.5-moe silent"]
    groups = {2: of_two, 4: [f"{name} four" for name in FOUR]}
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.parity.rank_main", str(root),
            *(f"{count}={','.join(names)}" for count, names in groups.items()),
        ],
        stderr=subprocess.PIPE, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return root


def together(directory: Path) -> Tensor:
    return load_file(directory / "logits-0.safetensors")["logits"]


# A language model with a head does not read the files of ColQwen3.
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("int8", "vectors of tokens")])
def test_two_ranks_give_the_whole_models_logits(ranks: Path, name: str) -> None:
    expected = rank_main.logits(ranks / name, ALONE)
    assert expected.abs().max() > 10
    # 2.1e-4 was seen with a draft head.
    tolerance = 2 * TOLERANCE if name.endswith("-head") else TOLERANCE
    assert largest_difference(together(ranks / name), expected) < tolerance


def test_ranks_quantize_the_inputs_that_they_hold(
    ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's half of a token has a scale of its own before projections back, and nowhere else.
    Tolerance as in test_int8.py; one scale for both halves makes a difference of more than 1.
    """
    assert largest_difference(together(ranks / "int8"), by_halves(ranks / "int8", monkeypatch)) < (
        0.05
    )
    monkeypatch.undo()
    whole = rank_main.logits(ranks / "int8", ALONE)
    assert largest_difference(together(ranks / "int8"), whole) > CLEARLY_WRONG


def by_halves(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The whole model's logits, where projections back add up those of two halves."""
    apply = Int8Linear.apply

    def halved(self: Int8Linear, layer: Linear, x: Tensor) -> Tensor:
        if list(layer.parts) != [""]:  # queries, keys and values; gate and up
            return apply(self, layer, x)
        weight, halves = self.weight(layer), x.chunk(2, -1)
        matrices = weight.values.chunk(2, -1)
        return sum(
            w8a8_linear(half, Int8Weight(matrix, weight.scale))
            for half, matrix in zip(halves, matrices, strict=True)
        )  # type: ignore[return-value]

    monkeypatch.setattr(Int8Linear, "apply", halved)
    return rank_main.logits(directory, ALONE)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_two_ranks_answers_as_one(ranks: Path, name: str) -> None:
    """Prompts in chunks, prefixes that are known, sequences that are preempted, and the logprobs of
    a prompt: each step reaches the other rank as bytes.
    """
    found = json.loads((ranks / name / "answers").read_text())
    expected = rank_answers.answers(ranks / name)
    assert found["tokens"] == expected["tokens"] and len(found["tokens"]) == 10
    assert found["prompt"] == pytest.approx(expected["prompt"], abs=TOLERANCE)
    assert len(found["prompt"]) == 20 + 9 * 4 - 1
    assert found["preemptions"] > 0 and found["hits"][1] > found["hits"][0]
    assert found["drafts"] == expected["drafts"] and found["offered"] == expected["offered"]
    assert (len(found["offered"]) > 3) == ("head" in name)
    assert found["on_device"] == expected["on_device"]
    assert (found["on_device"] > 5) == ("head" in name)
    if "qwen3.5" not in name:  # without recurrent states
        num_drafts, num_accepted = found["drafts"]
        assert 0 < num_accepted < num_drafts


@pytest.mark.parametrize("name", SEARCH)
def test_the_results_of_a_search_over_two_ranks_are_those_of_one(ranks: Path, name: str) -> None:
    found = json.loads((ranks / name / "answers").read_text())
    expected = rank_answers.answers(ranks / name)["results"]
    assert len(expected) == 10 and found["results"].keys() == expected.keys()
    for number, result in expected.items():
        num_tokens = 20 + 9 * (int(number) % 5)
        sizes = {"vectors": 64, "scores": 1, "vectors of tokens": num_tokens * DIMENSIONS}
        assert len(result) == sizes[name]
        assert found["results"][number] == pytest.approx(result, abs=TOLERANCE)


@pytest.mark.parametrize("name", FOUR)
def test_key_heads_are_replicated(ranks: Path, name: str) -> None:
    expected = rank_main.logits(ranks / name, ALONE)
    assert largest_difference(together(ranks / f"{name} four"), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "qwen3.5-moe", "fp8-block"])
def test_a_rank_reads_its_part_alone(
    ranks: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sizes = Reader.read, list[int]()

    def counted(*arguments: object) -> Tensor:
        sizes.append((values := read(*arguments)).numel())  # type: ignore[arg-type]
        return values

    monkeypatch.setattr(Reader, "read", counted)
    totals: list[int] = []
    for count in (1, 2):
        sizes.clear()
        model = rank_main.loaded(ranks / name, Ranks(0, count))
        totals.append(sum(sizes))
        assert totals[-1] == sum(parameter.numel() for parameter in model.parameters())
    assert totals[1] <= 0.7 * totals[0]  # embedding, norms and routers are whole


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5-moe"])
def test_a_missing_sum_would_be_seen(ranks: Path, name: str) -> None:
    expected = rank_main.logits(ranks / name, ALONE)
    assert largest_difference(together(ranks / f"{name} silent"), expected) > CLEARLY_WRONG


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(ranks: Path, name: str) -> None:
    for rank in range(2):
        assert REFUSED[name][1] in (ranks / name / f"refused-{rank}").read_text()
