"""The options of `triptych serve` that are about LoRA adapters."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from triptych.hub import resolve_model
from triptych.options import ServeOptions
from triptych.stack import StackError


def add_adapter_options(add: Callable[..., argparse.Action]) -> None:
    """Adds the options by a method `add_argument`."""
    add(
        "--merge-adapter",
        type=Path,
        metavar="ORG/NAME|DIR",
        help="LoRA adapter in PEFT's layout that is folded into the weights while they are read.",
    )
    add(
        "--adapter",
        "--lora-modules",
        dest="adapters",
        nargs="+",
        action="extend",
        metavar="NAME=ORG/NAME|DIR",
        help="LoRA adapters that are served by name beside the base model.",
    )
    add(
        "--max-adapters",
        "--max-loras",
        type=_count,
        metavar="N",
        help="Most adapters, those included that are loaded while the server runs. Defaults to the "
        "number of adapters that are given.",
    )
    add(
        "--max-adapter-rank",
        "--max-lora-rank",
        type=_count,
        metavar="N",
        help="Largest rank of an adapter, up to 256. Defaults to that of the adapters that are "
        "given, and to at least 16.",
    )


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 256):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 256")
    return int(text)


def resolve_adapters(options: ServeOptions) -> ServeOptions:
    """Returns the options with directories in place of the adapters' names on the hub.

    Raises:
        StackError: an adapter is neither a directory nor can it be downloaded.
    """
    merged, adapters = options.merge_adapter, options.adapters
    if merged is not None:
        options = replace(options, merge_adapter=_directory(merged))
    if not adapters:
        return options
    found: dict[str, Path] = {}
    for entry in adapters:
        name, _, adapter = entry.partition("=")
        if not name or not adapter:
            raise StackError(f"--adapter {entry}: write NAME=ORG/NAME or NAME=DIRECTORY", 2)
        if name in found:
            raise StackError(f"--adapter: two adapters have the name {name}", 2)
        found[name] = _directory(Path(adapter))
        if "," in str(found[name]):
            raise StackError(f"--adapter: the path {found[name]} has a comma", 2)
    return replace(options, adapters=[f"{name}={path}" for name, path in found.items()])


def _directory(adapter: Path) -> Path:
    found, _ = resolve_model(adapter)
    if not os.path.exists(found / "adapter_config.json"):
        raise StackError(f"no adapter at {adapter}: it has no adapter_config.json", 2)
    return found.resolve()
