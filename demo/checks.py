"""More questions about one image: yes/no checks, comparisons of numbers, extremes, letters."""

from __future__ import annotations

from demo.dice import Dice
from demo.questions import unique_ref
from demo.scenes import COLOURS, DARK, SHAPES, Scene, Thing, draw_word
from demo.wording import (
    NUMBERS,
    PLACES,
    Ref,
    Turn,
    any_ref,
    counted,
    distinct,
    listing,
    name,
    place,
    sentence,
    spoken,
    spoken_plural,
    with_article,
)

_EXTREMES = {
    "furthest left": ("furthest left", "leftmost", "furthest to the left", "most left"),
    "furthest right": ("furthest right", "rightmost", "furthest to the right", "most right"),
    "highest": ("highest", "topmost", "furthest up", "uppermost"),
    "lowest": ("lowest", "bottommost", "furthest down", "lowermost"),
}
_STRANGERS = tuple(  # one string, since 63 lines of one word each help no reader
    """
    dog cat house car tree person man woman child bird fish boat ship train plane flower sun
    moon cloud face hand eye dragon horse cow table chair book phone computer ball door window
    road mountain river lake beach city street bridge robot mouse lion tiger elephant monkey
    apple banana cake pizza cup bottle hat shoe shirt bus truck bicycle rocket castle king
    queen
    """.split()  # noqa: SIM905
)


def ask_check(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Is the star red? Is the red thing a star? Is the star at the top left?"""
    if not scene.things:
        return None
    thing = dice.pick(scene.things)
    ref = unique_ref(dice, scene, thing)
    if ref is None:
        return None
    noun, right = spoken(dice, ref), dice.chance(0.5)
    kinds = [k for k, known in (("colour", ref.colour), ("shape", ref.shape)) if known is None]
    kind = dice.pick((*kinds, "place"))
    if kind == "colour":
        said = thing.colour if right else dice.pick(list(COLOURS))
        true, asked, same = thing.colour, said, said == thing.colour
    elif kind == "shape":
        said = thing.shape if right else dice.pick(SHAPES)
        true, asked, same = with_article(thing.shape), with_article(said), said == thing.shape
    else:
        said = place(thing) if right else dice.pick(dice.pick(PLACES))
        true, asked, same = place(thing), said, said == place(thing)
    question = dice.pick(
        (
            f"Is the {noun}{where} {asked}?",
            f"Is the {noun}{where} {asked}?",
            f"Is it true that the {noun}{where} is {asked}?",
            f"The {noun}{where} is {asked}, right?",
        )
    )
    return Turn("check", question, f"{'Yes' if same else 'No'}, the {ref} is {true}.")


def ask_number_check(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Are there more than two circles? Are there more circles than squares?"""
    ref = Ref(None, None) if dice.chance(0.35) else any_ref(dice, scene, present=0.9)
    number, many = len(ref.among(scene)), spoken_plural(dice, ref)
    be = "is" if number == 1 else "are"
    if dice.chance(0.3):
        other = any_ref(dice, scene, present=0.9)
        if other in (ref, Ref(None, None)) or ref == Ref(None, None):
            return None
        count = len(other.among(scene))
        question = f"Are there more {many} than {spoken_plural(dice, other)}{where}?"
        facts = f"there {be} {counted(number, str(ref))} and {counted(count, str(other))}"
        return Turn("check", question, f"{'Yes' if number > count else 'No'}, {facts}.")
    limit = min(8, max(1, number + dice.integer(-1, 1)))
    few = spoken_plural(dice, ref) if limit != 1 else spoken(dice, ref)
    relation, holds = dice.pick(
        (
            ("more than ", number > limit),
            ("fewer than ", number < limit),
            ("less than ", number < limit),
            ("exactly ", number == limit),
            ("at least ", number >= limit),
            ("", number == limit),
        )
    )
    verb = "Is" if limit == 1 else "Are"
    said = NUMBERS[limit] if dice.chance(0.8) else str(limit)
    question = f"{verb} there {relation}{said} {few}{where}?"
    answer = f"{'Yes' if holds else 'No'}, there {be} {counted(number, str(ref))}."
    return Turn("check", question, answer)


def ask_extreme(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What is the leftmost object? Everything in that grid column or row."""
    if not scene.things:
        return None
    extreme = dice.pick(list(_EXTREMES))
    keys = {
        "furthest left": lambda thing: thing.col,
        "furthest right": lambda thing: -thing.col,
        "highest": lambda thing: thing.row,
        "lowest": lambda thing: -thing.row,
    }
    key = keys[extreme]
    best = min(key(thing) for thing in scene.things)
    found = [thing for thing in scene.things if key(thing) == best]
    asked, noun = dice.pick(_EXTREMES[extreme]), dice.pick(("object", "object", "shape", "thing"))
    question = dice.pick(
        (
            f"What is the {asked} {noun}{where}?",
            f"Which {noun} is the {asked}{where}?",
            f"Which {noun} is {asked}{where}?",
            f"What is {asked}{where}?",
        )
    )
    names = listing([f"the {name(thing)}" for thing in found])
    be = "is" if len(found) == 1 else "are"
    return Turn("extreme", question, sentence(f"{names} {be} {extreme}"))


def ask_word_check(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Is the word HOUSE? What is its first letter? How many letters has it?"""
    word = scene.word
    if word is None:
        return None
    kind = dice.unit()
    if kind < 0.5:
        said = word if dice.chance(0.5) else near_miss(dice, word)
        question = dice.pick(
            (
                f"Is the word {said}{where}?",
                f"Does it say {said}?" if not where else f"Is the word{where} {said}?",
                f"Is the word {said} printed{where or ' on the picture'}?",
                f"Can you see the word {said}{where}?",
                f"Is there the word {said}{where}?",
            )
        )
        return Turn(
            "wordcheck", question, f"{'Yes' if said == word else 'No'}, the word is {word}."
        )
    if kind < 0.75:
        first = dice.chance(0.6)
        question = dice.pick(
            (
                f"What letter does the word{where} {'start' if first else 'end'} with?",
                f"What is the {'first' if first else 'last'} letter of the word{where}?",
                f"Which letter is the {'first' if first else 'last'} one of the word{where}?",
            )
        )
        verb, letter = ("starts", word[0]) if first else ("ends", word[-1])
        return Turn("wordcheck", question, f"The word {word} {verb} with {letter}.")
    question = dice.pick(
        (
            f"How many letters does the word{where} have?",
            f"How many letters are in the word{where}?",
            f"How long is the word{where}?",
        )
    )
    return Turn("wordcheck", question, f"The word {word} has {NUMBERS[len(word)]} letters.")


def near_miss(dice: Dice, word: str) -> str:
    """Another word: a fresh one, or the same with one letter changed."""
    if dice.chance(0.5):
        return draw_word(dice)
    place_in_word = dice.integer(0, len(word) - 1)
    letter = dice.pick("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return word[:place_in_word] + letter + word[place_in_word + 1 :]


def ask_palette(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Which colours are there? Is the background dark?"""
    if dice.chance(0.25):
        tone = "dark" if scene.background in DARK else "light"
        question = dice.pick(
            (
                f"What is the background colour{where}?",
                f"What colour is the background{where}?",
                f"How is the background{where}?",
                f"Is the background{where} dark or light?",
            )
        )
        return Turn("palette", question, f"The background is {tone}.")
    if not scene.things:
        return None
    things: tuple[Thing, ...] = scene.things
    colours = distinct([thing.colour for thing in things])
    question = dice.pick(
        (
            f"Which colours are there{where}?",
            f"What colours are there{where}?",
            f"Which colours do you see{where}?",
            f"What colours do the objects{where} have?",
            f"What colours do you see{where}?",
            f"List the colours{where}.",
            f"Colours{where}?",
        )
    )
    be = "colour is" if len(colours) == 1 else "colours are"
    return Turn("palette", question, f"The {be} {listing(colours)}.")


def ask_stranger(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Is there a dog? There never is."""
    noun = dice.pick(_STRANGERS)
    thing = with_article(noun)
    question = dice.pick(
        (
            f"Is there {thing}{where}?",
            f"Is there {thing}{where}?",
            f"Do you see {thing}{where}?",
            f"Can you see {thing}{where}?",
            f"Are there any {noun}s{where}?",
            f"Where is the {noun}{where}?",
            f"What colour is the {noun}{where}?",
            f"How many {noun}s are there{where}?",
            f"Is this {thing}?",
        )
    )
    return Turn("stranger", question, f"I see no {noun}. I only know simple shapes and words.")
