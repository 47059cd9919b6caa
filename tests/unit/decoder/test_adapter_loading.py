"""Adapters are loaded by the device: the host copies bytes, and waits for one answer.

The model is on `meta`, whose tensors have no values, so whatever reads one on the host raises.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.common.adapter_config import PREFIX, AdapterConfig, AdapterError
from services.common.families import read_spec
from services.common.nn.adapter import Adapter
from services.common.nn.collectives import ALONE
from services.common.nn.weights import materialize
from services.decoder.models.adapters import Adapters
from services.decoder.models.transformer import Transformer
from services.decoder.operations.ops import PlainOps

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 64, 48, 4, 3, 96
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": 80, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "max_position_embeddings": 512,
    "rope_theta": 1e4, "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip
RANK = 4
DENSE = {
    "self_attn.q_proj": (64, HIDDEN), "self_attn.k_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64),
}  # fmt: skip
ONE = {"gate_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def factors(module: str, rows: int, columns: int, experts: int = 1) -> dict[str, Tensor]:
    rank = RANK * experts
    return {
        f"{module}.lora_A.weight": torch.ones(rank, columns),
        f"{module}.lora_B.weight": torch.ones(rows, rank),
    }


def write(directory: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """Writes an adapter of float32 values. Returns its directory and its tensors."""
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for name, size in DENSE.items():
            module = f"{PREFIX}model.layers.{layer}.{name}"
            tensors |= factors(module, *size)
            if kind == "dora":
                tensors[f"{module}.lora_magnitude_vector.weight"] = torch.ones(size[0])
        experts = f"{PREFIX}model.layers.{layer}.mlp.experts"
        if kind == "experts by name" and layer:
            for expert in range(EXPERTS):
                for name, size in ONE.items():
                    tensors |= factors(f"{experts}.{expert}.{name}", *size)
        if kind == "stacked experts" and layer:
            tensors |= factors(f"{experts}.base_layer", 2 * INNER, HIDDEN, EXPERTS)
            tensors |= factors(experts, HIDDEN, INNER, EXPERTS)
    config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none"}
    if kind == "dora":
        config["use_dora"] = True
    if kind == "whole modules":
        config["modules_to_save"] = ["embed_tokens", "lm_head"]
        tensors[f"{PREFIX}model.embed_tokens.weight"] = torch.ones(VOCABULARY, HIDDEN)
        tensors[f"{PREFIX}lm_head.weight"] = torch.ones(VOCABULARY, HIDDEN)
    if kind == "embedding":
        name = f"{PREFIX}model.embed_tokens.lora_embedding_"
        tensors[f"{name}A"] = torch.ones(RANK, VOCABULARY)
        tensors[f"{name}B"] = torch.ones(HIDDEN, RANK)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory, tensors


KINDS = ["linears", "dora", "experts by name", "stacked experts", "whole modules", "embedding"]


def adapters_of(directory: Path, device: str) -> Adapters:
    """The slots of a small bfloat16 model with random or, on `meta`, without values."""
    (directory / "config.json").write_text(json.dumps(MODEL))
    with torch.device("meta"):
        model = Transformer(read_spec(directory), backend=None, ops=PlainOps())  # type: ignore[arg-type]
    materialize(model, device, torch.bfloat16)
    if device != "meta":
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    return Adapters(model, model.embed_tokens, model.lm_head, ALONE, slots=2, max_rank=RANK)


# How safetensors makes a tensor of a mapped file. None of it depends on the tensor's size.
_MAPPED = (torch.ops.aten.set_.source_Storage, torch.ops.aten._local_scalar_dense.default)

_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to)


class OnHost(TorchDispatchMode):
    """Notes what is done with tensors of the CPU.

    Attributes:
        copied: bytes that were copied to another device as they are.
        computed: other operations that read or write values, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.computed = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cpu]
        if not given or func in _MAPPED:
            return found
        is_copy = func.overloadpacket in _COPIES  # which counts as a view, too
        as_it_is = is_copy and found.dtype == given[0].dtype and given[0].is_contiguous()
        if as_it_is and found.is_meta:
            self.copied += given[0].nbytes
        elif not as_it_is and (is_copy or not func.is_view):
            self.computed.append(str(func))
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_converted_and_checked_on_the_device(kind: str, tmp_path: Path) -> None:
    directory, tensors = write(tmp_path / "adapter", kind)
    adapters, waits = adapters_of(tmp_path, "meta"), list[int]()

    def waited(self: Adapters, finite: list[tuple[str, Tensor]]) -> list[str]:
        assert all(flag.is_meta and flag.shape == () for _, flag in finite)
        waits.append(len(finite))
        return []

    with mock.patch.object(Adapters, "_not_finite", waited), OnHost() as host:
        adapters.load_files(0, str(directory))
    assert set(host.computed) == set()
    assert host.copied == sum(each.nbytes for each in tensors.values())
    assert waits == [len({name.partition(".lora_")[0] for name in tensors})]
    with OnHost() as control:
        torch.ones(3).isfinite().all().to("meta", torch.float32)
    assert len(control.computed) >= 2 and not control.copied


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_that_is_not_finite_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The slot is empty afterwards, and takes the adapter once it is in order."""
    directory, tensors = write(tmp_path / "adapter", kind)
    adapters = adapters_of(tmp_path, "cpu")
    adapters.load(1, Adapter.read(AdapterConfig.read(directory)))
    before = state_of(adapters)
    for number, name in enumerate(sorted(tensors)):
        values = float("nan"), float("inf"), 3.4e38  # the last is infinite in bfloat16
        value = values[number % (2 if "magnitude" in name else 3)]  # magnitudes stay in float32
        broken = tensors | {name: tensors[name].clone()}
        broken[name].view(-1)[-1] = value
        save_file(broken, directory / "adapter_model.safetensors")
        own = name.removeprefix(f"{PREFIX}model.").removeprefix(PREFIX).replace(".base_layer", "")
        own = own.partition(".lora_")[0]
        with pytest.raises(AdapterError) as refused:
            adapters.load(0, Adapter.read(AdapterConfig.read(directory)))
        message = f"{own} has values that are not finite in torch.bfloat16"
        assert str(refused.value) == f"{directory} cannot be served: {message}", name
        assert all(map(torch.equal, before, state_of(adapters))), name
    save_file(tensors, directory / "adapter_model.safetensors")
    adapters.load(0, Adapter.read(AdapterConfig.read(directory)))


def state_of(adapters: Adapters) -> list[Tensor]:
    """Copies of all factors, and the numbers of the slots that are used."""
    found: list[Tensor] = []
    for stack in adapters._stacks().values():
        found.append(torch.tensor(sorted(stack.used)))
        if hasattr(stack, "factors"):
            found += [stack.factors.a.clone(), stack.factors.b.clone()]
            if stack.factors.factor is not None:
                found.append(stack.factors.factor.clone())
    found.append(torch.tensor([slot.is_used for slot in adapters._found]))
    return found


def test_a_product_of_dora_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """Each factor of the file is finite, and their product is not."""
    directory, _ = write(tmp_path / "adapter", "dora")
    adapters = adapters_of(tmp_path, "cpu")
    found = Adapter.read(AdapterConfig.read(directory))
    name = next(iter(found.linears))
    found.linears[name] = replace(found.linears[name], magnitude=torch.full((32,), 3e38))
    found.linears[name].b.fill_(3e38)
    found.linears[name].a.fill_(1e-38)
    with pytest.raises(AdapterError, match=f"{name} has values"):
        adapters.load(0, found)
    assert not any(stack.used for stack in adapters._stacks().values())


def test_an_expert_with_an_endless_number_is_refused(tmp_path: Path) -> None:
    """Python converts at most 4,300 digits to a number."""
    directory, tensors = write(tmp_path / "adapter", "experts by name")
    name = f"{PREFIX}model.layers.1.mlp.experts.{'9' * 5000}.gate_proj.lora_"
    tensors |= {
        f"{name}A.weight": torch.ones(RANK, HIDDEN),
        f"{name}B.weight": torch.ones(INNER, RANK),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="is not a linear layer of the model"):
        adapters_of(tmp_path, "cpu").load_files(1, str(directory))


@pytest.mark.parametrize("failing", ["read", "load"])
def test_an_error_that_nobody_foresaw_refuses_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Other adapters and all sequences go on, and the slot is empty."""
    directory, _ = write(tmp_path / "adapter", "linears")
    adapters = adapters_of(tmp_path, "cpu")
    loaded = Adapters.load

    def load(self: Adapters, slot: int, adapter: Adapter) -> None:
        loaded(self, slot, adapter)
        raise KeyError("odd")

    def read(_: AdapterConfig) -> Adapter:
        raise RecursionError("odd")

    with monkeypatch.context() as patched:
        patched.setattr(
            *((Adapters, "load", load) if failing == "load" else (Adapter, "read", read))
        )
        with pytest.raises(AdapterError, match=r"adapter is malformed: \w+Error: '?odd"):
            adapters.load_files(1, str(directory))
    assert not any(stack.used for stack in adapters._stacks().values())
    adapters.load_files(1, str(directory))
    assert any(stack.used for stack in adapters._stacks().values())
