"""The little world of the demonstration model: seeded scenes and their images.

A scene is plain data (`Scene`): coloured shapes on a loose 3x3 grid and at most one printed word.
`draw_scene` invents one, `render` paints it. Both depend on their arguments alone.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from demo.dice import Dice

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "orange": (245, 135, 20),
    "yellow": (240, 215, 30),
    "green": (40, 155, 60),
    "blue": (35, 85, 215),
    "purple": (125, 45, 165),
    "pink": (245, 130, 185),
    "brown": (128, 78, 40),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "heart", "ring")
LIGHT = ((250, 250, 250), (240, 236, 222), (224, 232, 240), (226, 238, 226), (214, 214, 214))
DARK = ((38, 40, 46), (28, 34, 54), (24, 44, 40))
MIN_SIDE, MAX_SIDE = 160, 256
_OVERSAMPLE = 2

COMMON_WORDS = tuple(  # one string, since 522 lines of one word each help no reader
    """
    ace act add age air and ant ape arm art ask bag bar bat bay bed bee big bit box boy bus buy
    cab cap car cat cow cup cut dad day dog dot dry ear eat egg end eye fan far fig fit fly fog
    fox fun gap gas gem gum hat hen hit hot ice ink jam jar jet job joy key kid kit lab leg lid
    lip log map mat mix mom mud net new nut oak oil old one owl pan paw pea pen pet pie pig pin
    pot red rib rod row rug run sea sit six sky sun tab tap tax tea ten tie tin toe top toy tub
    two van vet wax web wet win yes zip zoo able acid aged area army baby back ball band bank
    barn base bath bean bear bell belt bike bird blue boat bold bone book boot bowl bulb cake
    calm camp card cart cave city clay club coal coat code coin cold cook corn crab crew crow
    cube dark dawn deer desk dish door dove drum duck dust east easy edge exit face farm fast
    film fire fish five flag flat fold food fork four frog fuel game gate gift girl goat gold
    golf good gray grid hall hand harp hawk help hero hill home hope horn idea iron jazz join
    jump kite lake lamp leaf lime lion list lock long love luck mail maze meal milk mind mint
    moon moss nest news next nine noon north note open oven pack park path peak pear pink plan
    plum pond pool rain ring road rock roof room root rose ruby sail salt sand seed ship shoe
    shop silk slow snow soap sock soft song soup star stop surf swan taxi team tent time tool
    town tree tuna unit vase verb view wave west wild wind wing wolf wood word yard year zero
    zone apple beach berry black bloom board bread brick bring brown brush cabin camel candy
    chair chalk chess clean clock cloud coral crown dance diary dream eagle early earth eight
    fairy field flame floor flute fresh frost fruit ghost giant glass globe grape grass green
    happy heart honey horse hotel house igloo jelly jolly juice koala lemon light lucky magic
    maple metal mango money mouse music night ocean olive onion orbit ozone paint panda paper
    peach piano pilot pizza plane plant quick quiet radio river robot royal salad sheep shell
    smile snail solar spoon storm sugar sunny table tiger toast tower train truck tulip under
    uncle vivid voice water whale wheat wheel white woman world young zebra animal autumn
    banana basket bridge bronze butter button camera candle carpet castle cheese cherry circle
    coffee cotton dinner doctor dragon engine family finger flower forest friend frozen future
    garden ginger guitar hammer harbor helmet island jacket jungle kettle kitten ladder letter
    lizard market mirror monkey museum needle number office orange oyster palace parrot pencil
    pepper planet pocket potato puzzle rabbit rocket saddle sailor school season shadow silver
    spider spring square stream street summer sunset temple ticket tomato travel tunnel turtle
    valley velvet violin violet walnut window winter wizard yellow yogurt
    """.split()  # noqa: SIM905
)
_VOWELS, _CONSONANTS = "AEIOU", "BCDFGHJKLMNPQRSTVWXYZ"


@dataclass(frozen=True)
class Thing:
    """One shape: its looks, its grid cell (row and column 0..2) and its jitter inside the cell."""

    colour: str
    shape: str
    row: int
    col: int
    dx: float
    dy: float
    radius: float  # as a part of the smaller side of the cell
    tilt: float  # radians
    tint: tuple[int, int, int]  # added to the colour, so that no two reds are quite equal


@dataclass(frozen=True)
class Scene:
    """An image as plain data. `things` are in reading order; no two share a cell."""

    width: int
    height: int
    background: tuple[int, int, int]
    things: tuple[Thing, ...]
    word: str | None = None
    word_row: int = 0
    word_size: float = 0.0  # as a part of the row's height
    word_dx: float = 0.0


def draw_word(dice: Dice) -> str:
    """A word of 3 to 6 capital letters: a common English one, or letters that make no sense."""
    if dice.chance(0.5):
        return dice.pick(COMMON_WORDS).upper()
    length = dice.integer(3, 6)
    if dice.chance(0.3):
        return "".join(dice.pick(_VOWELS + _CONSONANTS) for _ in range(length))
    vowel = dice.chance(0.3)
    letters = []
    for _ in range(length):
        letters.append(dice.pick(_VOWELS if vowel else _CONSONANTS))
        vowel = not vowel if dice.chance(0.85) else vowel
    return "".join(letters)


def draw_scene(dice: Dice, max_things: int = 6, word_chance: float = 0.45) -> Scene:
    """Invent a scene of at most `max_things` shapes. Never empty: it has a shape or a word."""
    word = draw_word(dice) if dice.chance(word_chance) else None
    word_row = dice.integer(0, 2)
    cells = [(r, c) for r in range(3) for c in range(3) if word is None or r != word_row]
    if word is not None and dice.chance(0.15):
        count = 0
    else:
        count = dice.integer(1, min(max_things, len(cells)))
    colours: list[str] = list(COLOURS)
    shapes: list[str] = list(SHAPES)
    if dice.chance(0.5):  # few kinds, so that there is something to count
        colours = dice.some(colours, dice.integer(1, 3))
        shapes = dice.some(shapes, dice.integer(1, 3))
    dark = dice.chance(0.2)
    things = tuple(
        Thing(
            colour=dice.pick(colours),
            shape=dice.pick(shapes),
            row=row,
            col=col,
            dx=dice.between(-0.11, 0.11),
            dy=dice.between(-0.11, 0.11),
            radius=dice.between(0.28, 0.38),
            tilt=dice.between(-0.14, 0.14),
            tint=(dice.integer(-9, 9), dice.integer(-9, 9), dice.integer(-9, 9)),
        )
        for row, col in sorted(dice.some(cells, count))
    )
    return Scene(
        width=dice.integer(MIN_SIDE, MAX_SIDE),
        height=dice.integer(MIN_SIDE, MAX_SIDE),
        background=dice.pick(DARK if dark else LIGHT),
        things=things,
        word=word,
        word_row=word_row,
        word_size=dice.between(0.5, 0.72),
        word_dx=dice.between(-1.0, 1.0),
    )


def _polygon(shape: str) -> list[tuple[float, float]]:
    """The outline of a shape in the unit circle, y downwards."""
    if shape == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if shape == "diamond":
        return [(0.0, -1.05), (0.75, 0.0), (0.0, 1.05), (-0.75, 0.0)]
    if shape == "triangle":
        return [(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)]
    if shape == "cross":
        quarter = [(0.3, -0.95), (0.3, -0.3), (0.95, -0.3)]
        return [p for turn in range(4) for p in (_rotate(q, turn * math.pi / 2) for q in quarter)]
    if shape == "star":
        radii = (1.05, 0.45)
        angles = [(radii[k % 2], k * math.pi / 5) for k in range(10)]
        return [(r * math.sin(a), -r * math.cos(a)) for r, a in angles]
    points = []
    for k in range(40):  # heart
        t = k * math.pi / 20
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((math.sin(t) ** 3, -(y + 2) / 15.5))
    return points


def _rotate(point: tuple[float, float], angle: float) -> tuple[float, float]:
    x, y = point
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


_OUTLINES = {shape: _polygon(shape) for shape in SHAPES if shape not in ("circle", "ring")}


def _paint(draw: ImageDraw.ImageDraw, thing: Thing, width: int, height: int) -> None:
    """Paint one shape on a canvas of the given (oversampled) size."""
    cell_w, cell_h = width / 3, height / 3
    x = (thing.col + 0.5 + thing.dx) * cell_w
    y = (thing.row + 0.5 + thing.dy) * cell_h
    r = thing.radius * min(cell_w, cell_h)
    base = COLOURS[thing.colour]
    ink = tuple(min(255, max(0, c + t)) for c, t in zip(base, thing.tint, strict=True))
    box = (x - r, y - r, x + r, y + r)
    if thing.shape == "circle":
        draw.ellipse(box, fill=ink)
    elif thing.shape == "ring":
        draw.ellipse(box, outline=ink, width=max(2, round(r * 0.38)))
    else:
        points = [_rotate(p, thing.tilt) for p in _OUTLINES[thing.shape]]
        draw.polygon([(x + r * px, y + r * py) for px, py in points], fill=ink)


@lru_cache(maxsize=256)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """The font that Pillow carries inside itself, so that no system font is needed."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, so words cannot be printed")
    return font


def _print_word(draw: ImageDraw.ImageDraw, scene: Scene, width: int, height: int) -> None:
    """Print the scene's word in its row, as large as the scene says, but inside the image."""
    word = scene.word or ""
    size = round(scene.word_size * height / 3)
    left, top, right, bottom = draw.textbbox((0, 0), word, font=_font(size))
    if right - left > 0.9 * width:
        size = int(size * 0.9 * width / (right - left))
        left, top, right, bottom = draw.textbbox((0, 0), word, font=_font(size))
    slack = width - (right - left)
    x = slack / 2 + scene.word_dx * (slack / 2 - 0.04 * width) - left
    y = (scene.word_row + 0.5) * height / 3 - (top + bottom) / 2
    ink = (20, 20, 24) if sum(scene.background) > 380 else (245, 245, 245)
    draw.text((x, y), word, font=_font(size), fill=ink)


def render(scene: Scene) -> Image.Image:
    """Paint the scene as an RGB image of its own size."""
    width, height = scene.width * _OVERSAMPLE, scene.height * _OVERSAMPLE
    image = Image.new("RGB", (width, height), scene.background)
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        _paint(draw, thing, width, height)
    if scene.word is not None:
        _print_word(draw, scene, width, height)
    return image.reduce(_OVERSAMPLE)


def png_bytes(scene: Scene) -> bytes:
    """The rendered image as a PNG file."""
    buffer = io.BytesIO()
    render(scene).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
