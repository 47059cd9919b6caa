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


def resolve_adapters(options: ServeOptions) -> ServeOptions:
    """Returns the options with directories in place of the adapters' names on the hub.

    Raises:
        StackError: an adapter is neither a directory nor can it be downloaded.
    """
    if options.merge_adapter is None:
        return options
    return replace(options, merge_adapter=_directory(options.merge_adapter))


def _directory(adapter: Path) -> Path:
    found, _ = resolve_model(adapter)
    if not os.path.exists(found / "adapter_config.json"):
        raise StackError(f"no adapter at {adapter}: it has no adapter_config.json", 2)
    return found.resolve()
