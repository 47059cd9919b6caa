"""The little world in motion: seeded clips in which shapes move, appear, vanish and change colour.

A clip is plain data (`Clip`): the things that take part and at most three events, each near a
whole second of its own. `scene_at` says what is to be seen at a moment; its images are those of
`scenes.py`. Everything depends on the arguments alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from demo.dice import Dice
from demo.scenes import COLOURS, DARK, LIGHT, SHAPES, Scene, Thing, render

MIN_SIDE, MAX_SIDE = 128, 192
RATES = (8, 10, 12, 15, 24, 25, 30)  # frames per second
MIN_SECONDS, MAX_SECONDS = 2.0, 6.0
SAMPLES_PER_SECOND, MIN_SAMPLES = 2, 4  # what Qwen3-VL's processor takes of a clip
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
KINDS = {"move": 0.4, "appear": 0.2, "vanish": 0.18, "turn": 0.22}


@dataclass(frozen=True)
class Event:
    """What happens to one thing: it moves, appears, vanishes or turns to another colour."""

    kind: str
    thing: int  # index in `Clip.things`
    second: int  # near which it happens
    start: float  # seconds
    length: float = 0.0  # seconds that a move takes
    direction: str = ""  # of a move
    cells: int = 0  # how far it moves
    colour: str = ""  # to which it turns


@dataclass(frozen=True)
class Clip:
    """A clip as plain data. Things are as they are at first or when they appear; events in order.

    No two things ever share a cell, and no two are called the same before or after the events.
    """

    width: int
    height: int
    background: tuple[int, int, int]
    rate: int  # frames per second
    num_frames: int
    things: tuple[Thing, ...]
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.num_frames / self.rate


def _changed(thing: Thing, event: Event, time: float) -> Thing | None:
    """The thing at a moment (seconds); None while it is not there."""
    done = time >= event.start
    if event.kind in ("appear", "vanish"):
        return thing if done == (event.kind == "appear") else None
    if event.kind == "turn":
        return replace(thing, colour=event.colour) if done else thing
    part = min(1.0, max(0.0, (time - event.start) / event.length))
    down, right = (event.cells * step for step in DIRECTIONS[event.direction])
    if part == 1.0:
        return replace(thing, row=thing.row + down, col=thing.col + right)
    return replace(thing, dy=thing.dy + part * down, dx=thing.dx + part * right)


def scene_at(clip: Clip, time: float) -> Scene:
    """What is to be seen at a moment (seconds). It may be empty."""
    event_of = {event.thing: event for event in clip.events}
    shown = [
        _changed(thing, event_of[i], time) if i in event_of else thing
        for i, thing in enumerate(clip.things)
    ]
    there = [thing for thing in shown if thing is not None]
    things = tuple(sorted(there, key=lambda thing: (thing.row, thing.col)))
    return Scene(clip.width, clip.height, clip.background, things)


def sampled_indices(clip: Clip, count: int | None = None) -> list[int]:
    """The frames that Qwen3-VL's processor takes: two a second, from the first to the last.

    `count` asks for another number of frames, as `num_frames` does. Ties go to the even number.
    """
    if count is None:
        count = max(int(clip.num_frames / clip.rate * SAMPLES_PER_SECOND), MIN_SAMPLES)
    return (
        np.linspace(0, clip.num_frames - 1, min(count, clip.num_frames))
        .round()
        .astype(int)
        .tolist()
    )


def frames(clip: Clip, indices: Sequence[int] | None = None) -> np.ndarray:
    """Frames [n, height, width, 3] uint8: all of them, or those of the indices."""
    painted: dict[Scene, np.ndarray] = {}
    shown = []
    for index in range(clip.num_frames) if indices is None else indices:
        scene = scene_at(clip, index / clip.rate)
        if scene not in painted:
            painted[scene] = np.asarray(render(scene))
        shown.append(painted[scene])
    return np.stack(shown)


def mp4_bytes(clip: Clip) -> bytes:
    """The clip as an mp4 file (H.264, 4:2:0). Needs PyAV, and even sides."""
    import av  # of the encoder's extra; nothing else here needs it

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=clip.rate)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.options = {"crf": "20", "threads": "1"}
        for image in frames(clip):
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def _cast(dice: Dice, count: int) -> list[tuple[str, str]]:
    """Different names: colours and shapes, at times of few kinds, so that they are confused."""
    colours, shapes = list(COLOURS), list(SHAPES)
    if dice.chance(0.4):
        colours, shapes = dice.some(colours, 3), dice.some(shapes, 2)
    names: list[tuple[str, str]] = []
    while len(names) < count:
        named = dice.pick(colours), dice.pick(shapes)
        if named not in names:
            names.append(named)
    return names


def _path(dice: Dice, free: set[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]] | None:
    """A direction and the free cells along it, from first to last; None if none is found."""
    for _ in range(8):
        row, col = dice.pick(sorted(free))
        direction = dice.pick(tuple(DIRECTIONS))
        down, right = DIRECTIONS[direction]
        steps = 1 if dice.chance(0.6) else 2
        cells = [(row + k * down, col + k * right) for k in range(steps + 1)]
        if all(cell in free for cell in cells):
            return direction, cells
    return None


def _thing(dice: Dice, named: tuple[str, str], cell: tuple[int, int]) -> Thing:
    return Thing(
        colour=named[0],
        shape=named[1],
        row=cell[0],
        col=cell[1],
        dx=dice.between(-0.08, 0.08),
        dy=dice.between(-0.08, 0.08),
        radius=dice.between(0.3, 0.4),
        tilt=dice.between(-0.14, 0.14),
        tint=(dice.integer(-9, 9), dice.integer(-9, 9), dice.integer(-9, 9)),
    )


def _events(
    dice: Dice, names: Sequence[tuple[str, str]], seconds: Sequence[int], free: set[tuple[int, int]]
) -> tuple[list[Event], list[Thing]]:
    """One event for each of the seconds, of the first things; their cells are no longer free."""
    events, things, taken = [], [], set(names)
    for index, second in enumerate(seconds):
        kind = dice.weighted(list(KINDS), list(KINDS.values()))
        path = _path(dice, free) if kind == "move" else None
        direction, cells = path or ("", [dice.pick(sorted(free))])
        kind = "turn" if kind == "move" and path is None else kind
        free.difference_update(cells)
        colour = ""
        if kind == "turn":
            shape = names[index][1]
            colour = dice.pick([c for c in COLOURS if (c, shape) not in taken])
            taken.add((colour, shape))
        start = second + dice.between(-0.15, 0.15)
        length = dice.between(0.35, 0.6) if kind == "move" else 0.0
        events.append(Event(kind, index, second, start, length, direction, len(cells) - 1, colour))
        things.append(_thing(dice, names[index], cells[0]))
    return events, things


def draw_clip(dice: Dice, seconds: float | None = None) -> Clip:
    """Invent a clip of the given length, or of 2 to 6 seconds. Its ends are never empty."""
    length = seconds or dice.integer(int(2 * MIN_SECONDS), int(2 * MAX_SECONDS)) / 2
    slots = range(1, math.floor(length - 0.9) + 1)
    while True:
        count = min(len(slots), dice.weighted((0, 1, 2, 3), (0.07, 0.28, 0.35, 0.3)))
        names = _cast(dice, max(1, count + dice.weighted((0, 1, 2), (0.4, 0.4, 0.2))))
        free = {(row, col) for row in range(3) for col in range(3)}
        events, things = _events(dice, names, sorted(dice.some(slots, count)), free)
        for named in names[count : count + len(free)]:
            cell = dice.pick(sorted(free))
            free.remove(cell)
            things.append(_thing(dice, named, cell))
        rate = dice.pick(RATES)
        clip = Clip(
            width=2 * dice.integer(MIN_SIDE // 2, MAX_SIDE // 2),
            height=2 * dice.integer(MIN_SIDE // 2, MAX_SIDE // 2),
            background=dice.pick(DARK if dice.chance(0.2) else LIGHT),
            rate=rate,
            num_frames=math.ceil(length * rate),
            things=tuple(things),
            events=tuple(events),
        )
        if scene_at(clip, 0.0).things and scene_at(clip, clip.seconds).things:
            return clip
