"""The little world: the same everywhere, well formed, and truthful."""

import hashlib
import io
import re

import pytest
from PIL import Image

from demo.curriculum import SINGLE, TASKS, single_turn, training_turn
from demo.dice import Dice
from demo.heldout import held_out
from demo.relations import sides
from demo.scenes import COLOURS, MAX_SIDE, MIN_SIDE, SHAPES, draw_scene, render
from demo.several import ask_several
from demo.wording import NUMBERS, ORDINALS, PLACES, WORD_PLACES, plural

PLACE_OF = {spot: (r, c) for r, row in enumerate(PLACES) for c, spot in enumerate(row)}
SPOTS = "|".join(sorted(PLACE_OF, key=len, reverse=True))
NOUN = r"(?:(%s) )?(%s|object)" % ("|".join(COLOURS), "|".join(SHAPES))  # noqa: UP031


def scenes(count, seed="test"):
    dice = Dice(seed)
    return [draw_scene(dice) for _ in range(count)]


def named(scene, noun):
    """The things that a name fits, found without the code under test."""
    words = noun.split(" ")
    return [
        thing
        for thing in scene.things
        if all(word in (thing.colour, thing.shape, "object", "objects") for word in words)
    ]


def test_held_out_questions_and_sizes_never_change():
    digest = hashlib.sha256()
    for item in held_out(60):
        sizes = [Image.open(io.BytesIO(png)).size for png in item.images]
        digest.update(f"{item.item_id} {item.task} {sizes} {item.question}\n".encode())
    assert digest.hexdigest() == (
        "e91b40e4482c2ab5aaa0ef4c3e7575107867ef0548b10beac97ed0964e9d5d78"
    )


def test_equal_seeds_draw_equal_pictures():
    for first, second in zip(scenes(20, "same"), scenes(20, "same"), strict=True):
        assert first == second
        assert render(first).tobytes() == render(second).tobytes()
    assert scenes(5, "one") != scenes(5, "other")


def test_scenes_are_well_formed():
    sizes = set()
    for scene in scenes(500):
        cells = [(thing.row, thing.col) for thing in scene.things]
        assert cells == sorted(set(cells)), "reading order, one thing to a cell"
        assert scene.things or scene.word
        if scene.word is not None:
            assert re.fullmatch("[A-Z]{3,6}", scene.word)
            assert all(row != scene.word_row for row, _ in cells)
        assert min(scene.width, scene.height) >= MIN_SIDE
        assert max(scene.width, scene.height) <= MAX_SIDE
        sizes.add((scene.width, scene.height))
    assert any(width % 32 and height % 32 for width, height in sizes), "resizing must happen"
    assert any(width != height for width, height in sizes)


def test_things_are_painted_where_the_scene_says():
    for scene in scenes(40):
        image = render(scene)
        assert image.size == (scene.width, scene.height)
        for thing in scene.things:
            if thing.shape == "ring":
                continue
            x = (thing.col + 0.5 + thing.dx) * scene.width / 3
            y = (thing.row + 0.5 + thing.dy) * scene.height / 3
            seen = image.getpixel((round(x), round(y)))
            distance = {
                colour: sum((a - b) ** 2 for a, b in zip(seen, ink, strict=True))
                for colour, ink in COLOURS.items()
            }
            assert min(distance, key=distance.get) == thing.colour
        empty = {(r, c) for r in range(3) for c in range(3)}
        empty -= {(thing.row, thing.col) for thing in scene.things}
        for row, col in empty:
            if scene.word is None or row != scene.word_row:
                middle = ((col + 0.5) * scene.width / 3, (row + 0.5) * scene.height / 3)
                assert image.getpixel((round(middle[0]), round(middle[1]))) == scene.background


def test_a_printed_word_stays_inside_its_row():
    for scene in scenes(24, "words"):
        if scene.word is None:
            continue
        image = render(scene)
        ink = [
            (x, y)
            for y in range(scene.height)
            for x in range(scene.width)
            if min(image.getpixel((x, y))) > 200 or max(image.getpixel((x, y))) < 60
            if sum(
                abs(a - b) for a, b in zip(image.getpixel((x, y)), scene.background, strict=True)
            )
            > 300
        ]
        assert ink
        top, bottom = scene.word_row * scene.height / 3, (scene.word_row + 1) * scene.height / 3
        assert all(top <= y <= bottom and 0 < x < scene.width - 1 for x, y in ink)


@pytest.mark.parametrize("ask", list(SINGLE), ids=lambda ask: ask.__name__)
def test_every_kind_of_question_gets_asked(ask):
    dice = Dice("kinds")
    turns = [ask(dice, scene, where) for scene in scenes(60) for where in ("", " in picture 2")]
    found = [turn for turn in turns if turn is not None]
    assert found
    for turn in found:
        assert turn.task in TASKS
        assert "{" not in turn.question + turn.answer
        assert "  " not in turn.question + turn.answer
        assert turn.answer[0].isupper()
        assert turn.answer.endswith(".")


def turns_of(task, count=3000):
    dice = Dice(f"turns-{task}")
    for scene in scenes(count, f"scenes-{task}"):
        turn = single_turn(dice, scene)
        if turn is not None and turn.task == task:
            yield scene, turn


def test_descriptions_name_every_thing_at_its_place():
    for scene, turn in turns_of("describe"):
        found = re.findall(rf"an? (\w+) (\w+) ({SPOTS})", turn.answer)
        assert [(c, s, *PLACE_OF[spot]) for c, s, spot in found] == [
            (thing.colour, thing.shape, thing.row, thing.col) for thing in scene.things
        ]
        assert (f"The word is {scene.word}." in turn.answer) == (scene.word is not None)


def test_counts_and_existence_are_true():
    for task in ("count", "exists"):
        for scene, turn in turns_of(task):
            found = re.search(r"(?:is|are) (no|an?|\w+) (.+)\.", turn.answer)
            said, noun = found.groups()
            if noun.split(" ")[-1] not in (*SHAPES, "object"):
                singulars = {plural(shape): shape for shape in (*SHAPES, "object")}
                words = noun.split(" ")
                if words[-1] in singulars:
                    noun = " ".join([*words[:-1], singulars[words[-1]]])
            number = len(named(scene, noun))
            assert number == (1 if said in ("a", "an") else NUMBERS.index(said)), turn
            if task == "exists":
                assert turn.answer.startswith("Yes, " if number else "No, ")


def test_colours_shapes_and_places_are_true():
    for task in ("colour", "shape", "place"):
        for scene, turn in turns_of(task):
            found = re.fullmatch(rf"The {NOUN} is (?:an? )?(.+)\.", turn.answer)
            if found is None:  # several, or none
                continue
            (thing,) = named(scene, " ".join(w for w in found.groups()[:2] if w))
            said = found.group(3)
            true = {"colour": thing.colour, "shape": thing.shape}.get(task)
            assert (said == true) if true else PLACE_OF[said] == (thing.row, thing.col), turn


def test_positions_are_true():
    seen = set()
    for scene, turn in turns_of("position"):
        side = "(above|below)?(?: and )?(left of|right of)?"
        pattern = rf"(?:(Yes|No), t|T)he {NOUN} is {side} the {NOUN}\."
        found = re.fullmatch(pattern, turn.answer)
        if found is None:
            assert re.fullmatch(
                rf"The {NOUN} is (further left|further right|higher|lower)\.", turn.answer
            )
            continue
        start, *a, vertical, horizontal, b_colour, b_shape = found.groups()
        (first,) = named(scene, " ".join(w for w in a if w))
        (second,) = named(scene, " ".join(w for w in (b_colour, b_shape) if w))
        said = [side for side in (vertical, horizontal and horizontal.split(" ")[0]) if side]
        assert set(said) <= set(sides(first, second)), turn
        assert start or said == sides(first, second)
        assert (first.row < second.row) == ("above" in sides(first, second))
        assert (first.col < second.col) == ("left" in sides(first, second))
        seen.add(start)
    assert seen == {"Yes", "No", None}


def test_words_are_true():
    for scene, turn in turns_of("word"):
        if scene.word is None:
            assert "no word" in turn.answer
        else:
            assert re.findall("[A-Z]{2,}", turn.answer) == [scene.word]
    for scene, turn in turns_of("wordplace"):
        assert turn.answer == f"The word is {WORD_PLACES[scene.word_row]}."


def test_which_picture_is_true():
    dice = Dice("several")
    count = 0
    for _ in range(1500):
        group = [draw_scene(dice, 4, 0.5) for _ in range(2 + dice.chance(0.5))]
        turn = ask_several(dice, group)
        if turn is None or not re.match("The .* pictures? ha(s|ve) an? ", turn.answer):
            continue
        if turn.answer.count(".") > 1:
            continue
        noun = re.search(" ha(?:s|ve) an? (.+)\\.", turn.answer).group(1)
        if noun == "word":
            true = [scene.word is not None for scene in group]
        else:
            true = [bool(named(scene, noun)) for scene in group]
        said = [ordinal in turn.answer for ordinal in ORDINALS[: len(group)]]
        assert said == true, turn
        count += 1
    assert count > 100


def test_a_question_without_a_picture_is_not_answered_from_nothing():
    dice = Dice("blind")
    turns = [training_turn(dice, (), draw_scene(dice)) for _ in range(300)]
    answers = {turn.answer for turn in turns if turn is not None}
    assert any("I see no picture" in answer for answer in answers)
    assert all(turn.task == "talk" for turn in turns if turn is not None)
