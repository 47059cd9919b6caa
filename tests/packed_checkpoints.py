"""Writes checkpoints of packed integers, with numpy, lane by lane of a word.

It shares no code with `services.common.nn.packed`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.quantized_checkpoints import is_of_layers, unchanged, write_quantized

AWQ_LANES = (0, 2, 4, 6, 1, 3, 5, 7)


def compressed(group: int, bits: int = 4, symmetric: bool = True, **changes: object) -> dict:
    """compressed-tensors' configuration; group 0: a scale per channel."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "group" if group else "channel", "group_size": group or None, "actorder": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head", r"re:.*visual\..*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    } | changes  # fmt: skip


def in_bytes(group: int, bits: int = 4, symmetric: bool = True) -> dict:
    """compressed-tensors' configuration of integers in bytes, beside int8 activations."""
    config = compressed(group, bits, symmetric, format="int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"
    }  # fmt: skip
    return config


def awq(group: int, **changes: object) -> dict:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": ["visual", "lm_head"],
    } | changes  # fmt: skip


def gptq(group: int, bits: int = 4, v2: bool = False, **changes: object) -> dict:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False,
        "sym": True, "lm_head": False, "checkpoint_format": "gptq_v2" if v2 else "gptq",
    } | changes  # fmt: skip


def auto_round(group: int, bits: int = 4, **changes: object) -> dict:
    return {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": bits,
        "group_size": group or -1, "sym": True, "data_type": "int", "autoround_version": "0.14.2",
        "iters": 200,
    } | changes  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How a checkpoint holds integers; `kind`: of the packing."""

    kind: str
    config: dict
    group: int
    bits: int = 4
    symmetric: bool = True


LAYOUTS = {
    "ct-32": Layout("ct", compressed(32), 32),
    "ct-64-zeros": Layout("ct", compressed(64, symmetric=False), 64, symmetric=False),
    "ct-128": Layout("ct", compressed(128), 128),
    "ct-128-zeros": Layout("ct", compressed(128, symmetric=False), 128, symmetric=False),
    "ct-channel": Layout("ct", compressed(0), 0),
    "ct-channel-zeros": Layout("ct", compressed(0, symmetric=False), 0, symmetric=False),
    "ct-64-8bit": Layout("ct", compressed(64, 8), 64, 8),
    "ct-channel-8bit-zeros": Layout("ct", compressed(0, 8, False), 0, 8, symmetric=False),
    "bytes-64": Layout("int-quantized", in_bytes(64), 64),
    "bytes-32-zeros": Layout("int-quantized", in_bytes(32, 4, False), 32, symmetric=False),
    "bytes-64-8bit": Layout("int-quantized", in_bytes(64, 8), 64, 8),
    "bytes-channel-8bit-zeros": Layout(
        "int-quantized", in_bytes(0, 8, False), 0, 8, symmetric=False
    ),
    "awq-32": Layout("awq", awq(32), 32, symmetric=False),
    "awq-64": Layout("awq", awq(64), 64, symmetric=False),
    "gptq-64": Layout("gptq", gptq(64), 64),
    "gptq-v2-32": Layout("gptq_v2", gptq(32, v2=True), 32),
    "gptq-channel": Layout("gptq", gptq(0), 0),
    "gptq-64-8bit": Layout("gptq", gptq(64, 8), 64, 8),
    "gptq-v2-32-8bit": Layout("gptq_v2", gptq(32, 8, v2=True), 32, 8),
    "auto-round-64": Layout("auto-round", auto_round(64), 64),
}


def quantize(
    weight: np.ndarray, group: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[N, K]`, scales and zero points `[N, G]`; scales are rounded before codes are made."""
    rows, columns = weight.shape
    group = group or columns
    top, count = 2**bits - 1, -(-columns // group)
    scales, zeros = np.empty((rows, count), np.float32), np.empty((rows, count), np.int64)
    codes = np.empty((rows, columns), np.int64)
    for index in range(count):
        part = weight[:, index * group : (index + 1) * group]
        if symmetric:
            scale, zero = np.abs(part).max(1) / (top // 2), np.full(rows, (top + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.rint(-low / scale), 0, top)
        scale = torch.from_numpy(scale).to(scale_dtype).float().numpy()
        scales[:, index], zeros[:, index] = scale, zero
        rounded = np.rint(part / scale[:, None]) + zeros[:, index, None]
        codes[:, index * group : (index + 1) * group] = np.clip(rounded, 0, top)
    return codes, scales, zeros


def meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> Tensor:
    """The float32 matrix."""
    at = np.arange(codes.shape[1]) // (group or codes.shape[1])
    return torch.from_numpy((codes - zeros[:, at]).astype(np.float32) * scales[:, at])


def words(codes: np.ndarray, axis: int, bits: int, lanes: tuple[int, ...] = ()) -> Tensor:
    """Packs codes along an axis into int32; the last word is filled up with zeros."""
    per = 32 // bits
    codes = np.moveaxis(codes, axis, 0)
    made = np.zeros((-(-len(codes) // per), *codes.shape[1:]), np.uint32)
    for lane, place in enumerate(lanes or range(per)):
        of_lane = codes[place::per].astype(np.uint32)
        made[: len(of_lane)] |= of_lane << np.uint32(bits * lane)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(made, 0, axis)).view(np.int32))


def tensors(weight: Tensor, layout: Layout, scale_dtype: torch.dtype):
    """The matrix that is meant, and a module's tensors by suffix."""
    codes, scales, zeros = quantize(
        weight.numpy(), layout.group, layout.bits, layout.symmetric, scale_dtype
    )
    made: dict[str, Tensor] = {}
    scale, bits = torch.from_numpy(scales).to(scale_dtype), layout.bits
    if layout.kind == "ct":
        made["weight_packed"] = words(codes, 1, bits)
        made["weight_scale"] = scale
        made["weight_shape"] = torch.tensor(weight.shape)
        if not layout.symmetric:
            made["weight_zero_point"] = words(zeros, 0, bits)
    elif layout.kind == "int-quantized":
        middle = 1 << (bits - 1)
        made["weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        made["weight_scale"] = scale
        if not layout.symmetric:
            made["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    elif layout.kind == "awq":
        made["qweight"] = words(codes.T, 1, bits, AWQ_LANES)
        made["qzeros"] = words(zeros.T, 1, bits, AWQ_LANES)
        made["scales"] = scale.t()
    else:
        made["qweight"] = words(codes.T, 0, bits)
        made["qzeros"] = words(zeros.T - (layout.kind != "gptq_v2"), 1, bits)
        made["scales"] = scale.t()
        columns = np.arange(weight.shape[1]) // (layout.group or weight.shape[1])
        if layout.kind != "auto-round":
            made["g_idx"] = torch.from_numpy(columns.astype(np.int32))
    return meant(codes, scales, zeros, layout.group), made


def write(
    source: Path,
    directory: Path,
    name: str,
    *,
    scale_dtype: torch.dtype = torch.float16,
    modules: Callable[[str], bool] = is_of_layers,
    change: Callable[[str, Tensor], Tensor | None] = unchanged,
    config: dict | None = None,
    layout: Callable[[str], Layout] | None = None,
) -> dict[str, Tensor]:
    """Quantizes a checkpoint, see `write_quantized`; `name`: of `LAYOUTS`, unless `layout` says
    another one for a module.
    """
    standard = LAYOUTS[name]

    def quantized(module: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return tensors(weight, layout(module) if layout else standard, scale_dtype)

    chosen = standard.config if config is None else config
    return write_quantized(source, directory, chosen, quantized, modules, change)
