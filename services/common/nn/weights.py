"""Fills a module that was built on `meta` from a checkpoint, or with random numbers.

    with torch.device("meta"):
        model = LanguageModel(config)
    load_weights(model, Checkpoint.open(directory), model.weight_map, device=..., dtype=...)

Parameters get the model's dtype where they were made in float32 (a quantization method's integer
or scale parameters keep theirs). Buffers are computed, not loaded: a module that has some defines
`reset_buffers(device)`, which is called after its parameters have memory; they stay in the dtype it
gives them (rope frequencies must stay float32 in a bf16 model).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from services.common.nn.checkpoint import Checkpoint, CheckpointError, Reader, fingerprint, listed
from services.common.nn.linear import Linear, MergedLinear

__all__ = [
    "Checkpoint", "CheckpointError", "WeightMap", "fingerprint", "load_dummy", "load_weights",
    "materialize",
]  # fmt: skip

DUMMY_FINGERPRINT = "dummy"


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a module's parameters are called in a checkpoint.

    Attributes:
        prefixes: module prefix → checkpoint prefix; the longest module prefix that fits a
            parameter's name is replaced. The checkpoint prefixes are what the module owns: a tensor
            under one of them that no parameter wants is an error. A prefix may be a whole name.
        shapes: parameter name → shape in the checkpoint, where it differs (same elements in the
            same order, as a Conv3d's weight that is applied as a linear).
        ignored: full checkpoint names that may be present and are not read.
    """

    prefixes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name for a parameter (or a part of a merged one)."""
        prefix = max((p for p in self.prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            raise KeyError(f"no prefix of the weight map fits parameter {name}")
        return self.prefixes[prefix] + name[len(prefix) :]

    def owns(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to the module."""
        return name not in self.ignored and name.startswith(tuple(self.prefixes.values()))


@dataclass(frozen=True, slots=True)
class _Source:
    """One checkpoint tensor and the rows of the parameter that it fills."""

    name: str
    parameter: str
    start: int  # rows
    stop: int
    shape: tuple[int, ...]


def materialize(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Gives a `meta` module memory: float32 parameters become `dtype`, others keep theirs.

    Parameters hold nothing of meaning afterwards; buffers are computed by `reset_buffers`.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # a shared parameter stays shared
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter not in made:
                kind = dtype if parameter.dtype == torch.float32 else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=kind, device=device)
                made[parameter] = nn.Parameter(memory, requires_grad=False)
            setattr(child, name, made[parameter])
    _reset_buffers(module, torch.device(device))


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """Materializes the module and fills it.

    Peak host memory on the CPU: the model and one tensor more. On a GPU: two tensors.

    Raises:
        CheckpointError: names every missing, unexpected or wrong-shaped tensor.
    """
    sources = list(_sources(module, weight_map))
    _check(sources, checkpoint, weight_map)
    materialize(module, device, dtype)
    parameters = dict(module.named_parameters())
    with checkpoint.reader() as reader:
        copier = _Copier(checkpoint, reader, torch.device(device))
        for source in sources:
            rows = parameters[source.parameter].data
            copier.fill(rows[source.start : source.stop] if rows.ndim else rows, source.name)
        copier.finish()
    _process(module)


def load_dummy(
    module: nn.Module, seed: int = 0, *, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Materializes the module with random weights: normal, std 0.02; norm weights 1.

    Made on the device; the same on each run on the same kind of device.
    """
    materialize(module, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.data.fill_(1.0)
        elif parameter.dtype.is_floating_point:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        else:
            raise CheckpointError(f"no dummy values for {name} of dtype {parameter.dtype}")
    _process(module)


class _Copier:
    """Moves tensors from files to parameters with as little memory as can be."""

    def __init__(self, checkpoint: Checkpoint, reader: Reader, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._device = device
        self._staging = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, target: Tensor, name: str) -> None:
        """Fills a contiguous slice of a parameter with the tensor of that name."""
        info = self._checkpoint.tensors[name]
        if info.size_bytes == 0:
            return
        if self._device.type == "cpu" and info.dtype == target.dtype:
            self._reader.read_into(name, _bytes_of(target))
            return
        staging = self._stage(info.size_bytes)
        self._reader.read_into(name, _bytes_of(staging))
        values = staging.view(info.dtype).view(target.shape)
        if self._device.type == "cuda":
            # Cast on the device: the bus carries the file's bytes.
            if values.dtype != target.dtype:
                values = values.to(self._device, non_blocking=True)
            target.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[self._turn] = event
        else:
            target.copy_(values)

    def finish(self) -> None:
        """Waits for the last copies."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._staging.clear()

    def _stage(self, size: int) -> Tensor:
        if self._device.type == "cuda":
            self._turn ^= 1  # one buffer is read from the file while the other is copied
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        if self._staging[self._turn].numel() < size:
            self._staging[self._turn] = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._staging[self._turn] = torch.empty(
                size, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        return self._staging[self._turn][:size]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _sources(module: nn.Module, weight_map: WeightMap) -> Iterator[_Source]:
    """What each parameter is filled from. A parameter shared by two modules appears once."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        head = f"{path}." if path else ""
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full, shape = head + name, tuple(parameter.shape)
            if isinstance(child, MergedLinear):
                parent, start = head.rpartition(".")[0].rpartition(".")[0], 0
                for part, rows in child.parts.items():
                    part_name = f"{parent}.{part}.{name}" if parent else f"{part}.{name}"
                    source = weight_map.checkpoint_name(part_name)
                    yield _Source(source, full, start, start + rows, (rows, *shape[1:]))
                    start += rows
            else:
                stored = weight_map.shapes.get(full, shape)
                assert math.prod(stored) == parameter.numel(), full
                rows = shape[0] if shape else 0
                yield _Source(weight_map.checkpoint_name(full), full, 0, rows, stored)


def _check(sources: list[_Source], checkpoint: Checkpoint, weight_map: WeightMap) -> None:
    wanted = {source.name: source for source in sources}
    present = checkpoint.tensors
    missing = sorted(set(wanted) - set(present))
    unexpected = [name for name in present if name not in wanted and weight_map.owns(name)]
    misshapen = [
        f"{name} is {list(present[name].shape)}, the model wants {list(source.shape)}"
        for name, source in sorted(wanted.items())
        if name in present and present[name].shape != source.shape
    ]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrong shapes", misshapen),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")


def _process(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Linear):
            child.method.process_weights_after_loading(child)


def _reset_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset(device)
