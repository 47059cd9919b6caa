"""The options of `triptych serve` that are about speculation."""

import argparse
from collections.abc import Callable

MAX_TOKENS = 32


def add_speculation_options(add: Callable[..., argparse.Action]) -> None:
    """Adds the options by a method `add_argument`."""
    add(
        "--speculation",
        choices=("auto", "off", "lookup", "mtp"),
        help="Verify several guessed tokens in one step, which changes no answer. lookup copies "
        "guesses from the request's own text and from its prediction. mtp makes them with the "
        "model's own layer for multi-token prediction. auto is lookup on a CPU and off on a GPU. "
        "Defaults to off.",
    )
    add(
        "--speculation-tokens",
        type=_tokens,
        metavar="N",
        help=f"Most guessed tokens of a sequence in a step, up to {MAX_TOKENS}. Defaults to 8.",
    )


def _tokens(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MAX_TOKENS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_TOKENS}")
    return int(text)
