"""Reads the weights of a LoRA adapter in PEFT's layout.

A low-rank module adds `scaling * (x @ A.T) @ B.T` to the output of a linear layer. With DoRA, a
magnitude per output then replaces the norm of each row of the changed weight. `modules_to_save` are
whole modules that the adapter replaces.

PEFT names a module as it is called in transformers, such as
`base_model.model.model.language_model.layers.0.self_attn.q_proj`. Names here are without the
wrappers: `layers.0.self_attn.q_proj`, `embed_tokens`, `lm_head` and `visual.blocks.0.attn.qkv`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.adapter_config import (
    PREFIX,
    TOWER,
    WEIGHTS,
    AdapterConfig,
    AdapterError,
    plain_name,
)

_LOW_RANK = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The factors of one module's change.

    Attributes:
        a: `[rank, in_features]`. For experts, `[experts * rank, in_features]`.
        b: `[out_features, rank]`. For experts, `[out_features, rank * experts]`.
        scaling: factor of the product.
        magnitude: `[out_features]`, norms of the rows of the changed weight. None without DoRA.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.a)

    def on(self, device: torch.device) -> "LowRank":
        """Returns the factors on a device, in the data types of the file.

        Factors are moved before their values are converted: torch divides conversions on the CPU
        among threads, which takes seconds for thousands of small tensors if all CPUs are busy.
        """
        magnitude = None if self.magnitude is None else self.magnitude.to(device)
        return replace(self, a=self.a.to(device), b=self.b.to(device), magnitude=magnitude)

    def delta(self) -> Tensor:
        """Returns the change of the weight `[out_features, in_features]` in float32."""
        return (self.b.float() @ self.a.float()) * self.scaling

    def merged(self, weight: Tensor) -> Tensor:
        """Returns the changed weight in the data type of `weight`, rounded once, as PEFT does.

        Args:
            weight: `[out_features, in_features]`, weight of the base model.
        """
        changed = weight.float() + self.delta()
        if self.magnitude is not None:
            norm = torch.linalg.norm(changed, dim=1)
            changed = (self.magnitude.float() / norm)[:, None] * changed
        return changed.to(weight.dtype)


@dataclass(slots=True)
class Adapter:
    """The weights of an adapter on the CPU.

    Attributes:
        config: options of the adapter.
        linears: factors by module name.
        experts: factors of the stacked experts of a layer, by the name of their module. Their
            scaling is that of `of_experts`.
        embedding: factors of the embedding table: `a` is `[rank, vocabulary]` and `b` is
            `[hidden, rank]`. None if the table has no low-rank change.
        saved: tensors that replace those of the base model, by tensor name.
    """

    config: AdapterConfig
    linears: dict[str, LowRank] = field(default_factory=dict[str, LowRank])
    experts: dict[str, list[LowRank]] = field(default_factory=dict[str, list[LowRank]])
    embedding: LowRank | None = None
    saved: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _peft_names: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, config: AdapterConfig) -> "Adapter":
        """Reads the weights of an adapter.

        Raises:
            AdapterError: the file is malformed, has a tensor that is not computed, or lacks a
                module of `modules_to_save`. The message names the tensor or the module.
        """
        path = config.directory / WEIGHTS
        factors: dict[str, dict[str, Tensor]] = {}
        found = cls(config)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - `safe_open` does not return a mapping
                    short = name.removeprefix(PREFIX)
                    if short.endswith(".base_layer.weight"):
                        continue  # PEFT saves the unchanged weights of adapted embeddings, too
                    tensor = _copied(file.get_tensor(name))
                    if match := _LOW_RANK.fullmatch(short):
                        factors.setdefault(match[1], {})[match[2]] = tensor
                    else:
                        found.saved[plain_name(short)] = tensor
        except (SafetensorError, OSError, RuntimeError) as error:
            raise AdapterError(f"{path} is not a safetensors file: {error}") from None
        for name, tensors in factors.items():
            found._add(name, tensors)
        modules = {name: name.rpartition(".")[0] for name in found.saved}
        for name, module in modules.items():
            if not module.endswith(config.saved_modules):  # as PEFT compares them
                raise AdapterError(f"{path}: the tensor {name} is not known")
        for saved in config.saved_modules:
            if not any(module.endswith(saved) for module in modules.values()):
                raise AdapterError(
                    f"{path} has no tensor of {saved}, which modules_to_save names: save the "
                    "adapter with that module, or take the name out of the configuration"
                )
        return found

    def of_tower(self) -> "Adapter":
        """Returns the adapter's changes of the vision tower alone."""
        return Adapter(
            self.config,
            linears={name: each for name, each in self.linears.items() if name.startswith(TOWER)},
            saved={name: each for name, each in self.saved.items() if name.startswith(TOWER)},
        )

    def _add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Adds the factors of a module under PEFT's name."""
        where = f"{self.config.directory}/{WEIGHTS}: {name}"
        is_embedding = "embedding_A" in tensors
        a, b = (tensors.get(f"embedding_{k}" if is_embedding else k) for k in "AB")
        if a is None or b is None:
            raise AdapterError(f"{where} lacks lora_A or lora_B")
        if a.dim() != 2 or b.dim() != 2:
            raise AdapterError(f"{where} is a convolution, whose adapters are not supported")
        module = name.replace(".base_layer", "")
        factors = LowRank(
            a=a, b=b, scaling=self.config.scaling(module), magnitude=tensors.get("magnitude_vector")
        )
        wanted = self.config.rank_of(module)
        is_stacked = a.shape[0] > wanted or module.endswith(".experts")
        if a.shape[0] != b.shape[1] or (a.shape[0] % wanted and not module.endswith(".experts")):
            raise AdapterError(
                f"{where} has rank {a.shape[0]} and {b.shape[1]}, the configuration says {wanted}"
            )
        if (factors.magnitude is not None) != self.config.uses_dora:
            raise AdapterError(f"{where}: use_dora and the magnitudes in the file differ")
        if is_embedding:
            if plain_name(module) != "embed_tokens" or factors.magnitude is not None:
                raise AdapterError(f"{where} is not supported")
            self.embedding = factors
        elif is_stacked:
            if factors.magnitude is not None:
                raise AdapterError(f"{where} has DoRA, which is not supported for stacked experts")
            self.experts.setdefault(plain_name(module), []).append(factors)
            self._peft_names[plain_name(module)] = module
        else:
            self.linears[plain_name(module)] = factors

    def of_experts(
        self, module: str, parameter: str, shape: tuple[int, int], count: int
    ) -> LowRank | None:
        """Returns the factors of a stacked parameter of experts. None if it is unchanged.

        Args:
            module: name of the experts' module, a key of `experts`.
            parameter: `gate_up_proj` or `down_proj`. Patterns of ranks and of alphas may name it.
            shape: (out_features, in_features) of an expert. The files do not name the parameter,
                but no two parameters of a layer's experts have the same shape.
            count: number of experts.

        Raises:
            AdapterError: the rank is not that of the configuration.
        """
        for factors in self.experts.get(module, ()):
            if (len(factors.b), factors.a.shape[1]) == shape:
                name = f"{self._peft_names[module]}.{parameter}"
                if len(factors.a) != (rank := self.config.rank_of(name)) * count:
                    raise AdapterError(
                        f"{self.config.directory}/{WEIGHTS}: {name} has rank "
                        f"{len(factors.a) / count:g} for each of {count} experts, the "
                        f"configuration says {rank}"
                    )
                return replace(factors, scaling=self.config.scaling(name))
        return None


def _copied(tensor: Tensor) -> Tensor:
    """Copies a tensor of a mapped file, which may be written anew while the adapter is served.

    NumPy copies on the calling thread, and torch would divide each copy, see `LowRank.on`.
    """
    values = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy().copy())
    return values.view(tensor.dtype).view(tensor.shape)


def expert_delta(factors: LowRank, expert: int, count: int) -> Tensor:
    """Returns the change `[out_features, in_features]` float32 of one of `count` experts."""
    a = factors.a.reshape(count, -1, factors.a.shape[-1])[expert]
    b = factors.b.reshape(len(factors.b), -1, count)[:, :, expert]
    return (b.float() @ a.float()) * factors.scaling
