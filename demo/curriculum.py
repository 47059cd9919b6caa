"""Which questions are asked how often: the mixture that the model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from demo.checks import (
    ask_check,
    ask_extreme,
    ask_number_check,
    ask_palette,
    ask_stranger,
    ask_word_check,
)
from demo.clip_questions import CLIP_TASKS, clip_turn
from demo.clips import Clip
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
from demo.several import ask_number, ask_several
from demo.talk import talk_turn, without_picture
from demo.wording import Turn, surface

# Places, cells and descriptions are asked often: they are what makes "left of" learnable.
SINGLE = {
    ask_colour: 1.0,
    ask_shape: 1.0,
    ask_count: 1.4,
    ask_exists: 1.2,
    ask_place: 1.6,
    ask_cell: 1.2,
    ask_word: 1.8,
    ask_relation: 3.2,
    ask_list: 0.7,
    ask_describe: 0.9,
    ask_check: 1.0,
    ask_number_check: 0.6,
    ask_extreme: 0.6,
    ask_word_check: 0.7,
    ask_palette: 0.3,
    ask_stranger: 0.3,
}
TASKS = (
    "colour",
    "shape",
    "count",
    "exists",
    "place",
    "cell",
    "word",
    "wordplace",
    "position",
    "beside",
    "list",
    "describe",
    "check",
    "extreme",
    "wordcheck",
    "palette",
    "stranger",
    "multi",
    "number",
    "compound",
    "talk",
    *CLIP_TASKS,
)


def _compound(dice: Dice, scene: Scene) -> Turn | None:
    """Two questions in one, answered one after the other."""
    asks = dice.some((ask_colour, ask_shape, ask_count, ask_exists, ask_place, ask_word), 2)
    first, second = (ask(dice, scene, "") for ask in asks)
    if first is None or second is None:
        return None
    joined = dice.pick((" and ", ", and ", "? "))
    tail = second.question if joined == "? " else second.question[0].lower() + second.question[1:]
    question = first.question.rstrip("?.") + joined + tail
    return Turn("compound", question, f"{first.answer} {second.answer}")


def single_turn(dice: Dice, scene: Scene) -> Turn | None:
    """A question about one image, in a user's wording, or None if the draw did not fit."""
    if dice.chance(0.015):
        return ask_number(dice, (scene,))
    if dice.chance(0.025):
        return _compound(dice, scene)
    ask = dice.weighted(list(SINGLE), list(SINGLE.values()))
    return ask(dice, scene, " in the picture" if dice.chance(0.15) else "")


def training_turn(dice: Dice, scenes: Sequence[Scene], absent: Scene) -> Turn | None:
    """A turn of a conversation about these images (none, one or several).

    `absent` is a scene that is not shown; questions about it train the answer to a question
    about an image that was never sent.
    """
    if not scenes:
        turn = single_turn(dice, absent) if dice.chance(0.4) else talk_turn(dice)
        turn = without_picture(turn) if turn is not None and turn.task != "talk" else turn
    elif dice.chance(0.035):
        turn = talk_turn(dice)
    elif len(scenes) == 1:
        turn = single_turn(dice, scenes[0])
    else:
        turn = ask_several(dice, scenes)
    if turn is None:
        return None
    return replace(turn, question=surface(dice, turn.question))


def turn_about_clip(dice: Dice, clip: Clip) -> Turn | None:
    """A turn of a conversation about a clip."""
    turn = talk_turn(dice) if dice.chance(0.03) else clip_turn(dice, clip)
    return replace(turn, question=surface(dice, turn.question)) if turn is not None else None
