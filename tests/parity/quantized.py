"""Checkpoints that are quantized for us and not for Hugging Face, whose model then gets the weights
that are meant. One test file for each format; writers are those of `tests/*_checkpoints.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.decoder_harness import Harness
from tests.parity.oracle import EOS_ID, VOCAB_SIZE, Oracle, Prompt, Tiny, make_oracle
from tests.parity.oracle import largest_difference as error
from tests.parity.qwen3_5_oracle import CONFIGS, make_qwen3_5
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.test_qwen3_5 import PROMPTS, Pair
from tests.parity.text_oracle import make_text_oracle

# isort: split
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

Writer = Callable[..., dict[str, Tensor]]  # of the source, the directory, a layout's name, options

SHAPES = {
    "whole-blocks": Tiny(4, 2, 64, (12, 10, 10), (0, 1), False, 256, 2, intermediate=384),
    "partial-blocks": Tiny(3, 1, 64, (12, 10, 10), (0, 1), True, 192, 2, intermediate=320),
}
EARLIER = {
    family: Tiny(3, 1, 64, (8, 12, 12), (), True, 192, 2, intermediate=320, family=family)
    for family in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
}
PARTS = (9, (4, 6), 7)


def text_fields(**fields: object) -> dict:
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": 192, "intermediate_size": 320,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": None,
        "eos_token_id": EOS_ID, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    } | fields  # fmt: skip


TEXTS = {
    "qwen3": Qwen3Config(**text_fields(head_dim=64)),
    "qwen2-biases": Qwen2Config(**text_fields(num_attention_heads=3, num_key_value_heads=1)),
    "llama-biases": LlamaConfig(**text_fields(attention_bias=True, mlp_bias=True)),
}


def as_loaded(name: str) -> str:
    """Transformers' name of a tensor whose name in the files is the older one of a model that
    sees.
    """
    if name.startswith("mlp_AR."):
        return name.replace("mlp_AR.", "model.projector.", 1)
    if name.startswith("visual."):
        return f"model.{name}"
    is_older = name.startswith("model.") and not name.startswith(_NEWER)
    return name.replace("model.", "model.language_model.", 1) if is_older else name


_NEWER = ("model.language_model.", "model.visual.")


class Quantized:
    """One checkpoint, unquantized at Hugging Face's and to be quantized for us."""

    def __init__(self, config: Tiny | PreTrainedConfig, directory: Path, writer: Writer) -> None:
        self.directory, self._writer = directory, writer
        make = make_oracle if isinstance(config, Tiny) else make_text_oracle
        self.oracle: Oracle = make(config, directory / "source")  # type: ignore[arg-type]
        self.original = {k: v.clone() for k, v in self.oracle.model.state_dict().items()}
        parts = PARTS if self.oracle.spec.vision else (23,)
        self.prompt: Prompt = self.oracle.prompt(*parts)
        self._unquantized = self._answer = self.oracle.answer(self.prompt)
        self._count = 0

    def expected(self, meant: dict[str, Tensor]) -> Tensor:
        """Logits of Hugging Face's model with these weights; images are its until the next call."""
        if meant is self.original:
            self._answer = self._unquantized
            return self._answer.logits
        loaded = meant
        if self.oracle.spec.vision:
            loaded = {as_loaded(name): tensor for name, tensor in meant.items()}
        missing, unexpected = self.oracle.model.load_state_dict(loaded, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self._answer = self.oracle.answer(self.prompt)
        return self._answer.logits

    def write(self, name: str, **options: object) -> tuple[Path, dict[str, Tensor]]:
        self._count += 1
        directory = self.directory / f"{name}-{self._count}"
        return directory, self._writer(self.directory / "source", directory, name, **options)

    def ours(self, directory: Path, chunk_size: int | None = None) -> Tensor:
        return self.run(Harness(directory), chunk_size)

    def run(self, harness: Harness, chunk_size: int | None = None) -> Tensor:
        """All of the prompt's logits."""
        answer, given = self._answer, {}
        if self.oracle.spec.vision:
            images = list(zip(self.prompt.offsets, answer.embeddings, strict=True))
            given = {"positions": answer.positions, "delta": answer.delta, "images": images}
        return harness.prompt_logits(harness.start(self.prompt.token_ids, **given), chunk_size)

    def check(self, name: str, least: float = CLEARLY_WRONG, **options: object) -> None:
        """Our logits, whole and in chunks, are those of the meant weights, and not of the original
        ones, which differ by more than `least`.
        """
        directory, meant = self.write(name, **options)
        expected = self.expected(meant)
        assert expected.abs().max() > 30
        assert error(self.ours(directory), expected) < TOLERANCE
        assert error(self.ours(directory, 3), expected) < TOLERANCE
        assert error(self.expected(self.original), expected) > least


def fixtures(
    writer: Writer,
    names: Sequence[str] = (*SHAPES, "llama-biases"),
    kind: type[Quantized] = Quantized,
) -> tuple[Any, Any]:
    """A module's fixtures `model`, one for each name, and `text`, of a model of text alone."""

    @pytest.fixture(scope="module", params=names)
    def model(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Quantized:
        config = TEXTS.get(request.param) or SHAPES[request.param]
        return kind(config, tmp_path_factory.mktemp("model"), writer)

    @pytest.fixture(scope="module")
    def text(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
        return kind(TEXTS["qwen3"], tmp_path_factory.mktemp("text"), writer)

    return model, text


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[..., Tensor | None]:
    """For a writer: one tensor of the second layer is another, or left out."""
    return lambda key, tensor: change(tensor) if key == f"model.layers.1.{name}" else tensor


def check_qwen3_5(writer: Writer, name: str, directory: Path) -> None:
    """The projections of the gates stay unquantized, unlisted in the configuration."""
    tiny = replace(CONFIGS["repeated-twice-tied"], hidden=192, layers=4)
    oracle = make_qwen3_5(tiny, directory / "source")
    meant = writer(
        oracle.directory, directory / "quantized", name,
        modules=lambda module: module.startswith("model.language_model.layers")
        and not module.endswith(("in_proj_a", "in_proj_b", "conv1d")),
    )  # fmt: skip
    meant = {key: tensor for key, tensor in meant.items() if not key.startswith("mtp.")}
    missing, unexpected = oracle.model.load_state_dict(meant, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    oracle.model.tie_weights()
    ours = Pair(Oracle(directory / "quantized", oracle.model, oracle.spec))
    assert ours.error(oracle.prompt(*PROMPTS["one image"]), 50) < TOLERANCE


def dummy_layer(directory: Path) -> Any:
    """The first `down_proj` of the model with random weights, without the checkpoint's file."""
    (directory / "model.safetensors").unlink()
    model: Any = Harness(directory, load_format="dummy").model
    return model.layers[0].mlp.down_proj
