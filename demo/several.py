"""Questions about two or three images, with true answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from demo.checks import ask_check, ask_extreme, ask_stranger, ask_word_check, near_miss
from demo.dice import Dice
from demo.questions import (
    ask_cell,
    ask_colour,
    ask_count,
    ask_describe,
    ask_exists,
    ask_list,
    ask_place,
    ask_shape,
    ask_word,
)
from demo.relations import ask_relation
from demo.scenes import Scene
from demo.wording import (
    NUMBERS,
    ORDINALS,
    Ref,
    Turn,
    any_ref,
    counted,
    listing,
    name,
    sentence,
    spoken,
    spoken_plural,
    with_article,
)

_WITHIN = (
    (ask_colour, 1.2),
    (ask_shape, 1.2),
    (ask_count, 1.2),
    (ask_exists, 1.2),
    (ask_place, 1.0),
    (ask_word, 1.5),
    (ask_relation, 0.8),
    (ask_cell, 0.5),
    (ask_check, 0.6),
    (ask_word_check, 0.4),
    (ask_extreme, 0.3),
    (ask_stranger, 0.2),
    (ask_list, 0.5),
    (ask_describe, 0.3),
)


def _where(dice: Dice, index: int, total: int) -> str:
    """The slot text that points at one of the images."""
    forms = [
        f" in the {ORDINALS[index]} picture",
        f" in the {ORDINALS[index]} picture",
        f" in the {ORDINALS[index]} picture",
        f" in picture {index + 1}",
        f" in picture {NUMBERS[index + 1]}",
        f" on the {ORDINALS[index]} picture",
    ]
    if index == total - 1:
        forms.append(" in the last picture")
    return dice.pick(forms)


def ask_within(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Any question about one image, asked of one of several."""
    index = dice.integer(0, len(scenes) - 1)
    ask = dice.weighted([a for a, _ in _WITHIN], [w for _, w in _WITHIN])
    turn = ask(dice, scenes[index], _where(dice, index, len(scenes)))
    return replace(turn, task="multi") if turn is not None else None


def _having(indices: Sequence[int], what: str) -> str:
    """The answer to "which picture has ...": which ones, or none."""
    if not indices:
        return f"No picture has {what}."
    if len(indices) == 1:
        return f"The {ORDINALS[indices[0]]} picture has {what}."
    which = listing([f"the {ORDINALS[i]}" for i in indices])
    return sentence(f"{which} picture have {what}")


def ask_which(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Which picture has the red star?"""
    words = [scene.word for scene in scenes if scene.word is not None]
    if words and dice.chance(0.3):
        word = dice.pick(words)
        word = word if dice.chance(0.8) else near_miss(dice, word)
        found = [i for i, scene in enumerate(scenes) if scene.word == word]
        what = shown = f"the word {word}"
    elif dice.chance(0.08):
        found = [i for i, scene in enumerate(scenes) if scene.word is not None]
        what = "a word"
        shown = dice.pick(("a word", "text", "a word on it", "some text"))
    else:
        ref = any_ref(dice, dice.pick(scenes), present=0.92)
        found = [i for i, scene in enumerate(scenes) if ref.among(scene)]
        noun, what = spoken(dice, ref), ref.with_article
        shown = ("the " if len(found) == 1 and dice.chance(0.5) else "a ") + noun
        shown = shown.replace("a orange", "an orange").replace("a object", "an object")
    question = dice.pick(
        (
            f"Which picture has {shown}?",
            f"Which picture has {shown}?",
            f"Which picture has {shown}?",
            f"Which picture shows {shown}?",
            f"Which picture contains {shown}?",
            f"In which picture is {shown}?",
            f"In which picture do you see {shown}?",
            f"Which of the pictures has {shown}?",
            f"Where is {shown}, in which picture?",
            f"Which one has {shown}?",
        )
    )
    return Turn("multi", question, _having(found, what))


def ask_more(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Which picture has more objects? Only where one image has the most."""
    ref = Ref(None, None) if dice.chance(0.6) else any_ref(dice, dice.pick(scenes), present=0.95)
    counts = [len(ref.among(scene)) for scene in scenes]
    if counts.count(max(counts)) > 1:
        return None
    many = ref.plural
    asked = many.replace("object", dice.pick(("object", "thing", "shape")))
    more = "more" if len(scenes) == 2 else "the most"
    winner = ORDINALS[counts.index(max(counts))]
    question = dice.pick(
        (
            f"Which picture has {more} {asked}?",
            f"Which picture has {more} {asked}?",
            f"Which picture shows {more} {asked}?",
            f"In which picture are there {more} {asked}?",
        )
    )
    return Turn("multi", question, f"The {winner} picture has {more} {many}.")


def ask_all(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Do both pictures have a star?"""
    ref = any_ref(dice, dice.pick(scenes), present=0.9)
    found = [i for i, scene in enumerate(scenes) if ref.among(scene)]
    noun, what = spoken(dice, ref), ref.with_article
    shown = ("an " if noun[0] in "aeiou" else "a ") + noun
    every = "both" if len(scenes) == 2 else "all"
    question = dice.pick(
        (
            f"Do {every} pictures have {shown}?",
            f"Is there {shown} in {every} pictures?",
            f"Do {every} pictures show {shown}?",
            f"Do you see {shown} in {every} pictures?",
        )
    )
    if len(found) == len(scenes):
        return Turn("multi", question, f"Yes, {every} pictures have {what}.")
    answer = _having(found, what)
    if found:
        answer = "Only " + answer[0].lower() + answer[1:]
    return Turn("multi", question, "No, " + answer[0].lower() + answer[1:])


def ask_each(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Describe the pictures."""
    every = "both" if len(scenes) == 2 else "all"
    question = dice.pick(
        (
            "Describe the pictures.",
            f"Describe {every} pictures.",
            "What do you see?",
            "What do you see in the pictures?",
            f"What is in {every} pictures?",
            "What is in the pictures?",
            "Compare the pictures.",
            "What is the difference between the pictures?",
            "What is different?",
            f"What is the difference between the {NUMBERS[len(scenes)]} pictures?",
            "Which objects are in which picture?",
        )
    )
    parts = []
    for ordinal, scene in zip(ORDINALS, scenes, strict=False):
        names = [with_article(name(thing)) for thing in scene.things]
        names += [f"the word {scene.word}"] if scene.word is not None else []
        parts.append(f"The {ordinal} picture has {listing(names)}.")
    return Turn("multi", question, " ".join(parts))


def ask_total(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """How many objects are there in all?"""
    ref = Ref(None, None) if dice.chance(0.5) else any_ref(dice, dice.pick(scenes), present=0.95)
    number, many = sum(len(ref.among(scene)) for scene in scenes), spoken_plural(dice, ref)
    every = "both" if len(scenes) == 2 else "all"
    question = dice.pick(
        (
            f"How many {many} are there in all?",
            f"How many {many} are there in total?",
            f"How many {many} in total?",
            f"How many {many} are there altogether?",
            f"How many {many} are in {every} pictures together?",
        )
    )
    be = "is" if number == 1 else "are"
    return Turn("multi", question, f"There {be} {counted(number, str(ref))} in all.")


def ask_number(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """How many pictures are there?"""
    question = dice.pick(
        (
            "How many pictures are there?",
            "How many pictures do you see?",
            "How many pictures did I send?",
        )
    )
    be, noun = ("is", "picture") if len(scenes) == 1 else ("are", "pictures")
    return Turn("number", question, f"There {be} {NUMBERS[len(scenes)]} {noun}.")


def ask_several(dice: Dice, scenes: Sequence[Scene]) -> Turn | None:
    """Any question about several images."""
    kinds = (ask_which, ask_within, ask_more, ask_all, ask_each, ask_total, ask_number)
    return dice.weighted(kinds, (0.34, 0.38, 0.08, 0.08, 0.06, 0.05, 0.01))(dice, scenes)
