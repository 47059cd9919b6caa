"""Files of adapters that lack what their configuration names, or that are written anew while they
are read, or while they are served.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.common.adapter_config import AdapterConfig, AdapterError, adapter_digest
from services.common.nn.adapter import Adapter

NAME = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"


def write(directory: Path, *saved: str, **config: Any) -> Path:
    """Writes an adapter. `saved`: names of tensors that it replaces."""
    tensors = {NAME.format("A"): torch.ones(4, 2048), NAME.format("B"): torch.ones(2048, 4)}
    tensors |= {f"base_model.model.{name}": torch.ones(96, 2048) for name in saved}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory / "adapter_model.safetensors"


def test_a_file_that_is_written_anew_changes_no_loaded_adapter(tmp_path: Path) -> None:
    file = write(tmp_path)
    (factors,) = Adapter.read(AdapterConfig.read(tmp_path)).linears.values()
    with file.open("r+b") as opened:  # in place, as a trainer may write it
        opened.write(bytes(file.stat().st_size))
    assert factors.a.eq(1).all() and factors.b.eq(1).all()


def test_a_file_that_is_cut_while_it_is_hashed_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file behind its end is a SIGBUS."""
    file, usual, cut = write(tmp_path), Path.open, list[Path]()
    whole = adapter_digest(tmp_path)

    def opened(path: Path, *arguments: Any) -> Any:
        found = usual(path, *arguments)
        if path == file:
            with usual(path, "r+b") as other:
                other.truncate(100)
            cut.append(path)
        return found

    monkeypatch.setattr(Path, "open", opened)
    assert adapter_digest(tmp_path) != whole and cut == [file]


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_saved_module_that_the_file_lacks_is_refused_by_name(tmp_path: Path, module: str) -> None:
    """Without its tensor, the adapter would compute with the base model's module."""
    tensors = ("lm_head.weight", "model.embed_tokens.weight")
    modules = {"modules_to_save": ["embed_tokens", "lm_head"]}
    write(tmp_path, *tensors, **modules)
    found = Adapter.read(AdapterConfig.read(tmp_path))
    assert set(found.saved) == {"lm_head.weight", "embed_tokens.weight"}
    write(tmp_path, *(name for name in tensors if module not in name), **modules)
    with pytest.raises(AdapterError, match=f"no tensor of {module}, which modules_to_save names"):
        Adapter.read(AdapterConfig.read(tmp_path))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"alpha_pattern": {"*.q_proj": 16}},
            r"alpha_pattern has '\*.q_proj', which is no regular",
        ),
        ({"rank_pattern": {"layers.(0|1": 4}}, "rank_pattern has 'layers.\\(0|1', which is no"),
        ({"rank_pattern": {"q_proj": "many"}}, "malformed: invalid literal"),
        ({"rank_pattern": ["q_proj"]}, "malformed"),
        ({"modules_to_save": [1]}, r"modules_to_save \[1\] is not a list of names"),
        ({"modules_to_save": "lm_head"}, "modules_to_save 'lm_head' is not a list of names"),
        ({"lora_alpha": 10**400}, "malformed: int too large"),
        ({"lora_alpha": [8]}, "malformed"),
        ({"r": None}, "malformed"),
    ],
)
def test_a_malformed_configuration_is_refused_before_the_engine_reads_it(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    """An error that nobody expects there ends the engine with all of its sequences."""
    write(tmp_path, **config)
    with pytest.raises(AdapterError, match=problem):
        AdapterConfig.read(tmp_path)


def test_patterns_match_as_pefts(tmp_path: Path) -> None:
    write(tmp_path, rank_pattern={r"layers\.[01]\..*_proj": 2, "q_proj": 3}, lora_alpha=8)
    config = AdapterConfig.read(tmp_path)
    names = "model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj", "layers.2.mlp.up_proj"
    assert [config.rank_of(name) for name in names] == [2, 3, 4]
