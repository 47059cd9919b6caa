"""Mixtures of experts agree with Hugging Face's, float32, CPU: routing, files, shared expert.

Whole models are in test_text_families.py, test_language_model.py and test_same_answers.py; here is
what experts add to them. Tolerance as there.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels import plain
from services.common.model_spec import MoESpec, RopeSpec, TextSpec
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.collectives import ALONE
from services.common.nn.experts import Experts, Router
from services.common.nn.layers import RMSNorm
from services.common.nn.weights import materialize
from services.decoder.models.moe import MoE
from services.decoder.models.stream import Stream
from services.decoder.operations.ops import PlainOps
from tests.decoder_harness import Harness
from tests.parity.oracle import EXPERTS, Oracle, Tiny, make_oracle
from tests.parity.oracle import largest_difference as error
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.text_oracle import CONFIGS, make_text_oracle

# isort: split
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 64
SIZES = {"twice": 32, "equal": 64, "other": 40}  # the experts' size beside HIDDEN
Layout = Callable[[str, Tensor], dict[str, Tensor]]


def fused(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As transformers has it in memory, and in files since version 5."""
    return {name: tensor}


def transposed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As the files of Qwen3-VL-MoE."""
    return {name: tensor.mT}


def per_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As the files of Qwen3-MoE."""
    prefix, _, stack = name.rpartition(".")
    found = {}
    for index, matrix in enumerate(tensor):
        parts = {"down_proj": matrix}
        if stack == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
        found |= {f"{prefix}.{index}.{part}.weight": rows for part, rows in parts.items()}
    return found


LAYOUTS = {"fused": fused, "transposed": transposed, "per expert": per_expert}


def rewrite(directory: Path, change: Layout) -> None:
    """Replaces the fused tensors of experts in a checkpoint's one file."""
    path = directory / "model.safetensors"
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        made |= change(name, tensor) if "experts" in name else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, path)


def tiny(size: int) -> Tiny:
    return Tiny(
        2, 1, 32, (6, 5, 5), (0,), True, hidden=HIDDEN, layers=2,
        experts=EXPERTS | {"moe_intermediate_size": size},
    )  # fmt: skip


def logits_error(oracle: Oracle, harness: Harness | None = None) -> float:
    """The largest difference of an image prompt's logits from Hugging Face's."""
    prompt = oracle.prompt(9, (4, 6), 7)
    answer, ours = oracle.answer(prompt), harness or Harness(oracle.directory)
    images = list(zip(prompt.offsets, answer.embeddings, strict=True))
    sequence = ours.start(
        prompt.token_ids, positions=answer.positions, delta=answer.delta, images=images
    )
    return error(ours.prompt_logits(sequence), answer.logits)


# Files.


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_of_files_agrees(layout: Layout, size: int, tmp_path: Path) -> None:
    oracle = make_oracle(tiny(size), tmp_path)
    rewrite(tmp_path, layout)
    assert logits_error(oracle) < TOLERANCE


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_transposed_experts_are_cast(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = make_oracle(tiny(size), tmp_path)
    rewrite(tmp_path, lambda name, tensor: {name: tensor.mT.to(dtype)})
    with torch.no_grad():
        for name, parameter in oracle.model.named_parameters():
            if "experts" in name:
                parameter.copy_(parameter.to(dtype))
    assert logits_error(oracle) < TOLERANCE


def test_transformers_writes_fused_experts(tmp_path: Path) -> None:
    """Should that change, the layouts above are not all that there are."""
    make_oracle(tiny(40), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    shapes = {n.rpartition(".")[2]: tuple(t.shape) for n, t in found.items() if ".experts." in n}
    assert shapes == {"gate_up_proj": (6, 80, 64), "down_proj": (6, 64, 40)}


EXPERT = "model.language_model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            per_expert, lambda made: made.pop(f"{EXPERT}.5.up_proj.weight"),
            r"missing tensors: .*layers\.1\.mlp\.experts\.5\.up_proj\.weight$",
        ),
        (
            per_expert,
            lambda made: made.update({f"{EXPERT}.6.up_proj.weight": torch.ones(40, 64)}),
            r"unexpected tensors: .*experts\.6\.up_proj\.weight$",
        ),
        (
            fused, lambda made: made.pop(f"{EXPERT}.gate_up_proj"),
            r"missing tensors: .*experts\.gate_up_proj$",
        ),
        (
            transposed,
            lambda made: made.update({f"{EXPERT}.gate_up_proj": torch.ones(6, 80, 64)}),
            r"gate_up_proj is \[6, 80, 64\], the model wants \[6, 64, 80\]",
        ),
        (
            fused, lambda made: made.update({f"{EXPERT}.down_proj": torch.ones(5, 64, 40)}),
            r"down_proj is \[5, 64, 40\], the model wants \[6, 64, 40\]",
        ),
        (
            fused,
            lambda made: made.update({f"{EXPERT}.0.up_proj.weight": torch.ones(40, 64)}),
            r"unexpected tensors: .*experts\.0\.up_proj\.weight$",
        ),
        (
            fused, lambda made: made.update({f"{EXPERT}.gate_up_proj_scale_inv": torch.ones(6)}),
            r"unexpected tensors: .*gate_up_proj_scale_inv$",
        ),
        (
            fused, lambda made: made.pop(f"{EXPERT.removesuffix('experts')}gate.weight"),
            r"missing tensors: .*mlp\.gate\.weight$",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_errors(
    layout: Layout, change: Callable, message: str, tmp_path: Path
) -> None:
    make_oracle(tiny(40), tmp_path)
    rewrite(tmp_path, layout)
    path = tmp_path / "model.safetensors"
    made = load_file(path)
    change(made)
    save_file(made, path)
    with pytest.raises(CheckpointError, match=message):
        Harness(tmp_path)


# Controls: what is read or computed wrongly is seen.


@pytest.mark.parametrize(
    "fault",
    [
        lambda name, tensor: {name: tensor.flip(0)},  # of the experts
        lambda name, tensor: {name: tensor.roll(32, 1) if "gate_up" in name else tensor},
        lambda name, tensor: {
            name: tensor.mT.reshape(tensor.shape) if "gate_up" in name else tensor
        },
    ],
    ids=["experts in another order", "up before gate", "transposed"],
)
def test_control_experts(fault: Layout, tmp_path: Path) -> None:
    """With H = 2 * I all shapes fit."""
    oracle = make_oracle(tiny(32), tmp_path)
    rewrite(tmp_path, fault)
    assert logits_error(oracle) > CLEARLY_WRONG


@pytest.mark.parametrize("name", ["qwen3-moe-odd-heads-dense-between", "qwen3-moe-biases-tied"])
def test_control_renormalised_router(name: str, tmp_path: Path) -> None:
    """One config scales the probabilities, the other does not."""
    oracle = make_text_oracle(CONFIGS[name](), tmp_path)
    prompt, harness = oracle.prompt(40), Harness(tmp_path)

    def found() -> float:
        logits = harness.prompt_logits(harness.start(prompt.token_ids))
        return error(logits, oracle.answer(prompt).logits)

    assert found() < TOLERANCE
    routers = [m for m in harness.model.modules() if isinstance(m, Router)]  # type: ignore[attr-defined]
    assert len(routers) == 3
    for router in routers:
        router.normalize = not router.normalize
    assert found() > CLEARLY_WRONG


# Routing.


def test_ties_go_to_the_lowest_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0], [2.0] * 5, [0.0, 0.0, 0.0, 9.0, 0.0]])
    experts, weights = plain.route(logits, 3, normalize=True)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 3]]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))
    assert weights[0, 1] == weights[0, 2] > weights[0, 0]


def test_equal_probabilities_agree(tmp_path: Path) -> None:
    """A router of zeros, as some start training with: which experts it picks is not defined, so
    these are equal, too.
    """
    oracle = make_text_oracle(CONFIGS["qwen3-moe-biases-tied"](), tmp_path)

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("mlp.gate.weight"):
            return torch.zeros_like(tensor)
        return tensor[:1].expand_as(tensor) if ".experts." in name else tensor

    with torch.no_grad():
        for name, parameter in oracle.model.named_parameters():
            parameter.copy_(change(name, parameter.clone()))
    oracle.model.save_pretrained(tmp_path)
    prompt, harness = oracle.prompt(40), Harness(tmp_path)
    logits = harness.prompt_logits(harness.start(prompt.token_ids))
    assert error(logits, oracle.answer(prompt).logits) < TOLERANCE


def test_a_token_that_is_not_finite_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    _, ours = shared_pair(hidden=32)
    x = torch.randn(5, 32)
    x[2] = torch.nan
    found, _ = run(ours, x)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[others], run(ours, x[others])[0])
    assert found[2].isnan().all()


# A layer with a shared expert.


def shared_pair(hidden: int, **changes: object) -> tuple[nn.Module, MoE]:
    config = Qwen3_5MoeTextConfig(
        hidden_size=hidden, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = Qwen3_5MoeSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    text = TextSpec(
        vocab_size=8, hidden_size=hidden, intermediate_size=40, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=32, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4, rotary_dim=32),
        max_position_embeddings=8, tie_word_embeddings=True,
    )  # fmt: skip
    moe = MoESpec(num_experts=7, top_k=3, intermediate_size=24, shared_intermediate_size=40)
    ours = MoE(replace(text, moe=replace(moe, **changes)), ALONE)
    materialize(ours, "cpu", torch.float32)
    theirs = block.state_dict()
    ours.gate.weight.copy_(theirs["gate.weight"])
    for name in ("gate_up_proj", "down_proj"):
        ours.experts.get_submodule(name).weight.copy_(theirs[f"experts.{name}"])
    if ours.shared_expert is not None:
        parts = [theirs[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")]
        ours.shared_expert.gate_up_proj.weight.copy_(torch.cat(parts))
        ours.shared_expert.down_proj.weight.copy_(theirs["shared_expert.down_proj.weight"])
        ours.shared_expert_gate.weight.copy_(theirs["shared_expert_gate.weight"])
    return block, ours


@torch.no_grad()
def run(ours: MoE, x: Tensor) -> Stream:
    """The layer's output for normed inputs, as what is to be added to the residual stream."""
    norm = RMSNorm(x.shape[1], 0.0)
    norm.weight.data.fill_(1.0)
    kernels = replace(PlainOps().for_tokens(len(x)), rms_norm=lambda x, weight, eps: x)
    return ours(Stream(x), norm, kernels)


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_a_shared_expert_agrees(num_tokens: int) -> None:
    torch.manual_seed(0)
    block, ours = shared_pair(hidden=32)
    x = torch.randn(num_tokens, 32)
    residual, found = run(ours, x)
    expected = block(x[None])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert residual is x
    ours.shared_expert_gate.weight.zero_()
    assert (run(ours, x).addend - expected).abs().max() > CLEARLY_WRONG, "the gate matters"
    _, without = shared_pair(hidden=32, shared_intermediate_size=0)
    assert (run(without, x).addend - expected).abs().max() > CLEARLY_WRONG, "so does the expert"


def test_experts_do_not_depend_on_the_other_tokens() -> None:
    torch.manual_seed(0)
    _, ours = shared_pair(hidden=32)
    x = torch.randn(64, 32)
    together = run(ours, x).addend
    alone = torch.cat([run(ours, row[None]).addend for row in x])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_a_stack_is_not_called() -> None:
    with pytest.raises(TypeError, match="StackedLinear cannot be called"):
        Experts(2, 4, 4).down_proj(torch.ones(1, 4))
