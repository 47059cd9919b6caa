"""Prints the decoder's dispatch table for a model on a device. Needs no GPU.

    python -m benchmarks.kernels.kernel_table --shape 8b --device a100
    python -m benchmarks.kernels.kernel_table --shape DIR --device here --kernels logits=plain

`--shape` is one of the sizes in `text_shapes`, `all`, or a checkpoint directory; `--device` is one
of `kernels.device.KNOWN_DEVICES`, `all`, or `here`. A line is an operation: its
implementations in order of preference with the numbers of tokens that they serve (the first that
fits is used), and behind the bar those that cannot run, and why.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.text_shapes import TEXT_SHAPES
from kernels.device import KNOWN_DEVICES, DeviceFacts
from services.common.families import read_spec
from services.common.model_spec import TextSpec
from services.common.nn.dispatch import parse_overrides
from services.decoder.attention import table as attention_table
from services.decoder.operations.table import UNQUANTIZED, KernelFacts, attention_facts, resolve


def shapes_named(name: str) -> dict[str, TextSpec]:
    """One size, all of them, or that of a checkpoint directory."""
    if name == "all":
        return TEXT_SHAPES
    if name in TEXT_SHAPES:
        return {name: TEXT_SHAPES[name]}
    return {name: read_spec(Path(name)).text}


def devices_named(name: str) -> dict[str, DeviceFacts]:
    """One device, all known ones, or the one that is here."""
    if name == "all":
        return KNOWN_DEVICES
    if name == "here":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return {"here": DeviceFacts.of(device)}
    return {name: KNOWN_DEVICES[name]}


def main(arguments: list[str] | None = None) -> None:
    """The command; `arguments` instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="all", help=f"{', '.join(TEXT_SHAPES)}, all or DIR")
    parser.add_argument(
        "--device", default="h200", choices=[*KNOWN_DEVICES, "all", "here"], help="default: h200"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--weights", default=UNQUANTIZED, help="format of the linear layers")
    parser.add_argument("--no-flashinfer", action="store_true", help="as if it were not installed")
    parser.add_argument("--kernels", default="", help="as DECODER_KERNELS")
    chosen = parser.parse_args(arguments)
    for shape, text in shapes_named(chosen.shape).items():
        for name, device in devices_named(chosen.device).items():
            facts = KernelFacts(device, text, getattr(torch, chosen.dtype), chosen.weights)
            print(f"{shape}, {chosen.dtype}, {chosen.weights} weights, on {device.name} ({name})")
            overrides = parse_overrides(chosen.kernels)
            of_attention = attention_facts(facts, has_flashinfer=not chosen.no_flashinfer)
            attention = attention_table.resolve(of_attention, overrides)
            others = {of: name for of, name in overrides.items() if of not in attention.operations}
            table = resolve(facts, others)
            table.include(attention)
            print(table, end="\n\n")


if __name__ == "__main__":
    main()
