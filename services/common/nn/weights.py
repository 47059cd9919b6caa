"""Loads the weights of a module that was built on `meta` from a checkpoint.

    with torch.device("meta"):
        model = LanguageModel(spec)
    load_weights(model, Checkpoint.open(directory), model.weight_map, device=..., dtype=...)

Each tensor in the files is read, ignored by name, or an error, because a model without some of its
scales would generate fluent nonsense. `layer_formats` sets the format of each layer beforehand.
`dummy_weights` fills a module with random weights instead.

A parameter that was made in float32 gets the model's dtype, unless the module lists its name in
`float32_parameters`, as for scales. Buffers are computed instead of loaded: a module that has
buffers defines `reset_buffers(device)`, which is called after its parameters have memory. Buffers
keep the dtype that this function gives them; rope frequencies, for example, stay float32 in a bf16
model.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from services.common.model_spec import CheckpointSpec
from services.common.nn.checkpoint import (
    Checkpoint,
    CheckpointError,
    Reader,
    TensorInfo,
    listed,
)
from services.common.nn.collectives import Share
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import (
    Axis,
    Linear,
    StoredLayers,
    StoredTensor,
    TensorLayout,
    pieces_of,
)
from services.common.nn.weight_map import WeightMap, stored_files
from services.common.process.progress import log_progress

DUMMY_FINGERPRINT = "dummy"
_WIDE = 1 << 22  # number of elements that are quantized at a time
_NO_BIAS = TensorLayout(
    name="bias",
    axes=(Axis("out"),),
    required=lambda rows, _: torch.zeros(rows),
    otherwise="the model has no such bias, and the bias in the file is not zero",
)


def materialize(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Allocates the parameters of a `meta` module and computes its buffers by `reset_buffers`.

    Float32 parameters get `dtype`, except those that a module lists in `float32_parameters`. Other
    parameters keep their dtype. The values of parameters are undefined afterwards.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # so that a shared parameter stays shared
    for child in module.modules():
        float32: frozenset[str] = getattr(child, "float32_parameters", frozenset())
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter not in made:
                is_cast = parameter.dtype == torch.float32 and name not in float32
                kind = dtype if is_cast else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=kind, device=device)
                made[parameter] = nn.Parameter(memory, requires_grad=False)
            setattr(child, name, made[parameter])
    for child in module.modules():
        if callable(reset := getattr(child, "reset_buffers", None)):
            reset(torch.device(device))


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    spec: CheckpointSpec | None = None,
) -> None:
    """Materializes the module and fills its parameters from the files.

    The peak of host memory besides the mapped file is two tensors if the device is a GPU, and the
    model and one tensor if it is the CPU. Of a fused tensor of experts, one expert's part counts.

    Args:
        module: module that was built on `meta`, whose layers have their methods (`layer_formats`).
        checkpoint: the files.
        weight_map: names of the module's parameters in the files.
        device: device of the parameters.
        dtype: data type of the parameters.
        spec: spec of the checkpoint, which lists ignored tensors. None if no tensor is ignored.

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape, or e4m3 weights have a
            NaN. The message names all.
    """
    spec = spec or CheckpointSpec(text_prefix="")
    try:
        found = _sources(module, weight_map, checkpoint)
        sources = [_as_stored(source, checkpoint.tensors) for source in found]
    except ValueError as error:  # ranks would cut through a block
        raise CheckpointError(f"{checkpoint.directory}: {error}") from None
    _check(sources, checkpoint, weight_map, spec)
    materialize(module, device, dtype)
    parameters = dict(module.named_parameters())
    by_file: dict[Path, list[StoredTensor]] = {}
    for source in sources:
        if source.is_read:
            by_file.setdefault(checkpoint.tensors[source.name].path, []).append(source)
    with checkpoint.reader() as reader:
        copier = _Copier(reader, torch.device(device))
        for done, path in enumerate(sorted(by_file)):
            for source in by_file[path]:
                log_progress("weights", done, len(by_file))
                if source.parameter:
                    copier.fill(_filled_by(source, parameters), source)
                elif not _is_as_required(source, reader):
                    what = f"{source.name}: {source.layout.otherwise}"
                    raise CheckpointError(f"{checkpoint.directory}: {what}")
        if names := copier.finish():
            raise CheckpointError(
                f"{checkpoint.directory}: values that are no numbers (NaN): {listed(names)}; the "
                "files are damaged, or the program that has quantized them has failed"
            )
    log_progress("weights", len(by_file), len(by_file))
    process(module)


def _as_stored(source: StoredTensor, tensors: Mapping[str, TensorInfo]) -> StoredTensor:
    """Adapts a source to the name and the shape of its tensor in the files.

    The shape may have more or fewer axes of size 1, because producers write scales as a number,
    `[N]`, `[N, 1]`, or `[N / 128, 1, K / 128, 1]`.
    """
    other_name = source.name + source.layout.other_ending
    if source.name not in tensors and other_name in tensors:
        source = replace(source, name=other_name)
    info = tensors.get(source.name)
    if info is None or source.layout.required or len(info.shape) == len(source.shape):
        return source
    if [size for size in info.shape if size != 1] != [size for size in source.shape if size != 1]:
        return source
    pairs = zip_longest(source.shape, source.cut, fillvalue=slice(None))
    cuts = iter([cut for size, cut in pairs if size != 1])
    cut = tuple(next(cuts) if size != 1 else slice(None) for size in info.shape)
    return replace(source, shape=info.shape, cut=cut if source.cut else ())


def _filled_by(source: StoredTensor, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Regions that a tensor fills: of a parameter, and of its scales if loading quantizes it."""
    names = [source.parameter]
    if source.layout.quantize is not None:
        names.append(source.parameter.rpartition(".")[0] + ".weight_scale")
    return [parameters[name].data[source.place] for name in names]


def _is_as_required(source: StoredTensor, reader: Reader) -> bool:
    """Returns whether the tensor has the only value that is supported."""
    assert source.layout.required is not None
    wanted = source.layout.required(*source.module)[source.cut]
    return reader.read(source.name, source.cut).to(wanted.dtype).equal(wanted)


class _Copier:
    """Copies tensors from files to parameters through two staging buffers."""

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._staging = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._have_nan: dict[str, Tensor] = {}  # by name of the tensor, on the device

    def fill(self, targets: list[Tensor], source: StoredTensor) -> None:
        """Fills a region of a parameter, and of its scales if the tensor is quantized on the way.

        Args:
            targets: the regions, as `_filled_by` returns them.
            source: tensor that fills the regions, or piece of a tensor.
        """
        target = targets[0]
        if source.is_zero:
            target.zero_()
            return
        values = self._reader.read(source.name, source.cut)
        if source.transposed:
            target = target.mT
        values = values.reshape(target.shape)
        if self._device.type != "cuda":
            _put(values, target, targets, source)
            self._look_for_nan(source.name, targets[0])
            return
        # Values are cast and transposed on the device, so that the file's bytes cross the bus.
        values = self._staged(values)
        if values.dtype != target.dtype or source.transposed:
            values = values.to(self._device, non_blocking=True)
        _put(values, target, targets, source)
        self._look_for_nan(source.name, targets[0])
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events[self._turn] = event

    def finish(self) -> list[str]:
        """Waits for the last copies, and returns the names of tensors that have a NaN."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._staging.clear()
        if not self._have_nan:
            return []
        have_nan = torch.stack(list(self._have_nan.values())).tolist()
        return [name for name, found in zip(self._have_nan, have_nan, strict=True) if found]

    def _look_for_nan(self, name: str, target: Tensor) -> None:
        """Notes whether e4m3 values have a NaN, without waiting for the device.

        Kernels for few tokens convert the codes of NaN to 480, so that answers would be wrong. In
        any other dtype, and in kernels for many tokens, a NaN makes the output NaN, and the
        sequence fails.
        """
        if target.dtype != torch.float8_e4m3fn or not target.numel():
            return
        # The codes are 0xFF and 0x7F, the largest of unsigned and of signed bytes.
        largest = target.view(torch.uint8).max(), target.view(torch.int8).max()
        found = (largest[0] == 0xFF) | (largest[1] == 0x7F)
        self._have_nan[name] = found | self._have_nan[name] if name in self._have_nan else found

    def _staged(self, values: Tensor) -> Tensor:
        """Copies values to pinned memory. One buffer is filled while the other is transferred."""
        self._turn ^= 1
        event, size = self._events[self._turn], values.numel() * values.itemsize
        if event is not None:
            event.synchronize()
        if self._staging[self._turn].numel() < size:
            self._staging[self._turn] = torch.empty(0, dtype=torch.uint8)  # frees the old buffer
            self._staging[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        staged = self._staging[self._turn][:size].view(values.dtype).view(values.shape)
        return staged.copy_(values)


def _put(values: Tensor, target: Tensor, targets: list[Tensor], source: StoredTensor) -> None:
    """Copies values, or quantizes some rows at a time, because quantizing makes float32 copies."""
    if source.layout.quantize is None:
        target.copy_(values, non_blocking=True)
        return
    quantized, scales = targets
    values = values.mT if source.transposed else values
    count = max(1, _WIDE // values.shape[1])
    for first in range(0, len(values), count):
        rows = slice(first, first + count)
        quantized[rows], scales[rows] = source.layout.quantize(values[rows])


def _sources(
    module: nn.Module, weight_map: WeightMap, checkpoint: Checkpoint
) -> Iterator[StoredTensor]:
    """Yields the tensors that fill the parameters. A parameter of two modules is filled once."""
    filled: dict[int, str] = {}  # full names of parameters, by their `id`
    for path, child in module.named_modules():
        if isinstance(child, StoredLayers):
            prefix, layout = stored_files(child, path, weight_map, checkpoint)
            for tensor in child.tensors(layout):
                parameter = f"{path}.{tensor.parameter}" if tensor.parameter else ""
                yield replace(tensor, name=f"{prefix}.{tensor.name}", parameter=parameter)
            continue
        if isinstance(child, Linear) and child.stack:
            continue  # `StoredLayers.tensors` has yielded its tensors
        for piece in _pieces_of(child):
            full = ""
            if piece.parameter:
                full = f"{path}.{piece.parameter}".lstrip(".")
                if filled.setdefault(id(child.get_parameter(piece.parameter)), full) != full:
                    continue
            shape = weight_map.shapes.get(full, piece.shape)
            assert math.prod(shape) == math.prod(piece.shape), full
            name = weight_map.tensor_name(path, piece.part, piece.name)
            yield replace(piece, name=name, parameter=full, shape=shape)
        if isinstance(child, Linear):
            yield from _zero_biases(child, path, weight_map, checkpoint)


def _pieces_of(module: nn.Module) -> Iterator[StoredTensor]:
    """Yields the tensors of a module's own parameters, without those of its submodules."""
    if isinstance(module, Linear):
        for layout in module.layouts():
            if layout.name:
                yield from module.pieces(layout)
        return
    shares: Mapping[str, Share] = getattr(module, "shares", {})
    for name, parameter in module.named_parameters(recurse=False):
        axes = Axis("out"), *parameter.shape[1:]
        rows = shares.get(name, Share.of(len(parameter)))
        layout = TensorLayout(name=name, parameter=name, axes=axes)
        yield from pieces_of("", layout, rows, Share.of(1))


def _zero_biases(
    layer: Linear, path: str, weight_map: WeightMap, checkpoint: Checkpoint
) -> Iterator[StoredTensor]:
    """Yields biases in the files that the layer does not have. Their values have to be zero.

    Some producers of GPTQ files write a bias of zeros for each module.
    """
    if layer.is_plain or layer.bias is not None:
        return
    for part, rows in layer.rows.items():
        name = weight_map.tensor_name(path, part, "bias")
        if name in checkpoint.tensors:
            yield StoredTensor(
                name=name,
                parameter="",
                layout=_NO_BIAS,
                shape=(rows.size,),
                module=(rows.size, layer.columns.size),
                place=(),
            )


def _check(
    sources: list[StoredTensor], checkpoint: Checkpoint, weight_map: WeightMap, spec: CheckpointSpec
) -> None:
    wanted = {source.name: source for source in sources}
    present = checkpoint.tensors
    missing = sorted(
        _name_in_files(wanted[name], present)
        for name in wanted
        if wanted[name].is_read and name not in present
    )
    unexpected = [
        name
        for name in present
        if name not in wanted and weight_map.owns(name) and not spec.ignores(name)
    ]
    found = [
        (name, present[name], wanted[name])
        for name in sorted(wanted)
        if name in present and wanted[name].is_read
    ]
    misshapen = [
        f"{name} is {list(info.shape)}, the model wants {list(source.shape)}"
        for name, info, source in found
        if info.shape != source.shape
    ]
    mistyped = [
        f"{name} is {_name(info.dtype)}, the model wants {' or '.join(map(_name, kinds))}"
        for name, info, source in found
        if info.dtype not in (kinds := source.layout.stored)
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


def _name_in_files(source: StoredTensor, present: Collection[str]) -> str:
    """Returns the name of a missing tensor as these files would spell it: with the ending that
    tensors of the same kind have here, such as `weight_scale_inv`.
    """
    ending = source.layout.other_ending
    stored = f".{source.layout.name}{ending}"
    is_usual = bool(ending) and any(name.endswith(stored) for name in present)
    return f"{source.name}{ending}" if is_usual else source.name


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def process(module: nn.Module) -> None:
    """Converts loaded parameters to the form that layers compute with. Called once."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.method.process_weights_after_loading(child)
        elif isinstance(child, RMSNorm):
            child.process_weights_after_loading()
