"""Questions about one image, with true answers, in many phrasings.

Every `ask_*` returns a turn, or None where the scene does not support the question. `where` is
put at the slot {in}: "" or " in the picture" for one image, " in the second picture" for several.
"""

from __future__ import annotations

from demo.dice import Dice
from demo.scenes import COLOURS, SHAPES, Scene, Thing
from demo.wording import (
    PLACES,
    WORD_PLACES,
    Ref,
    Turn,
    any_ref,
    counted,
    distinct,
    listing,
    name,
    place,
    refs_to,
    sentence,
    spoken,
    spoken_plural,
    with_article,
)

_OTHER_WORDS = {
    spot: tuple(other.split(", "))
    for spot, other in {
        "at the top left": "in the top left corner, in the upper left corner, in the upper left, "
        "in the top left",
        "at the top": "at the top centre, in the top middle, at the top in the middle",
        "at the top right": "in the top right corner, in the upper right corner, "
        "in the upper right, in the top right",
        "on the left": "on the left side, at the middle left, in the middle left",
        "in the centre": "in the middle, at the centre, in the very middle",
        "on the right": "on the right side, at the middle right, in the middle right",
        "at the bottom left": "in the bottom left corner, in the lower left corner, "
        "in the lower left, in the bottom left",
        "at the bottom": "at the bottom centre, in the bottom middle",
        "at the bottom right": "in the bottom right corner, in the lower right corner, "
        "in the lower right, in the bottom right",
    }.items()
}


def _subject(dice: Dice, scene: Scene, fields: str) -> Ref | None:
    """A name by which to ask for the missing field: mostly of one thing, at times of none or many.

    `fields` says what the name may use: "colour", "shape" or "both".
    """
    if scene.things and dice.chance(0.88):
        thing = dice.pick(scene.things)
        colour, shape = thing.colour, thing.shape
    else:
        colour, shape = dice.pick(list(COLOURS)), dice.pick(SHAPES)
    if fields == "shape":
        return Ref(None, shape)
    if fields == "colour":
        return Ref(colour, None)
    refs = (Ref(colour, shape), Ref(None, shape), Ref(colour, None))
    return dice.weighted(refs, (0.5, 0.3, 0.2))


def _plural_be(ref: Ref, found: list[Thing]) -> str:
    return f"the {ref} is" if len(found) == 1 else f"the {ref.plural} are"


def _solo(dice: Dice, scene: Scene, chance: float) -> bool:
    return len(scene.things) == 1 and dice.chance(chance)


def ask_colour(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What colour is the circle?"""
    ref = Ref(None, None) if _solo(dice, scene, 0.4) else _subject(dice, scene, "shape")
    if ref is None:
        return None
    noun = spoken(dice, ref)
    question = dice.pick(
        (
            f"What colour is the {noun}{{in}}?",
            f"What colour is the {noun}{{in}}?",
            f"What colour is the {noun}{{in}}?",
            f"Which colour is the {noun}{{in}}?",
            f"What is the colour of the {noun}{{in}}?",
            f"What's the colour of the {noun}{{in}}?",
            f"What colour does the {noun}{{in}} have?",
            f"Which colour does the {noun}{{in}} have?",
            f"Tell me the colour of the {noun}{{in}}.",
            f"The {noun}{{in}} is what colour?",
            f"Name the colour of the {noun}{{in}}.",
            f"What colour are the {spoken_plural(dice, ref)}{{in}}?",
        )
    )
    found = ref.among(scene)
    if not found:
        return Turn("colour", question.replace("{in}", where), f"There is no {ref}.")
    answer = f"{_plural_be(ref, found)} {listing(distinct([t.colour for t in found]))}"
    return Turn("colour", question.replace("{in}", where), sentence(answer))


def ask_shape(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What shape is the red thing?"""
    ref = Ref(None, None) if _solo(dice, scene, 0.4) else _subject(dice, scene, "colour")
    if ref is None:
        return None
    noun = spoken(dice, ref)
    question = dice.pick(
        (
            f"What shape is the {noun}{{in}}?",
            f"What shape is the {noun}{{in}}?",
            f"Which shape is the {noun}{{in}}?",
            f"What is the shape of the {noun}{{in}}?",
            f"What's the shape of the {noun}{{in}}?",
            f"What is the {noun}{{in}}?",
            f"What kind of shape is the {noun}{{in}}?",
            f"What shape does the {noun}{{in}} have?",
            f"Which shape does the {noun}{{in}} have?",
            f"Tell me the shape of the {noun}{{in}}.",
            f"Which shape{{in}} is {ref.colour}?" if ref.colour else f"Which shape is it{where}?",
            f"What is {ref.colour}{{in}}?" if ref.colour else "What is it?",
        )
    ).replace("{in}", where)
    found = ref.among(scene)
    if not found:
        return Turn("shape", question, f"There is no {ref}.")
    shapes = listing([with_article(shape) for shape in distinct([t.shape for t in found])])
    if len(found) > 1 and len(distinct([t.shape for t in found])) == 1:
        shapes = Ref(None, found[0].shape).plural
    return Turn("shape", question, sentence(f"{_plural_be(ref, found)} {shapes}"))


def ask_count(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """How many circles are there?"""
    ref = Ref(None, None) if dice.chance(0.25) else any_ref(dice, scene, present=0.85)
    many = spoken_plural(dice, ref)
    question = dice.pick(
        (
            f"How many {many} are there{{in}}?",
            f"How many {many} are there{{in}}?",
            f"How many {many} do you see{{in}}?",
            f"How many {many} can you see{{in}}?",
            f"How many {many} are{where or ' in the picture'}?",
            f"How many {many}{{in}}?",
            f"Count the {many}{{in}}.",
            f"What is the number of {many}{{in}}?",
            f"How many {many} does the picture show?" if not where else f"How many {many}{{in}}?",
        )
    ).replace("{in}", where)
    number = len(ref.among(scene))
    answer = f"there {'is' if number == 1 else 'are'} {counted(number, str(ref))}"
    return Turn("count", question, sentence(answer))


def ask_exists(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Is there a red star?"""
    ref = any_ref(dice, scene)
    noun = with_article(spoken(dice, ref))
    many = spoken_plural(dice, ref)
    question = dice.pick(
        (
            f"Is there {noun}{{in}}?",
            f"Is there {noun}{{in}}?",
            f"Is there {noun}{{in}}?",
            f"Do you see {noun}{{in}}?",
            f"Can you see {noun}{{in}}?",
            f"Are there any {many}{{in}}?",
            f"Do you see any {many}{{in}}?",
            f"Is {noun}{where or ' in the picture'}?",
            f"Does the picture have {noun}?" if not where else f"Is there {noun}{{in}}?",
            f"Does the picture show {noun}?" if not where else f"Is there {noun}{{in}}?",
        )
    ).replace("{in}", where)
    found = ref.among(scene)
    if not found:
        return Turn("exists", question, f"No, there is no {ref}.")
    if len(found) == 1:
        return Turn("exists", question, f"Yes, there is {ref.with_article}.")
    return Turn("exists", question, f"Yes, there are {counted(len(found), str(ref))}.")


def ask_place(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Where is the red star?"""
    ref = _subject(dice, scene, "both")
    if ref is None:
        return None
    noun = spoken(dice, ref)
    question = dice.pick(
        (
            f"Where is the {noun}{{in}}?",
            f"Where is the {noun}{{in}}?",
            f"Where do you see the {noun}{{in}}?",
            f"Where can I find the {noun}{{in}}?",
            f"Where's the {noun}{{in}}?",
            f"In which part of the picture is the {noun}?"
            if not where
            else f"Where is the {noun}{{in}}?",
            f"What is the position of the {noun}{{in}}?",
            f"Where are the {spoken_plural(dice, ref)}{{in}}?",
        )
    ).replace("{in}", where)
    found = ref.among(scene)
    if not found:
        return Turn("place", question, f"There is no {ref}.")
    answer = f"{_plural_be(ref, found)} {listing([place(thing) for thing in found])}"
    return Turn("place", question, sentence(answer))


def ask_cell(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What is at the top left?"""
    if scene.things and dice.chance(0.75):
        thing = dice.pick(scene.things)
        row, col = thing.row, thing.col
    else:
        row, col = dice.integer(0, 2), dice.integer(0, 2)
    if scene.word is not None and row == scene.word_row:
        return None
    spot = PLACES[row][col]
    asked = dice.pick((spot, spot, *_OTHER_WORDS.get(spot, ())))
    question = dice.pick(
        (
            f"What is {asked}{{in}}?",
            f"What is {asked}{{in}}?",
            f"What do you see {asked}{{in}}?",
            f"What's {asked}{{in}}?",
            f"Which object is {asked}{{in}}?",
            f"What can be seen {asked}{{in}}?",
            f"Is there anything {asked}{{in}}?",
        )
    ).replace("{in}", where.replace(" in the", " of the", 1))
    found = [thing for thing in scene.things if (thing.row, thing.col) == (row, col)]
    if not found:
        return Turn("cell", question, f"Nothing is {spot}.")
    return Turn("cell", question, sentence(f"{with_article(name(found[0]))} is {spot}"))


def ask_word(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What is the word?"""
    if scene.word is None and not dice.chance(0.12):
        return None
    if scene.word is not None and dice.chance(0.12):
        question = dice.pick(("Where is the word{in}?", "Where is the text{in}?"))
        spot = WORD_PLACES[scene.word_row]
        return Turn("wordplace", question.replace("{in}", where), f"The word is {spot}.")
    if dice.chance(0.12):
        question = dice.pick(
            ("Is there a word{in}?", "Is there any text{in}?", "Do you see a word{in}?")
        ).replace("{in}", where)
        if scene.word is None:
            return Turn("word", question, "No, there is no word.")
        return Turn("word", question, f"Yes, there is the word {scene.word}.")
    shown = where or " in the picture"
    question = dice.pick(
        (
            f"What word is printed{shown}?",
            f"Which word is printed{shown}?",
            "What word is printed on it?",
            "Which word is printed on the picture?",
            "What is the word{in}?",
            "What's the word{in}?",
            "What word do you see{in}?",
            "What word can you read{in}?",
            f"Which word is written{shown}?",
            f"What is written{shown}?",
            "What does it say?",
            "What does the text{in} say?",
            "What text do you see{in}?",
            "Read the word{in}.",
            "Read the text{in}.",
            "Read it.",
            "What is written here?",
            "What does the sign say?",
            "What is the text{in}?",
            "What letters do you see{in}?",
            "Spell the word{in}.",
            "Any text{in}?",
            "Can you read the word{in}?",
            "Please read the word{in}.",
        )
    )
    if where and "{in}" not in question and where not in question:
        question = "What is the word{in}?"
    question = question.replace("{in}", where)
    if scene.word is None:
        return Turn("word", question, "There is no word.")
    return Turn("word", question, f"The word is {scene.word}.")


def ask_list(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """What do you see?"""
    question = dice.pick(
        (
            "What do you see{in}?",
            "What do you see{in}?",
            f"What is{where or ' in the picture'}?",
            f"What's{where or ' in the picture'}?",
            "What can you see{in}?",
            "Which objects are there{in}?",
            "Which shapes are there{in}?",
            "What shapes are there{in}?",
            "What is shown{in}?",
            "Name the objects{in}.",
            "What objects do you see{in}?",
            "What shapes do you see{in}?",
            "List the objects{in}.",
            "What is this?" if not where else "What do you see{in}?",
            "What does the picture show?" if not where else "What is there{in}?",
        )
    ).replace("{in}", where)
    parts = [with_article(name(thing)) for thing in scene.things]
    if scene.word is not None:
        parts.append(f"the word {scene.word}")
    return Turn("list", question, f"I see {listing(parts)}.")


def ask_describe(dice: Dice, scene: Scene, where: str) -> Turn | None:
    """Describe the picture."""
    if where:
        the_picture = where.replace(" in ", "", 1)
        questions = (f"Describe {the_picture}.", f"What is where{where}?")
    else:
        questions = (
            "Describe the picture.",
            "Describe the picture.",
            "Describe this picture.",
            "Can you describe the picture?",
            "Describe what you see.",
            "Tell me about the picture.",
            "What is where?",
            "What is going on in the picture?",
            "Describe the picture in detail.",
            "Describe it.",
            "Describe the picture in one sentence.",
            "Describe the scene.",
            "Give me a description.",
            "What does the picture look like?",
        )
    question = dice.pick(questions)
    parts = [f"{with_article(name(thing))} {place(thing)}" for thing in scene.things]
    if not parts:
        return Turn("describe", question, f"There are no objects. The word is {scene.word}.")
    be = "is" if len(parts) == 1 else "are"
    answer = f"There {be} {counted(len(parts), 'object')}: {listing(parts)}."
    if scene.word is not None:
        answer += f" The word is {scene.word}."
    return Turn("describe", question, answer)


def unique_ref(dice: Dice, scene: Scene, thing: Thing) -> Ref | None:
    """One of the names that fit this thing alone, the full one most of the time."""
    refs = refs_to(scene, thing)
    if not refs:
        return None
    return refs[0] if dice.chance(0.6) else dice.pick(refs)
