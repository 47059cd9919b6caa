"""The options of `triptych serve` that are about speculation."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from triptych.hub import resolve_model
from triptych.options import ServeOptions

MAX_TOKENS = 32


def add_speculation_options(add: Callable[..., argparse.Action]) -> None:
    """Adds the options by a method `add_argument`."""
    add(
        "--speculation",
        choices=("auto", "off", "lookup", "mtp"),
        help="Verify several guessed tokens in one step, which changes no answer. lookup copies "
        "guesses from the request's own text and from its prediction. mtp makes them with the "
        "model's own layer for multi-token prediction. auto is mtp on a GPU if the checkpoint has "
        "the layer, and lookup otherwise. Defaults to off.",
    )
    add(
        "--speculation-head",
        type=Path,
        metavar="ORG/NAME|DIRECTORY",
        help="Model whose layer for multi-token prediction is used, with --speculation mtp. Many "
        "fine-tuned models have lost their own. The sizes have to be the same.",
    )
    add(
        "--speculation-tokens",
        type=_tokens,
        metavar="N",
        help=f"Most guessed tokens of a sequence in a step, up to {MAX_TOKENS}. Defaults to 15, or "
        "to 8 with mtp or recurrent states.",
    )


def resolve_head(options: ServeOptions) -> ServeOptions:
    """Returns the options with the directory in place of the head's name on the hub.

    Raises:
        StackError: the head is neither a directory nor can it be downloaded.
    """
    if options.speculation_head is None:
        return options
    found, _ = resolve_model(options.speculation_head)
    return replace(options, speculation_head=found.resolve())


def _tokens(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MAX_TOKENS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_TOKENS}")
    return int(text)
