"""Fills a module that was built on `meta` from a checkpoint, or with random numbers.

    with torch.device("meta"):
        model = LanguageModel(spec)
    load_weights(model, Checkpoint.open(directory), model.weight_map, device=..., dtype=...)

For each linear layer the files decide how its weights are stored: a floating-point `weight` makes
it plain, anything else gets the method of the checkpoint's quantization. The two must agree, with
one exception: producers leave modules unquantized that their configuration does not list; these
are plain and reported. Each tensor is read, ignored by name, or an error: scales that are left out
would give fluent nonsense.

Parameters get the model's dtype where they were made in float32, unless the module demands float32
(`float32_parameters`, as scales do). Buffers are computed, not loaded: a module that has some
defines `reset_buffers(device)`, which is called after its parameters have memory; they stay in the
dtype it gives them (rope frequencies must stay float32 in a bf16 model).
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from services.common.model_spec import CheckpointSpec, QuantizationSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError, Reader, fingerprint, listed
from services.common.nn.collectives import Share
from services.common.nn.experts import Experts, FileLayout
from services.common.nn.formats import methods_of
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import (
    FLOATS,
    Axis,
    Linear,
    StackedLinear,
    TensorLayout,
    UnquantizedLinear,
    pieces_of,
)

__all__ = [
    "Checkpoint", "CheckpointError", "WeightMap", "check_all_claimed", "fingerprint", "load_dummy",
    "load_weights", "materialize",
]  # fmt: skip

DUMMY_FINGERPRINT = "dummy"
_DUMMY_ROWS = 8192  # at a time: values of other dtypes are drawn in float32

log = logging.getLogger(__name__)


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
    """One checkpoint tensor, or one item of it, and the part of the parameter that it fills."""

    name: str
    parameter: str
    place: tuple[int | slice, ...]  # index of the parameter
    shape: tuple[int, ...]  # in the file
    stored: tuple[torch.dtype, ...]  # dtypes that the file may hold
    cut: tuple[int | slice, ...] = ()  # index of the file's tensor; empty: all of it
    transposed: bool = False  # the last two axes are swapped in the file
    is_zero: bool = False  # the part is zeros: the first rank has the tensor


def materialize(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Gives a `meta` module memory: float32 parameters become `dtype`, others keep theirs, as do
    those that the module names in `float32_parameters`.

    Parameters hold nothing of meaning afterwards; buffers are computed by `reset_buffers`.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # a shared parameter stays shared
    for child in module.modules():
        float32: frozenset[str] = getattr(child, "float32_parameters", frozenset())
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter not in made:
                is_cast = parameter.dtype == torch.float32 and name not in float32
                kind = dtype if is_cast else parameter.dtype
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
    spec: CheckpointSpec | None = None,
) -> None:
    """Materializes the module and fills it.

    Peak host memory besides the mapped file: on the CPU the model and one tensor more, of a fused
    tensor of experts one expert's part; on a GPU two tensors.

    Args:
        module: built on `meta`.
        checkpoint: the files.
        weight_map: the module's names there.
        device: of the parameters.
        dtype: the model's.
        spec: of the checkpoint: its quantization and its ignored tensors; None: neither.

    Raises:
        CheckpointError: names every missing, unexpected or wrong-shaped tensor, or the modules
            whose files and configuration disagree.
    """
    spec = spec or CheckpointSpec(text_prefix="")
    quantization = spec.quantization
    if quantization is not None:
        _set_methods(module, checkpoint, weight_map, quantization)
    try:
        sources = list(_sources(module, weight_map, checkpoint))
    except ValueError as error:  # ranks would cut through a block
        raise CheckpointError(f"{checkpoint.directory}: {error}") from None
    _check(sources, checkpoint, weight_map, spec)
    materialize(module, device, dtype)
    parameters = dict(module.named_parameters())
    with checkpoint.reader() as reader:
        copier = _Copier(reader, torch.device(device))
        for source in sorted(sources, key=lambda each: checkpoint.tensors[each.name].path):
            copier.fill(parameters[source.parameter].data[source.place], source)
        copier.finish()
    _process(module)


def load_dummy(
    module: nn.Module,
    seed: int = 0,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    weight_map: WeightMap | None = None,
    quantization: QuantizationSpec | None = None,
) -> None:
    """Materializes the module with random weights: normal, std 0.02; norm weights 1.

    Made on the device; the same on each run on the same kind of device.

    Args:
        module: built on `meta`.
        seed: of the random numbers.
        device: of the parameters.
        dtype: the model's.
        weight_map: the module's names in a checkpoint; needed with `quantization`.
        quantization: every linear layer that it applies to gets its method, as if a checkpoint
            held just what the configuration says.
    """
    if quantization is not None:
        assert weight_map is not None
        methods = methods_of(quantization)
        for path, layer in _replaceable(module):
            modules = _checkpoint_modules(module, path, layer, weight_map)
            group = quantization.of(next(iter(modules)))
            if group is not None and all(quantization.of(name) == group for name in modules):
                layer.set_method(methods[group])
    materialize(module, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    dummies = {
        f"{path}.{layout.parameter}": layout.dummy
        for path, layer in module.named_modules()
        if isinstance(layer, Linear)
        for layout in layer.method.layouts(layer)
    }
    for name, parameter in module.named_parameters():
        mean, deviation = dummies.get(name, (0.0, 0.02))
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.data.fill_(1.0)
        elif parameter.dtype in FLOATS:
            parameter.data.normal_(mean, deviation, generator=generator)
        elif parameter.dtype.is_floating_point:
            limit = torch.finfo(parameter.dtype).max  # above, some versions of torch give NaN
            for rows in parameter.data.view(-1, parameter.shape[-1]).split(_DUMMY_ROWS):
                wide = torch.empty(rows.shape, device=device)
                wide.normal_(mean, deviation, generator=generator)
                rows.copy_(wide.clamp_(-limit, limit))
        else:
            low, high = _range_of(parameter.dtype)
            parameter.data.random_(low, high, generator=generator)
    _process(module)


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    """First and last + 1 value; of 64 bits the last is left out."""
    if dtype == torch.bool:
        return 0, 2
    info = torch.iinfo(dtype)
    return info.min, min(info.max + 1, torch.iinfo(torch.int64).max)


def check_all_claimed(checkpoint: Checkpoint, weight_map: WeightMap, spec: CheckpointSpec) -> None:
    """Checks that no tensor of the files is outside the model's parts.

    Args:
        checkpoint: the files.
        weight_map: of the language model.
        spec: of the checkpoint.

    Raises:
        CheckpointError: names tensors that are nobody's and not ignored.
    """
    prefixes = tuple(weight_map.prefixes.values()) + tuple(filter(None, [spec.vision_prefix]))
    unclaimed = [
        name
        for name in checkpoint.tensors
        if not name.startswith(prefixes) and name not in weight_map.ignored
        and not spec.ignores(name)
    ]  # fmt: skip
    if unclaimed:
        raise CheckpointError(
            f"{checkpoint.directory}: tensors of no known part: {listed(unclaimed)}"
        )


def _set_methods(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    quantization: QuantizationSpec,
) -> None:
    """Gives each linear layer the method that its tensors in the files call for."""
    methods = methods_of(quantization)
    unlisted: list[str] = []
    problems: list[str] = []
    for path, layer in _replaceable(module):
        named = _checkpoint_modules(module, path, layer, weight_map, checkpoint)
        modules = list(named)
        wanted = [quantization.of(name) for name in modules]
        names = {each.name for method in methods.values() for each in method.layouts(layer)}
        # What is missing is as it should be: `_check` names it.
        is_plain = [
            group is None if found is None else found
            for group, found in zip(
                wanted, (_is_plain(checkpoint, *each, names) for each in named.items()), strict=True
            )
        ]
        if all(is_plain):
            unlisted += [name for name, group in zip(modules, wanted, strict=True) if group]
        elif any(is_plain):
            problems.append(f"{listed(modules)} are one layer, and not all are quantized")
        elif None in wanted:
            problems.append(f"{listed(modules)}: quantized, which the configuration denies")
        elif len(set(wanted)) > 1:
            problems.append(f"{listed(modules)} are one layer, in different formats")
        else:
            assert wanted[0] is not None
            layer.set_method(methods[wanted[0]])
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")
    if unlisted:
        log.warning(
            "%s: %d modules are not quantized though quantization_config does not say so: %s",
            checkpoint.directory, len(unlisted), listed(unlisted),
        )  # fmt: skip


def _is_plain(
    checkpoint: Checkpoint, module: str, weight: str, quantized: Collection[str]
) -> bool | None:
    """Whether a module's weight is stored as it is; None: the files hold nothing of it.

    Args:
        checkpoint: the files.
        module: its name there.
        weight: the name of an unquantized weight.
        quantized: what follows the names of modules in the names of quantized tensors.
    """
    info = checkpoint.tensors.get(weight)
    if info is not None:
        return info.dtype in FLOATS
    # Scales of a fused tensor of experts follow its name, see `experts`.
    fused = weight == module
    found = (
        module + name.removeprefix("weight") if fused else f"{module}.{name}" for name in quantized
    )
    return False if any(name in checkpoint.tensors for name in found) else None


def _replaceable(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linear layers, but those with a method of the model's own."""
    for path, child in module.named_modules():
        if isinstance(child, Linear) and type(child.method) is UnquantizedLinear:
            yield path, child


def _checkpoint_modules(
    module: nn.Module,
    path: str,
    layer: Linear,
    weight_map: WeightMap,
    checkpoint: Checkpoint | None = None,
) -> dict[str, str]:
    """The checkpoint's modules of a layer → their weights' tensors."""
    parent, _, stack = path.rpartition(".")
    experts = module.get_submodule(parent)
    if not isinstance(experts, Experts):
        parts = [_part_path(path, part) + ".weight" for part in layer.parts]
        weights = map(weight_map.checkpoint_name, parts)
        return {weight.removesuffix(".weight"): weight for weight in weights}
    prefix, layout = _expert_files(experts, parent, weight_map, checkpoint)
    named = experts.modules_of(stack, layout)
    return {f"{prefix}.{name}": f"{prefix}.{weight}" for name, weight in named.items()}


def _expert_files(
    experts: Experts, path: str, weight_map: WeightMap, checkpoint: Checkpoint | None
) -> tuple[str, FileLayout]:
    """The checkpoint's name for the experts, and their layout there."""
    prefix = weight_map.checkpoint_name(path)
    return prefix, experts.file_layout(prefix, {} if checkpoint is None else checkpoint.tensors)


def _part_path(path: str, part: str) -> str:
    """A part of a merged layer stands beside it in the checkpoint."""
    if not part:
        return path
    parent = path.rpartition(".")[0]
    return f"{parent}.{part}" if parent else part


class _Copier:
    """Moves tensors from files to parameters with as little memory as can be."""

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._staging = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, target: Tensor, source: _Source) -> None:
        """Fills a part of a parameter with its tensor, or a part of it."""
        if source.is_zero:
            target.zero_()
            return
        values = self._reader.read(source.name, source.cut)
        if source.transposed:
            target = target.mT
        values = values.view(target.shape) if values.is_contiguous() else values
        if self._device.type != "cuda":
            target.copy_(values)
            return
        # Cast and transposed on the device: the bus carries the file's bytes.
        values = self._staged(values)
        if values.dtype != target.dtype or source.transposed:
            values = values.to(self._device, non_blocking=True)
        target.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events[self._turn] = event

    def finish(self) -> None:
        """Waits for the last copies."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._staging.clear()

    def _staged(self, values: Tensor) -> Tensor:
        """The values in pinned memory: one buffer is filled while the other is copied."""
        self._turn ^= 1
        event, size = self._events[self._turn], values.numel() * values.itemsize
        if event is not None:
            event.synchronize()
        if self._staging[self._turn].numel() < size:
            self._staging[self._turn] = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._staging[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        staged = self._staging[self._turn][:size].view(values.dtype).view(values.shape)
        return staged.copy_(values)


def _sources(
    module: nn.Module, weight_map: WeightMap, checkpoint: Checkpoint | None = None
) -> Iterator[_Source]:
    """What each parameter is filled from. A parameter shared by two modules appears once."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        if isinstance(child, Experts):
            prefix, layout = _expert_files(child, path, weight_map, checkpoint)
            for tensor in child.tensors(layout):
                parameter = f"{path}.{tensor.stack}.{tensor.layout.parameter}"
                yield _Source(
                    f"{prefix}.{tensor.name}", parameter, tensor.place, tensor.shape,
                    tensor.layout.stored, tensor.cut, tensor.transposed,
                )  # fmt: skip
            continue
        if isinstance(child, StackedLinear):
            continue  # of the experts above
        layouts = (
            {layout.parameter: layout for layout in child.layouts()}
            if isinstance(child, Linear)
            else {}
        )
        shares: Mapping[str, Share] = getattr(child, "shares", {})
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full, shape = f"{path}.{name}" if path else name, tuple(parameter.shape)
            stored_shape = weight_map.shapes.get(full, shape)
            assert math.prod(stored_shape) == parameter.numel(), full
            if name not in layouts or full in weight_map.shapes:
                rows = shares.get(name, Share.of(shape[0]))
                layout = TensorLayout(name=name, parameter=name, axes=(Axis("out"),))
                stored_shape = (rows.size, *shape[1:]) if name in shares else stored_shape
                source = weight_map.checkpoint_name(full)
                for piece in pieces_of("", layout, rows, Share.of(1)):
                    place = piece.place if piece.cut else ()
                    yield _Source(source, full, place, stored_shape, FLOATS, piece.cut)
                continue
            assert isinstance(child, Linear)
            layout = layouts[name]
            is_term = layout.parameter == "bias" and child.columns.ranges[0][0] > 0
            for piece in child.pieces(layout):
                part = f"{_part_path(path, piece.part)}.{layout.name}"
                yield _Source(
                    weight_map.checkpoint_name(part), full, piece.place, piece.shape,
                    layout.stored, piece.cut, is_zero=is_term,
                )  # fmt: skip


def _check(
    sources: list[_Source], checkpoint: Checkpoint, weight_map: WeightMap, spec: CheckpointSpec
) -> None:
    wanted = {source.name: source for source in sources}
    present = checkpoint.tensors
    missing = sorted(set(wanted) - set(present))
    unexpected = [
        name
        for name in present
        if name not in wanted and weight_map.owns(name) and not spec.ignores(name)
    ]
    found = [(name, present[name], wanted[name]) for name in sorted(wanted) if name in present]
    misshapen = [
        f"{name} is {list(info.shape)}, the model wants {list(source.shape)}"
        for name, info, source in found
        if info.shape != source.shape
    ]
    mistyped = [
        f"{name} is {_name(info.dtype)}, the model wants {' or '.join(map(_name, source.stored))}"
        for name, info, source in found
        if info.dtype not in source.stored
    ]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrong shapes", misshapen),
            ("wrong dtypes", mistyped),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _process(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Linear):
            child.method.process_weights_after_loading(child)
        elif isinstance(child, RMSNorm):
            child.process_weights_after_loading()


def _reset_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset(device)
