"""A parsed answer: parts in order, from which each endpoint makes its own wire form.

A stream of parts holds pieces; `join` makes whole parts of them. Parsers (`answer`) produce them.
"""

from collections.abc import Iterable

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """The reasoning of the model before its answer, without tags."""

    text: str


class Text(Struct, frozen=True):
    """The answer's content."""

    text: str


class Call(Struct, frozen=True):
    """A tool call, or a piece of one.

    Attributes:
        index: of the call in the answer.
        call_id: in the first piece of a call only, as is `name`.
        arguments: JSON text; the pieces of a call together are its arguments.
    """

    index: int
    call_id: str
    name: str
    arguments: str

    @property
    def text(self) -> str:
        """The text of the piece, as in other parts."""
        return self.arguments


Part = Reasoning | Text | Call


def join(pieces: Iterable[Part]) -> list[Part]:
    """Whole parts, in order: neighbouring pieces of a kind, and of one call, become one."""
    runs: list[list[Part]] = []
    for piece in pieces:
        if runs and continues(runs[-1][0], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_joined(run) for run in runs]


def continues(first: Part, piece: Part) -> bool:
    """Returns whether a piece belongs to the part that began with `first`."""
    if isinstance(first, Call):
        return isinstance(piece, Call) and piece.index == first.index
    return type(first) is type(piece)


def _joined(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    text = "".join(piece.text for piece in run)
    if isinstance(first, Call):
        return Call(first.index, first.call_id, first.name, text)
    return type(first)(text)
