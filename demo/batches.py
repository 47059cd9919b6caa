"""Training batches: scenes rendered, cut into patches and packed with their questions.

A row of a batch is one conversation prefix (its images) followed by many questions, each of which
sees the prefix and itself only: `segment` is 0 in the prefix and counts the questions after it, and
all of them start at the same position. So each question is trained exactly as if it were asked
alone, and the images are paid for once. Some rows are true conversations instead: one segment.
A clip is a prefix of several temporal patches (two frames each), every one after its time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from demo.clips import Clip, draw_clip, frames, sampled_indices
from demo.curriculum import TASKS, training_turn, turn_about_clip
from demo.dice import Dice
from demo.scenes import Scene, draw_scene, render
from demo.talk import SYSTEM_MESSAGES
from demo.wording import Turn

MAX_PATCHES = 256  # of a 256 x 256 image
MAX_TOKENS = MAX_PATCHES // 4
MAX_CLIP_PATCHES = 144  # of two frames of 192 x 192
UNIT = 32  # pixels of an image token's side
IGNORED = -100


@dataclass(frozen=True)
class BatchShape:
    """How many rows have no, one, two and three images, or a clip, and how long every row is."""

    rows: tuple[int, int, int, int] = (2, 30, 10, 6)
    clips: int = 50
    length: int = 416

    @property
    def num_rows(self) -> int:
        """Rows of a batch."""
        return sum(self.rows) + self.clips

    @property
    def num_images(self) -> int:
        """Images of a batch."""
        return sum(count * rows for count, rows in enumerate(self.rows))

    @property
    def clip_lengths(self) -> tuple[int, ...]:
        """Temporal patches of each clip: 2 to 6 in turn, so that all batches have equally many."""
        return tuple(2 + k % 5 for k in range(self.clips))


def resized_side(side: int) -> int:
    """The side that the image processor gives an image of our sizes (a multiple of 32)."""
    return round(side / UNIT) * UNIT


def patches(scene: Scene) -> tuple[np.ndarray, tuple[int, int]]:
    """The image as rows of 16x16 patches [n, 768] uint8 in merge order, and its patch grid."""
    pixels = torch.from_numpy(np.array(render(scene))).permute(2, 0, 1)[None]
    height, width = resized_side(scene.height), resized_side(scene.width)
    if (height, width) != (scene.height, scene.width):
        pixels = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    grid = pixels.numpy().reshape(3, height // UNIT, 2, 16, width // UNIT, 2, 16)
    rows = grid.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * 16 * 16)
    return rows, (height // 16, width // 16)


def clip_patches(shown: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Frames [n, height, width, 3] as temporal patches [ceil(n / 2), patches, 1536], and the grid.

    The last of an odd number of frames counts twice. The order inside is the processor's.
    """
    if len(shown) % 2:
        shown = np.concatenate((shown, shown[-1:]))
    height, width = (resized_side(side) for side in shown.shape[1:3])
    pixels = torch.from_numpy(shown).permute(0, 3, 1, 2)
    if (height, width) != shown.shape[1:3]:
        pixels = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    grid = pixels.numpy().reshape(-1, 2, 3, height // UNIT, 2, 16, width // UNIT, 2, 16)
    rows = grid.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(len(shown) // 2, -1, 2 * 768)
    return rows, (height // 16, width // 16)


def timestamps(indices: Sequence[int], rate: float) -> list[float]:
    """The time in seconds of each temporal patch: the mean of its two frames'."""
    even = [*indices, indices[-1]] if len(indices) % 2 else indices
    times = [index / rate for index in even]
    return [(times[k] + times[k + 1]) / 2 for k in range(0, len(times), 2)]


def through_codec(dice: Dice, shown: np.ndarray) -> np.ndarray:
    """The frames with the losses of a codec: blocks, and colours at half the resolution."""
    count, height, width, _ = shown.shape
    buffer = io.BytesIO()
    sheet = Image.fromarray(shown.reshape(count * height, width, 3))
    sheet.save(buffer, "JPEG", quality=dice.integer(50, 92), subsampling="4:2:0")
    return np.array(Image.open(buffer)).reshape(shown.shape)


def training_clip(dice: Dice, length: int) -> tuple[Clip, list[int]]:
    """A clip and its sampled frames: `length` pairs, mostly at two a second."""
    count = max(4, 2 * length - dice.integer(0, 1))
    seconds = count / 2
    if dice.chance(0.2):  # another rate
        seconds = min(6.0, max(2.0, dice.between(0.36, 0.6) * count))
    clip = draw_clip(dice, seconds)
    return clip, sampled_indices(clip, count)


class Vocabulary:
    """Text to token ids, with the tokens of the chat template at hand."""

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._encode = lru_cache(maxsize=200_000)(lambda text: tokenizer.encode(text).ids)
        self.image_pad = self.id_of("<|image_pad|>")
        self.video_pad = self.id_of("<|video_pad|>")

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, special tokens recognised."""
        return self._encode(text)

    def id_of(self, token: str) -> int:
        """The id of one token."""
        (token_id,) = self._encode(token)
        return token_id


@dataclass
class Row:
    """One row under construction: parallel lists with one entry per token."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    cursor: int = 0

    def _add(self, token: int, position: tuple[int, int, int], segment: int, slot: int) -> None:
        self.ids.append(token)
        self.positions.append(position)
        self.segments.append(segment)
        self.labels.append(IGNORED)
        self.slots.append(slot)
        self.tasks.append(0)

    def add_text(self, ids: Sequence[int], segment: int) -> None:
        """Append tokens that are read but not learned."""
        for token in ids:
            self._add(token, (self.cursor,) * 3, segment, -1)
            self.cursor += 1

    def add_answer(self, ids: Sequence[int], segment: int, task: int) -> None:
        """Append tokens that are learned: each is the label of the one before it."""
        for token in ids:
            self.labels[-1], self.tasks[-1] = token, task
            self.add_text((token,), segment)

    def add_image(self, index: int, grid: tuple[int, int], pad: int, segment: int) -> None:
        """Append the placeholders of image `index` with its two-dimensional positions."""
        rows, cols = grid[0] // 2, grid[1] // 2
        for k in range(rows * cols):
            position = (self.cursor, self.cursor + k // cols, self.cursor + k % cols)
            self._add(pad, position, segment, index * MAX_TOKENS + k)
        self.cursor += max(rows, cols)


class Packer:
    """Fills rows with turns until they are full."""

    def __init__(self, vocabulary: Vocabulary, length: int) -> None:
        self._tokens = vocabulary
        self._length = length

    def pack(
        self, dice: Dice, scenes: Sequence[Scene], grids: Sequence[tuple[int, int]], first: int
    ) -> Row:
        """A row about these scenes, whose images are number `first` and on in the batch."""
        tokens, absent = self._tokens, draw_scene(dice)

        def show(row: Row) -> None:
            labelled = dice.chance(0.1)
            for i, grid in enumerate(grids):
                row.add_text(tokens(f"Picture {i + 1}: ") if labelled else (), 0)
                row.add_text(tokens("<|vision_start|>"), 0)
                row.add_image(first + i, grid, tokens.image_pad, 0)
                row.add_text(tokens("<|vision_end|>"), 0)

        return self._pack(dice, show, lambda: training_turn(dice, scenes, absent))

    def pack_clip(
        self, dice: Dice, clip: Clip, times: Sequence[float], grid: tuple[int, int], first: int
    ) -> Row:
        """A row about a clip, whose temporal patches are number `first` and on in the batch."""
        tokens = self._tokens

        def show(row: Row) -> None:
            row.add_text(tokens("<|vision_start|>"), 0)
            for i, time in enumerate(times):
                row.add_text(tokens(f"<{time:.1f} seconds>"), 0)
                row.add_text(tokens("<|vision_start|>"), 0)
                row.add_image(first + i, grid, tokens.video_pad, 0)
                row.add_text(tokens("<|vision_end|>"), 0)
            row.add_text(tokens("<|vision_end|>"), 0)

        return self._pack(dice, show, lambda: turn_about_clip(dice, clip))

    def _pack(
        self, dice: Dice, show: Callable[[Row], None], draw: Callable[[], Turn | None]
    ) -> Row:
        tokens, row = self._tokens, Row()
        if dice.chance(0.1):
            row.add_text(tokens(f"<|im_start|>system\n{dice.pick(SYSTEM_MESSAGES)}<|im_end|>\n"), 0)
        row.add_text(tokens("<|im_start|>user\n"), 0)
        conversation = dice.chance(0.15)
        opening = draw() if conversation else None
        text_first = opening is not None and dice.chance(0.3)
        if opening is not None and text_first:
            row.add_text(tokens(opening.question), 0)
        show(row)
        if opening is not None:
            self._answer(
                row,
                "" if text_first else opening.question,
                opening.answer,
                1,
                TASKS.index(opening.task),
            )
        self._fill(row, draw, opening is not None)
        return row

    def _answer(self, row: Row, question: str, answer: str, segment: int, task: int) -> bool:
        """Append one turn after its question's opening, if it fits."""
        tokens = self._tokens
        asked = tokens(f"{question}<|im_end|>\n<|im_start|>assistant\n")
        replied = tokens(f"{answer}<|im_end|>")
        if len(row.ids) + len(asked) + len(replied) > self._length:
            return False
        row.add_text(asked, segment)
        row.add_answer(replied, segment, task)
        return True

    def _fill(self, row: Row, draw: Callable[[], Turn | None], conversation: bool) -> None:
        start, failures, segment = row.cursor, 0, 1
        while failures < 4:
            turn = draw()
            if turn is None:
                continue
            question = turn.question
            if conversation:
                question = f"\n<|im_start|>user\n{question}"
            else:
                row.cursor, segment = start, segment + 1
            fits = self._answer(row, question, turn.answer, segment, TASKS.index(turn.task))
            failures += not fits


def _draw_rows(
    dice: Dice, packer: Packer, shape: BatchShape, pixels: np.ndarray, grids: np.ndarray
) -> Iterator[Row]:
    """Rows about still images, whose patches and grids are written into the arrays."""
    first = 0
    for count, rows in enumerate(shape.rows):
        for _ in range(rows):
            most, chance = (6, 0.45) if count < 2 else (4, 0.5)
            scenes = [draw_scene(dice, most, chance) for _ in range(count)]
            for i, scene in enumerate(scenes):
                cut, grids[first + i] = patches(scene)
                pixels[first + i, : len(cut)] = cut
            grid_list = [(int(h), int(w)) for h, w in grids[first : first + count]]
            yield packer.pack(dice, scenes, grid_list, first)
            first += count


def _draw_clip_rows(
    dice: Dice, packer: Packer, shape: BatchShape, pixels: np.ndarray, grids: np.ndarray
) -> Iterator[Row]:
    """Rows about clips; the patches and grids of every pair of frames go into the arrays."""
    first = 0
    for length in shape.clip_lengths:
        clip, indices = training_clip(dice, length)
        shown = frames(clip, indices)
        if dice.chance(0.5):
            shown = through_codec(dice, shown)
        cut, grid = clip_patches(shown)
        pixels[first : first + length, : cut.shape[1]], grids[first : first + length] = cut, grid
        times = timestamps(indices, clip.rate)
        yield packer.pack_clip(dice, clip, times, grid, shape.num_images + first)
        first += length


def build_batch(dice: Dice, packer: Packer, shape: BatchShape) -> dict[str, torch.Tensor]:
    """Draw, render and pack one batch. All tensors have the same sizes in every batch."""
    size, pairs = (shape.num_rows, shape.length), sum(shape.clip_lengths)
    pixels = np.zeros((shape.num_images, MAX_PATCHES, 768), np.uint8)
    grids = np.zeros((shape.num_images, 2), np.int64)
    clip_pixels = np.zeros((pairs, MAX_CLIP_PATCHES, 2 * 768), np.uint8)
    clip_grids = np.zeros((pairs, 2), np.int64)
    arrays = {
        "ids": np.zeros(size, np.int64),
        "segments": np.full(size, -1, np.int64),
        "labels": np.full(size, IGNORED, np.int64),
        "slots": np.full(size, -1, np.int64),
        "tasks": np.zeros(size, np.int64),
    }
    positions = np.zeros((*size, 3), np.int64)
    rows = chain(
        _draw_rows(dice, packer, shape, pixels, grids),
        _draw_clip_rows(dice, packer, shape, clip_pixels, clip_grids),
    )
    for index, row in enumerate(rows):
        for key, values in arrays.items():
            values[index, : len(row.ids)] = getattr(row, key)
        positions[index, : len(row.ids)] = row.positions
    arrays |= {"pixels": pixels, "grids": grids}
    arrays |= {"clip_pixels": clip_pixels, "clip_grids": clip_grids}
    arrays |= {"positions": positions.transpose(2, 0, 1).copy()}
    return {key: torch.from_numpy(values) for key, values in arrays.items()}


class SceneBatches(IterableDataset[dict[str, torch.Tensor]]):
    """An endless stream of fresh batches; every worker process has a seed of its own."""

    def __init__(self, tokenizer_file: Path, shape: BatchShape, seed: int) -> None:
        self._tokenizer_file, self._shape, self._seed = tokenizer_file, shape, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        dice = Dice(f"train-{self._seed}-{worker.id if worker else 0}")
        packer = Packer(Vocabulary(self._tokenizer_file), self._shape.length)
        while True:
            yield build_batch(dice, packer, self._shape)
