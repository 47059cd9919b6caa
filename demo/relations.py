"""Questions about which thing is left of, right of, above or below which.

Left and right compare grid columns, above and below compare grid rows, so that no answer hangs on
a pixel: things in the same column are never asked about with "left" or "right".
"""

from __future__ import annotations

from demo.dice import Dice
from demo.questions import unique_ref
from demo.scenes import Scene, Thing
from demo.wording import Ref, Turn, listing, name, sentence, spoken

SIDES = ("left", "right", "above", "below")
_PHRASE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
_ASKED = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "above": ("above", "above", "over", "higher than"),
    "below": ("below", "below", "under", "lower than", "beneath"),
}
_MORE = {"left": "further left", "right": "further right", "above": "higher", "below": "lower"}


def sides(a: Thing, b: Thing) -> list[str]:
    """On which sides of b the thing a is: vertical first. Empty only for the same cell."""
    found = []
    if a.row != b.row:
        found.append("above" if a.row < b.row else "below")
    if a.col != b.col:
        found.append("left" if a.col < b.col else "right")
    return found


def opposite(side: str) -> str:
    """The side seen from the other thing."""
    return SIDES[SIDES.index(side) ^ 1]


def is_on_side(a: Thing, side: str, b: Thing) -> bool:
    """Whether a is on that side of b."""
    return side in sides(a, b)


def _pair(dice: Dice, scene: Scene) -> tuple[Thing, Thing, Ref, Ref] | None:
    """Two things that can each be named alone, with their names."""
    named = [(thing, unique_ref(dice, scene, thing)) for thing in scene.things]
    fit = [(thing, ref) for thing, ref in named if ref is not None]
    if len(fit) < 2:
        return None
    (a, ref_a), (b, ref_b) = dice.some(fit, 2)
    return a, b, ref_a, ref_b


def ask_relation(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Is the red star left of the blue circle? Or one of its three relatives."""
    kind = dice.weighted(("yes_no", "relative", "further", "beside"), (0.42, 0.25, 0.18, 0.15))
    if kind == "beside":
        return _ask_beside(dice, scene, where)
    pair = _pair(dice, scene)
    if pair is None:
        return None
    if kind == "relative":
        return _ask_relative(dice, pair, where)
    if kind == "further":
        return _ask_further(dice, pair, where)
    return _ask_yes_no(dice, pair, where)


def _ask_yes_no(dice: Dice, pair: tuple[Thing, Thing, Ref, Ref], where: str) -> Turn:
    a, b, ref_a, ref_b = pair
    true_side = dice.pick(sides(a, b))
    asked = true_side if dice.chance(0.5) else opposite(true_side)
    phrase = dice.pick(_ASKED[asked])
    noun_a, noun_b = spoken(dice, ref_a), spoken(dice, ref_b)
    question = dice.pick(
        (
            f"Is the {noun_a} {phrase} the {noun_b}{where}?",
            f"Is the {noun_a} {phrase} the {noun_b}{where}?",
            f"Is the {noun_a} {phrase} the {noun_b}{where}?",
            f"Does the {noun_a} lie {phrase} the {noun_b}{where}?",
            f"Can you see the {noun_a} {phrase} the {noun_b}{where}?",
        )
    )
    start = "Yes" if asked == true_side else "No"
    answer = f"{start}, the {ref_a} is {_PHRASE[true_side]} the {ref_b}."
    return Turn("position", question, answer)


def _ask_relative(dice: Dice, pair: tuple[Thing, Thing, Ref, Ref], where: str) -> Turn:
    a, b, ref_a, ref_b = pair
    noun_a, noun_b = spoken(dice, ref_a), spoken(dice, ref_b)
    question = dice.pick(
        (
            f"Where is the {noun_a} relative to the {noun_b}{where}?",
            f"Where is the {noun_a} compared to the {noun_b}{where}?",
            f"Where is the {noun_a} as seen from the {noun_b}{where}?",
            f"On which side of the {noun_b} is the {noun_a}{where}?",
            f"What is the position of the {noun_a} relative to the {noun_b}{where}?",
        )
    )
    answer = f"the {ref_a} is {' and '.join(_PHRASE[side] for side in sides(a, b))} the {ref_b}"
    return Turn("position", question, sentence(answer))


def _ask_further(dice: Dice, pair: tuple[Thing, Thing, Ref, Ref], where: str) -> Turn:
    a, b, ref_a, ref_b = pair
    side = dice.pick(sides(a, b) + sides(b, a))
    winner = ref_a if is_on_side(a, side, b) else ref_b
    noun_a, noun_b = spoken(dice, ref_a), spoken(dice, ref_b)
    more = _MORE[side]
    question = dice.pick(
        (
            f"Which is {more}{where}, the {noun_a} or the {noun_b}?",
            f"What is {more}{where}, the {noun_a} or the {noun_b}?",
            f"Which one is {more}{where}: the {noun_a} or the {noun_b}?",
            f"Is the {noun_a} or the {noun_b} {more}{where}?",
        )
    )
    return Turn("position", question, f"The {winner} is {more}.")


def _ask_beside(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What is left of the blue circle? Everything in the columns (or rows) on that side."""
    if not scene.things:
        return None
    thing = dice.pick(scene.things)
    ref = unique_ref(dice, scene, thing)
    if ref is None:
        return None
    side = dice.pick(SIDES)
    noun = spoken(dice, ref)
    phrase = dice.pick(_ASKED[side])
    question = dice.pick(
        (
            f"What is {phrase} the {noun}{where}?",
            f"What is {phrase} the {noun}{where}?",
            f"Which objects are {phrase} the {noun}{where}?",
            f"What do you see {phrase} the {noun}{where}?",
        )
    )
    found = [other for other in scene.things if is_on_side(other, side, thing)]
    if not found:
        return Turn("beside", question, f"Nothing is {_PHRASE[side]} the {ref}.")
    be = "is" if len(found) == 1 else "are"
    names = listing([f"the {name(other)}" for other in found])
    return Turn("beside", question, sentence(f"{names} {be} {_PHRASE[side]} the {ref}"))
