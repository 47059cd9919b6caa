"""Random weights, for a model without a checkpoint: benchmarks and tests of speed."""

import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.layer_formats import set_methods
from services.common.nn.linear import FLOATS, Linear
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

    Made on the device; the same on each run on the same kind of device, and on all ranks that hold
    a whole tensor.

    Args:
        module: built on `meta`.
        weight_map: the module's names in a checkpoint; needed with `quantization`.
        quantization: every linear layer that it applies to gets its method, as if a checkpoint
            held just what the configuration says.
    """
    if quantization is not None:
        assert weight_map is not None
        set_methods(module, Checkpoint(Path(), {}), weight_map, quantization)
    log_progress("random weights")
    materialize(module, device, dtype)
    generator = torch.Generator(device=device)
    for name, parameter in module.named_parameters():  # a shared parameter once
        path, _, own_name = name.rpartition(".")
        layer = module.get_submodule(path)
        if parameter.ndim == 1 and own_name.endswith("weight"):
            parameter.data.fill_(1.0)
            continue
        generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        layouts = layer.layouts() if isinstance(layer, Linear) else ()
        spread = next((each.dummy for each in layouts if each.parameter == own_name), (0.0, 0.02))
        for part in parameter.data.view(-1).split(_WIDE):
            part.copy_(_drawn(part, generator, *spread))
    process(module)


def _drawn(like: Tensor, generator: torch.Generator, mean: float, deviation: float) -> Tensor:
    """Mean and deviation are those of numbers; integers have all values alike."""
    dtype = like.dtype
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        end = min(info.max + 1, torch.iinfo(torch.int64).max)  # of 64 bits the last is left out
        return torch.empty_like(like).random_(info.min, end, generator=generator)
    values = torch.empty(len(like), device=like.device)
    values.normal_(mean, deviation, generator=generator)
    if dtype not in FLOATS:  # above its limit, some versions of torch give NaN
        values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values
