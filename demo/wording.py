"""Words and phrases shared by the questions about one image and about several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demo.dice import Dice
from demo.scenes import COLOURS, SHAPES, Scene, Thing

NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
ORDINALS = ("first", "second", "third")
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the centre", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
STRANGE_COLOURS = ("black", "white", "grey")  # never in an image
STRANGE_SHAPES = ("rectangle", "oval", "pentagon", "hexagon", "arrow")
WORD_PLACES = ("at the top", "in the middle", "at the bottom")


@dataclass(frozen=True)
class Turn:
    """One question with its true answer. `task` names what is being asked for."""

    task: str
    question: str
    answer: str


@dataclass(frozen=True)
class Ref:
    """A way to name shapes: by colour, by shape, by both, or by neither ("object")."""

    colour: str | None
    shape: str | None

    def matches(self, thing: Thing) -> bool:
        """Whether the thing is one of those named."""
        return self.colour in (None, thing.colour) and self.shape in (None, thing.shape)

    def among(self, scene: Scene) -> list[Thing]:
        """Those of the scene's things that are named, in reading order."""
        return [thing for thing in scene.things if self.matches(thing)]

    def __str__(self) -> str:
        return " ".join(part for part in (self.colour, self.shape or "object") if part)

    @property
    def plural(self) -> str:
        """The name for several: "red stars", "crosses", "blue objects"."""
        return plural(str(self))

    @property
    def with_article(self) -> str:
        """The name with "a" or "an"."""
        return with_article(str(self))


def name(thing: Thing) -> str:
    """The full name of a thing, as "red star"."""
    return f"{thing.colour} {thing.shape}"


def place(thing: Thing) -> str:
    """Where a thing is, as "at the top left"."""
    return PLACES[thing.row][thing.col]


def plural(noun: str) -> str:
    """The plural of a name that ends in a shape or in "object"."""
    return noun + ("es" if noun.endswith(("s", "x")) else "s")


def with_article(noun: str) -> str:
    """The name with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(parts: Sequence[str]) -> str:
    """A list in words: "a", "a and b", "a, b and c"."""
    if len(parts) == 1:
        return parts[0]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def counted(number: int, noun: str) -> str:
    """A number with its noun: "no stars", "one star", "two stars"."""
    return f"{NUMBERS[number]} {noun if number == 1 else plural(noun)}"


def sentence(text: str) -> str:
    """The text with a capital at its start and a full stop at its end."""
    return text[0].upper() + text[1:] + "."


def distinct(items: Sequence[str]) -> list[str]:
    """The items without repeats, in their first order."""
    return list(dict.fromkeys(items))


def refs_to(scene: Scene, thing: Thing) -> list[Ref]:
    """Every way to name this one thing and no other in the scene."""
    ways = (
        Ref(thing.colour, thing.shape),
        Ref(None, thing.shape),
        Ref(thing.colour, None),
        Ref(None, None),
    )
    return [ref for ref in ways if len(ref.among(scene)) == 1]


def any_ref(dice: Dice, scene: Scene, present: float = 0.5) -> Ref:
    """A name for something, which may be in the scene or not.

    Absent ones are near misses half of the time: a colour and a shape that are both there,
    but not on the same thing.
    """
    colours, shapes = list(COLOURS), list(SHAPES)
    kind = dice.weighted(("both", "shape", "colour"), (0.5, 0.28, 0.22))
    if scene.things and dice.chance(present):
        thing = dice.pick(scene.things)
        colour, shape = thing.colour, thing.shape
    elif scene.things and dice.chance(0.5):
        colour, shape = dice.pick(scene.things).colour, dice.pick(scene.things).shape
    elif dice.chance(0.15):
        colour = dice.pick((*colours, *STRANGE_COLOURS))
        shape = dice.pick(STRANGE_SHAPES if colour in COLOURS else (*SHAPES, *STRANGE_SHAPES))
    else:
        colour, shape = dice.pick(colours), dice.pick(shapes)
    if kind == "shape":
        return Ref(None, shape)
    if kind == "colour":
        return Ref(colour, None)
    return Ref(colour, shape)


def spoken(dice: Dice, ref: Ref) -> str:
    """A name as a user would say it: "object" may become "thing", "shape" or "one"."""
    if ref.shape is not None:
        return str(ref)
    noun = dice.pick(("object", "thing", "shape", "figure"))
    return f"{ref.colour} {noun}" if ref.colour else noun


def spoken_plural(dice: Dice, ref: Ref) -> str:
    """The plural of `spoken`."""
    return plural(spoken(dice, ref))


def surface(dice: Dice, question: str) -> str:
    """The same question as another user would type it: case, spelling, punctuation, courtesy."""
    text = question
    if dice.chance(0.3):
        text = text.replace("picture", dice.pick(("image", "photo", "drawing")))
    if dice.chance(0.3):
        text = text.replace("colour", "color").replace("centre", "center")
    if dice.chance(0.06):
        text = dice.pick(("Please tell me: ", "Tell me, ", "Hi! ", "Hello, ", "Hey, ", "So, ")) + (
            text[0].lower() + text[1:]
        )
    if dice.chance(0.05):
        text = text.rstrip("?.") + (", please" if dice.chance(0.5) else " please") + "?"
    if dice.chance(0.2):
        text = text.rstrip("?.")
    style = dice.unit()
    if style < 0.22:  # a printed word keeps its capitals
        text = " ".join(w if w.isupper() and len(w) > 2 else w.lower() for w in text.split(" "))
    elif style < 0.26:
        text = text.upper()
    return text
