"""A checkpoint with an adapter folded into its weights while they are read.

The tensors are those of the base checkpoint, and a `Reader` returns changed values. Whatever loads
weights, shares them among ranks or quantizes them is therefore the same with an adapter.
"""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from services.common.adapter_config import AdapterConfig, AdapterError, plain_name
from services.common.model_spec import ModelSpec
from services.common.nn.adapter import Adapter, LowRank, expert_delta
from services.common.nn.checkpoint import Checkpoint, Reader, TensorInfo, listed
from services.common.nn.linear import FLOATS

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(gate_proj|up_proj|down_proj|gate_up_proj)")


class MergedCheckpoint(Checkpoint):
    """A checkpoint whose reader folds an adapter into the weights.

    Args:
        base: the checkpoint.
        adapter: the adapter.
        spec: spec of the model.
        dtype: data type in which changed weights are added and returned, which is the model's.

    Raises:
        AdapterError: a part of the adapter has no weight that it can be folded into. The message
            names the part.
    """

    def __init__(
        self, base: Checkpoint, adapter: Adapter, spec: ModelSpec, dtype: torch.dtype
    ) -> None:
        super().__init__(base.directory, base.tensors)
        self.adapter, self.dtype = adapter, dtype
        self._spec = spec
        self.plain_names = {name: self._plain(name) for name in base.tensors}
        self.stored_names = {plain: name for name, plain in self.plain_names.items()}
        self._separate_head()
        self._check()

    def reader(self) -> "closing[Reader]":
        return closing(_MergedReader(self))

    def _plain(self, name: str) -> str:
        """Returns the name that an adapter gives a tensor of the files."""
        prefix = self._spec.checkpoint.text_prefix
        return plain_name(name.removeprefix(prefix) if prefix else name)

    def _separate_head(self) -> None:
        """Adds a head to a checkpoint whose head is the embedding, if the adapter changes only one
        of the two. The reader takes the values of the head from the embedding.
        """
        if _HEAD in self.stored_names or not self._spec.text.tie_word_embeddings:
            return
        if self.adapter.embedding is not None:
            raise AdapterError(
                f"{self.adapter.config.directory}: embed_tokens has a low-rank change, but it is "
                "the model's head, too; merge the adapter with PEFT and serve the merged model"
            )
        changes_head = "lm_head" in self.adapter.linears or _HEAD in self.adapter.saved
        if changes_head or _EMBEDDING in self.adapter.saved:
            self.tensors[_HEAD] = self.tensors[self.stored_names[_EMBEDDING]]
            self.plain_names[_HEAD] = _HEAD

    def _check(self) -> None:
        """Raises AdapterError if a part of the adapter cannot be folded."""
        adapter, left = self.adapter, set[str]()
        infos = {plain: self.tensors[name] for name, plain in self.plain_names.items()}
        for name, factors in adapter.linears.items():
            self._check_weight(f"{name}.weight", infos, (len(factors.b), factors.a.shape[1]), left)
        for name, tensor in adapter.saved.items():
            self._check_weight(name, infos, tuple(tensor.shape), left)
        if (factors := adapter.embedding) is not None:
            shape = factors.a.shape[1], len(factors.b)
            self._check_weight(_EMBEDDING, infos, shape, left)
        for name, experts in adapter.experts.items():
            stored = [infos[plain].dtype for plain in infos if plain.startswith(f"{name}.")]
            if not stored or set(stored) - set(FLOATS) or not self._fit(name, experts):
                left.add(name)
        if left:
            raise AdapterError(
                f"{adapter.config.directory} cannot be folded into {self.directory}, which has no "
                f"unquantized weights of that shape for {listed(sorted(left))}"
            )

    def _check_weight(
        self, name: str, infos: dict[str, TensorInfo], shape: tuple[int, ...], left: set[str]
    ) -> None:
        info = infos.get(name)
        if info is None or info.dtype not in FLOATS or info.shape != shape:
            left.add(name.removesuffix(".weight"))

    def _fit(self, name: str, experts: list[LowRank]) -> bool:
        """Returns whether factors have the shapes of the model's experts."""
        found = [self._factors(name, part) is not None for part in ("gate_up_proj", "down_proj")]
        return sum(found) == len(experts)

    def _factors(self, name: str, parameter: str) -> LowRank | None:
        """Returns the factors of a parameter of a layer's experts. None if it is unchanged."""
        moe, hidden = self._spec.text.moe, self._spec.text.hidden_size
        if moe is None:
            return None
        size = moe.intermediate_size
        shape = (hidden, size) if parameter == "down_proj" else (2 * size, hidden)
        return self.adapter.of_experts(name, parameter, shape, moe.num_experts)

    def changed(self, name: str, cut: tuple[int | slice, ...], reader: Reader) -> Tensor | None:
        """Returns the changed values of a tensor, or None if the adapter does not change it.

        Args:
            name: name of the tensor in the files.
            cut: index of a part of the tensor. Empty for the whole tensor.
            reader: reader of the base checkpoint.
        """
        plain, adapter = self.plain_names[name], self.adapter
        if (saved := adapter.saved.get(plain)) is not None:
            return saved[cut].to(self.dtype) if cut else saved.to(self.dtype)
        module = plain.removesuffix(".weight")
        if factors := adapter.linears.get(module):
            merged = factors.merged(reader.read(name).to(self.dtype))
        elif plain == _EMBEDDING and (factors := adapter.embedding) is not None:
            flipped = replace(factors, a=factors.b.T, b=factors.a.T)
            merged = flipped.merged(reader.read(name).to(self.dtype))
        elif match := _EXPERT.fullmatch(module):
            return self._experts(match, name, cut, reader)
        else:
            return None
        return merged[cut] if cut else merged

    def _experts(
        self, match: re.Match[str], name: str, cut: tuple[int | slice, ...], reader: Reader
    ) -> Tensor | None:
        """Returns the changed values of experts' weights; see `changed`."""
        moe, part = self._spec.text.moe, match[3]
        factors = self._factors(match[1], "down_proj" if part == "down_proj" else "gate_up_proj")
        if factors is None or moe is None:
            return None
        hidden, size = self._spec.text.hidden_size, moe.intermediate_size
        shape = (hidden, size) if part == "down_proj" else (2 * size, hidden)
        count = moe.num_experts
        if match[2] is not None:
            delta = expert_delta(factors, int(match[2]), count)
            if part != "down_proj":
                delta = delta.chunk(2)[part == "up_proj"]
            merged = reader.read(name).to(self.dtype) + delta.to(self.dtype)
            return merged[cut] if cut else merged
        chosen = cut[0] if cut else slice(None)
        indices = [chosen] if isinstance(chosen, int) else range(count)[chosen]
        deltas = torch.stack([expert_delta(factors, index, count) for index in indices])
        stored = self.tensors[name].shape[1:]
        if stored != shape or (hidden in (size, 2 * size) and self._is_transposed(match[1])):
            deltas = deltas.mT
        weight = reader.read(name, (chosen,)).to(self.dtype)
        merged = weight.reshape(deltas.shape) + deltas.to(self.dtype)
        if isinstance(chosen, int):
            merged = merged[0]
        rest = cut[1:] if isinstance(chosen, int) else (slice(None), *cut[1:])
        return merged[rest] if cut else merged

    def _is_transposed(self, experts: str) -> bool:
        """Returns whether the files hold the experts' matrices transposed."""
        moe = self._spec.text.moe
        assert moe is not None
        rows = {"gate_up_proj": 2 * moe.intermediate_size, "down_proj": self._spec.text.hidden_size}
        return any(
            self.tensors[self.stored_names[f"{experts}.{part}"]].shape[1] != count
            for part, count in rows.items()
        )


class _MergedReader(Reader):
    """Reads the tensors of a `MergedCheckpoint`."""

    def __init__(self, checkpoint: MergedCheckpoint) -> None:
        super().__init__(checkpoint)
        self._merged = checkpoint
        base = {
            name: (_embedding_of(checkpoint) if name == _HEAD and _is_new(checkpoint) else name)
            for name in checkpoint.tensors
        }
        self._base = _BaseReader(checkpoint, base)

    def read(self, name: str, cut: tuple[int | slice, ...] = ()) -> Tensor:
        changed = self._merged.changed(name, cut, self._base)
        return self._base.read(name, cut) if changed is None else changed

    def close(self) -> None:
        self._base.close()
        super().close()


class _BaseReader(Reader):
    """Reads the base checkpoint, some of whose tensors have another name in the files."""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, str]) -> None:
        super().__init__(checkpoint)
        self._names = names

    def read(self, name: str, cut: tuple[int | slice, ...] = ()) -> Tensor:
        return super().read(self._names[name], cut)


def _is_new(checkpoint: MergedCheckpoint) -> bool:
    """Returns whether the files hold no head, which then has the values of the embedding."""
    return _HEAD not in checkpoint.stored_names


def _embedding_of(checkpoint: MergedCheckpoint) -> str:
    return checkpoint.stored_names[_EMBEDDING]


def open_checkpoint(spec: ModelSpec, adapter: Path | None, dtype: torch.dtype) -> Checkpoint:
    """Opens the weight files of a model.

    Args:
        spec: spec of the model.
        adapter: directory of an adapter that is folded into the weights. None if there is none.
        dtype: data type of the model.

    Raises:
        ModelSpecError, CheckpointError: the files of the model or of the adapter are not valid.
    """
    checkpoint = Checkpoint.open(spec.directory)
    if adapter is None:
        return checkpoint
    return MergedCheckpoint(checkpoint, Adapter.read(AdapterConfig.read(adapter)), spec, dtype)
