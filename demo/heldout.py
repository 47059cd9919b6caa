"""The fixed held-out question set, and how a reply is judged.

The set is a function of nothing: the same 1,000 scenes and questions on every machine. Scenes are
drawn from seeds that training never uses. A reply is right if it states the same facts as the
reference answer; which facts count depends on the task (`facts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from demo.clip_questions import ASKERS, CLIP_TASKS
from demo.clips import Clip, draw_clip
from demo.curriculum import SINGLE
from demo.dice import Dice
from demo.scenes import COLOURS, SHAPES, Scene, draw_scene, png_bytes
from demo.several import ask_several
from demo.wording import NUMBERS, ORDINALS, Turn, surface

NUM_SCENES = 1000
NUM_CLIPS = 500
SINGLE_TASKS = (
    "colour",
    "shape",
    "exists",
    "count",
    "position",
    "place",
    "word",
    "describe",
    "check",
)
TASKS = (*SINGLE_TASKS, "multi")
_ASKERS = {ask.__name__.removeprefix("ask_"): ask for ask in SINGLE}
_ASKERS["position"] = _ASKERS["relation"]


@dataclass(frozen=True)
class Item:
    """One held-out question: PNG images or a clip, the question, and the reference answer."""

    item_id: str
    task: str
    images: tuple[bytes | Clip, ...]
    question: str
    answer: str


def _is_clean(turn: Turn) -> bool:
    """Whether the turn is a plain case of its task: what is asked for is there, and once."""
    if turn.task in ("colour", "shape", "place"):
        return turn.answer.startswith("The ") and " is " in turn.answer
    if turn.task == "word":
        return turn.answer.startswith("The word is ")
    return turn.task in TASKS


def _clean_turn(dice: Dice, scene: Scene, task: str) -> Turn | None:
    for _ in range(12):
        turn = _ASKERS[task](dice, scene, "")
        if turn is not None and turn.task == task and _is_clean(turn):
            return turn
    return None


def _single_scene(dice: Dice, tasks: tuple[str, ...]) -> tuple[Scene, list[Turn]]:
    """A scene that supports all the tasks, with one turn for each."""
    while True:
        scene = draw_scene(dice, word_chance=1.0 if "word" in tasks else 0.45)
        turns = [_clean_turn(dice, scene, task) for task in tasks]
        found = [turn for turn in turns if turn is not None]
        if len(found) == len(tasks):
            return scene, found


def _several_scenes(dice: Dice) -> tuple[list[Scene], list[Turn]]:
    """Two or three scenes with two turns about them."""
    scenes = [draw_scene(dice, 4, 0.5) for _ in range(2 if dice.chance(0.6) else 3)]
    turns: list[Turn] = []
    while len(turns) < 2:
        turn = ask_several(dice, scenes)
        if turn is not None and turn.task == "multi":
            turns.append(turn)
    return scenes, turns


def held_out(num_scenes: int = NUM_SCENES) -> Iterator[Item]:
    """The questions about the first `num_scenes` held-out scenes, in a fixed order.

    Five scenes of six are single images with three questions each; every sixth is a group of two
    or three images with two questions.
    """
    count = len(SINGLE_TASKS)
    for number in range(num_scenes):
        dice = Dice(f"held-out-{number}")
        if number % 6 == 5:
            scenes, turns = _several_scenes(dice)
        else:
            turn_of = number - number // 6
            tasks = tuple(SINGLE_TASKS[(turn_of + shift) % count] for shift in (0, 2, 5))
            scene, turns = _single_scene(dice, tasks)
            scenes = [scene]
        images = tuple(png_bytes(scene) for scene in scenes)
        for k, turn in enumerate(turns):
            turn = replace(turn, question=surface(dice, turn.question))
            yield Item(f"{number:04d}-{k}", turn.task, images, turn.question, turn.answer)


_CLIP_ASKERS = dict(zip(CLIP_TASKS, ASKERS, strict=True))


def _clip_turns(dice: Dice, tasks: tuple[str, ...]) -> tuple[Clip, list[Turn]]:
    """A clip that supports all the tasks, with one turn for each."""
    while True:
        clip, turns = draw_clip(dice), []
        for task in tasks:
            drawn = (_CLIP_ASKERS[task](dice, clip, "") for _ in range(12))
            turns += [next((turn for turn in drawn if turn is not None), None)]
        found = [turn for turn in turns if turn is not None]
        if len(found) == len(tasks):
            return clip, found


def held_out_clips(num_clips: int = NUM_CLIPS) -> Iterator[Item]:
    """Two questions about each of the first `num_clips` held-out clips, in a fixed order."""
    count = len(CLIP_TASKS)
    for number in range(num_clips):
        dice = Dice(f"held-out-clip-{number}")
        tasks = CLIP_TASKS[number % count], CLIP_TASKS[(number + 1 + number // count) % count]
        clip, turns = _clip_turns(dice, tasks)
        for k, turn in enumerate(turns):
            question = surface(dice, turn.question)
            yield Item(f"clip-{number:03d}-{k}", turn.task, (clip,), question, turn.answer)


_SHAPE_OF = {shape: shape for shape in SHAPES} | {
    shape + ("es" if shape.endswith("s") else "s"): shape for shape in SHAPES
}
_NUMBER_OF = {str(i): number for i, number in enumerate(NUMBERS)} | {n: n for n in NUMBERS}
_RELATIONS = ("left", "right", "above", "below", "higher", "lower")
_PLACES = ("top", "bottom", "left", "right", "centre", "middle")
_OTHER = ("yes", "nothing", "only", "both", "all", "object", "objects", "more", "most")
_HAPPENINGS = (
    *("move", "moves", "appear", "appears", "disappear", "disappears", "change", "changes"),
    *("turns", "up", "down", "stays", "first", "second", "seconds", "happen", "happens"),
)
_OBJECT = re.compile(
    r"\b(?:(%s) )?(%s|objects?)\b" % ("|".join(COLOURS), "|".join(_SHAPE_OF))  # noqa: UP031
)


def _words(reply: str) -> list[str]:
    text = reply.lower().replace("color", "colour").replace("center", "centre")
    return re.findall(r"[a-z]+|\d+", text)


def _capitals(reply: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\b[A-Z]{2,}\b", reply))


def _first_object(reply: str) -> str | None:
    found = _OBJECT.search(reply.lower())
    return found.group(0) if found else None


def facts(task: str, reply: str) -> object:
    """What a reply states, as far as the task asks for it; comparable with ==."""
    words = _words(reply)
    start = words[0] if words and words[0] in ("yes", "no") else None
    if task == "colour":
        return {word for word in words if word in COLOURS}
    if task == "shape":
        return {_SHAPE_OF[word] for word in words if word in _SHAPE_OF}
    if task == "exists":
        return start
    if task == "count":
        return [_NUMBER_OF[word] for word in words if word in _NUMBER_OF]
    if task == "word":
        return _capitals(reply)
    if task == "place":
        return [word for word in words if word in _PLACES]
    if task == "position":
        return start, {word for word in words if word in _RELATIONS}, _first_object(reply)
    if task in CLIP_TASKS:
        # Every word of weight; "the" and "a" and the commas between two events are left free.
        known = {*COLOURS, *_NUMBER_OF, *_RELATIONS, *_PLACES, *_OTHER, *_SHAPE_OF, *_HAPPENINGS}
        return [word for word in words if word in known or word in ("not", "no", "nothing")]
    known = {*COLOURS, *_NUMBER_OF, *ORDINALS, *_RELATIONS, *_PLACES, *_OTHER, *_SHAPE_OF}
    return [word for word in words if word in known], _capitals(reply)


def is_right(item: Item, reply: str) -> bool:
    """Whether the reply states the facts of the reference answer."""
    return facts(item.task, reply) == facts(item.task, item.answer)
