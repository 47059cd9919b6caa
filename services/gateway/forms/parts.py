"""The parts of a parsed answer, in order. Each endpoint converts them to its own wire format.

The parsers of answers produce a stream of pieces of parts, and `join` joins the pieces to whole
parts.
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
    """A tool call, or a piece of a tool call.

    Attributes:
        index: place of the call among the calls of the answer.
        call_id: id of the call. Empty in all pieces of a call but the first.
        name: name of the function. Empty in all pieces of a call but the first.
        arguments: piece of the JSON text of the arguments.
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
    """Returns whole parts, in order. Neighbouring pieces of the same kind and call are joined."""
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
