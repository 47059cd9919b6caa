"""Random weights, for a model without a checkpoint: benchmarks and tests of speed."""

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.layer_formats import set_configured_methods
from services.common.nn.linear import FLOATS, Linear, StoredTensor, own_pieces
from services.common.nn.weight_map import WeightMap
from services.common.nn.weights import materialize, process
from services.common.process.progress import log_progress

_WIDE = 1 << 22  # elements that are drawn at a time


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

    Made on the device; the same on each run on the same kind of device. A rank has its part of
    what one rank would have.

    Args:
        module: built on `meta`.
        weight_map: the module's names in a checkpoint; needed with `quantization`.
        quantization: every linear layer that it applies to gets its method, as if a checkpoint
            held just what the configuration says.
    """
    if quantization is not None:
        assert weight_map is not None
        set_configured_methods(module, weight_map, quantization)
    log_progress("random weights")
    materialize(module, device, dtype)
    drawn = _Drawn(torch.Generator(device=device), seed)
    parameters = dict(module.named_parameters())  # a shared parameter once
    for path, child in module.named_modules():
        for name, _ in child.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if full not in parameters:
                continue
            values = parameters[full].data
            if values.ndim == 1 and name.endswith("weight"):
                values.fill_(1.0)
                continue
            for piece in _pieces_of(child, name):
                part = values[(*[slice(None)] * (values.ndim - len(piece.shape)), *piece.place)]
                drawn.fill(part, piece, f"{full}/{piece.part}")
    process(module)


def _pieces_of(module: nn.Module, name: str) -> Iterator[StoredTensor]:
    """What fills a parameter, of each matrix where it is a stack of them."""
    if isinstance(module, Linear):
        (layout,) = (layout for layout in module.layouts() if layout.parameter == name)
        return module.pieces(layout)
    return own_pieces(module, name)


class _Drawn:
    """Random tensors, of which ranks fill their parts: a number depends on the tensor's name and
    its place in the whole tensor alone.
    """

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator, self._seed = generator, seed

    def fill(self, target: Tensor, piece: StoredTensor, name: str) -> None:
        """Fills a piece of a parameter, `[..., *piece]`; of a stack, of all its matrices."""
        if piece.is_zero:
            target.zero_()
            return
        if target.ndim > len(piece.shape):
            for index, each in enumerate(target):
                self.fill(each, piece, f"{name}/{index}")
            return
        cut, *others = piece.cut or (slice(None),)
        assert isinstance(cut, slice)
        rows, width = range(piece.shape[0])[cut], math.prod(piece.shape[1:])
        step = max(1, _WIDE // width)  # rows that are drawn at a time
        for first in range(rows.start - rows.start % step, rows.stop, step):
            drawn = range(first, min(first + step, piece.shape[0]))
            self._generator.manual_seed(zlib.crc32(f"{self._seed}/{name}/{first}".encode()))
            values = self._draw(len(drawn) * width, target, *piece.layout.dummy)
            begin, end = max(rows.start, first), min(rows.stop, drawn.stop)
            values = values.view(len(drawn), *piece.shape[1:])[begin - first : end - first]
            target[begin - rows.start : end - rows.start] = values[(slice(None), *others)]

    def _draw(self, count: int, target: Tensor, mean: float, deviation: float) -> Tensor:
        """Mean and deviation are those of numbers; integers have all values alike."""
        device, dtype = target.device, target.dtype
        if not dtype.is_floating_point:
            return torch.empty(count, dtype=dtype, device=device).random_(
                *_range_of(dtype), generator=self._generator
            )
        values = torch.empty(count, device=device)
        values.normal_(mean, deviation, generator=self._generator)
        if dtype not in FLOATS:  # above its limit, some versions of torch give NaN
            values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        return values


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    """First and last + 1 value; of 64 bits the last is left out."""
    if dtype == torch.bool:
        return 0, 2
    info = torch.iinfo(dtype)
    return info.min, min(info.max + 1, torch.iinfo(torch.int64).max)
