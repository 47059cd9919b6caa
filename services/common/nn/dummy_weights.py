"""Random weights in place of a checkpoint, for benchmarks and tests of speed."""

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

_WIDE = 1 << 22  # number of elements that are drawn at a time


def load_dummy(
    module: nn.Module,
    seed: int = 0,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    weight_map: WeightMap | None = None,
    quantization: QuantizationSpec | None = None,
) -> None:
    """Materializes a module with random weights of standard deviation 0.02 and norm weights of 1.

    The weights are drawn on the device. They are the same in each run on the same kind of device,
    and on all ranks that hold a whole tensor.

    Args:
        module: module that was built on `meta`.
        seed: seed of the random numbers.
        device: device of the parameters.
        dtype: data type of the parameters.
        weight_map: names of the module's layers in a checkpoint. Needed with `quantization`.
        quantization: quantization of the layers, which get their methods as from a checkpoint that
            agrees with its configuration. None if all layers are unquantized.
    """
    if quantization is not None:
        assert weight_map is not None
        set_methods(module, Checkpoint(Path(), {}), weight_map, quantization)
    log_progress("random weights")
    materialize(module, device, dtype)
    generator = torch.Generator(device=device)
    for name, parameter in module.named_parameters():  # yields a shared parameter once
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
    """Draws floats from a normal distribution, and integers uniformly from their whole range."""
    dtype = like.dtype
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        # `random_` takes int64 limits, so the largest int64 value is never drawn.
        end = min(info.max + 1, torch.iinfo(torch.int64).max)
        return torch.empty_like(like).random_(info.min, end, generator=generator)
    values = torch.empty(len(like), device=like.device)
    values.normal_(mean, deviation, generator=generator)
    if dtype not in FLOATS:  # some versions of torch convert values above an FP8 limit to NaN
        values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values
