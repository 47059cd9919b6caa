"""Arrays of a step for the layer for multi-token prediction, also of steps padded for graphs."""

import random

import numpy as np
import pytest

from kernels.rows import OfChunk
from services.decoder.engine.run.draft_inputs import (
    NO_DRAFT,
    lay_out,
    of_chunks,
    of_decodes,
    of_few_decodes,
    padded,
)
from services.decoder.engine.run.graphs import pad_decodes, pad_mixed
from services.decoder.engine.run.step_inputs import DraftArrays, StepInputs
from services.decoder.engine.run.step_inputs import lay_out as step_of
from services.decoder.engine.step import ComputeStep

ROWS, MAX_BLOCKS, BLOCK_SIZE, MAX_DRAFTS = 8, 16, 4, 3
KEPT = 1 + MAX_DRAFTS
CAPACITIES = np.array([12, 12, 24, 12, 12, 12, 12, 12, 0])


def step(*parts: tuple[int, int, int], folds: dict[int, int] | None = None) -> StepInputs:
    """A step of (row, start, length), whose chunks all sample."""
    rows, starts, lengths = np.array(parts).T
    count = int(lengths.sum())
    made = ComputeStep(
        rows, starts, lengths, 0, np.arange(len(rows)), np.arange(100, 100 + count, dtype=np.int32)
    )
    made.positions = np.zeros((3, count), np.int32)
    made.has_drafts = len(set(rows.tolist())) < len(rows)
    made.folds = np.array([*folds.items()]) if folds else None
    return step_of(made, MAX_BLOCKS)


def arrays(made: StepInputs) -> DraftArrays:
    return lay_out(made, CAPACITIES, MAX_DRAFTS, MAX_BLOCKS, BLOCK_SIZE)


def scratch(lengths: list[int]) -> StepInputs:
    return StepInputs.scratch(lengths, ROWS, MAX_BLOCKS)


def test_a_row_with_drafts_has_its_kept_state_before_its_first_token() -> None:
    """Row 2 has two drafts, and one of its last drafts was accepted. Row 5 begins a prompt."""
    found = arrays(step((2, 9, 1), (2, 10, 1), (2, 11, 1), (5, 0, 3), folds={0: 1}))
    before, index = found.tokens
    assert before.tolist() == [-1 - (2 * KEPT + 1), 0, 1, -1 - 5 * KEPT, 3, 4]
    assert index.tolist() == [8, 9, 10, -1, 0, 1]
    last, kept = found.chunks
    assert last.tolist() == [0, 1, 2, 5]
    assert kept.tolist() == [2 * KEPT, 2 * KEPT + 1, 2 * KEPT + 2, 5 * KEPT]
    none = NO_DRAFT
    assert found.groups.T.tolist() == [
        [2, 0, 9, 24, 101, 102, none], [5, 3, 2, 12, none, none, none]
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_decodes_are_laid_out_as_any_step(seed: int) -> None:
    draw = random.Random(seed)
    parts: list[tuple[int, int, int]] = []
    folds: dict[int, int] = {}
    for row in draw.sample(range(ROWS), draw.randint(1, 4)):
        start = draw.randint(1, 20)
        if draw.random() < 0.5:
            folds[len(parts)] = draw.randint(1, MAX_DRAFTS)
        parts += [(row, start + place, 1) for place in range(1 + draw.randint(0, MAX_DRAFTS))]
    for size in (len(parts), len(parts) + 3):
        made = pad_decodes(step(*parts, folds=folds), size, scratch([1] * (2 * ROWS + 8)))
        expected = of_chunks(made, CAPACITIES, MAX_DRAFTS)
        for form in (of_decodes, of_few_decodes):
            found = form(made, CAPACITIES, MAX_DRAFTS)
            for name in ("tokens", "chunks", "groups"):
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name


def test_a_piece_of_one_token_that_samples_nothing_takes_no_samples_place() -> None:
    """Row 4 has a piece of a prompt, which goes on with the next step. Row 6 ends its prompt."""
    made = step((2, 9, 1), (4, 5, 1), (6, 7, 1))
    made.samples = np.array([0, 2])
    found, expected = arrays(made), of_chunks(made, CAPACITIES, MAX_DRAFTS)
    assert found.groups[0].tolist() == [2, 6]
    assert found.groups.tolist() == expected.groups.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_blocks_that_a_step_adds_count() -> None:
    made = step((0, 11, 1), (3, 12, 1))
    made.block_updates = np.array([3 * MAX_BLOCKS + 3, 3 * MAX_BLOCKS + 4]), np.zeros(2, np.int32)
    assert arrays(made).groups[3].tolist() == [12, 20]
    assert CAPACITIES[3] == 12


def test_padding_stores_nothing_and_samples_nothing() -> None:
    plain = arrays(step((2, 9, 1), (2, 10, 1), (5, 3, 1)))
    found = arrays(pad_decodes(step((2, 9, 1), (2, 10, 1), (5, 3, 1)), 8, scratch([1] * ROWS)))
    assert found.tokens[:, :3].tolist() == plain.tokens.tolist()
    assert (found.tokens[1, 3:] == -1).all()
    assert (found.chunks[1, 3:] >= ROWS * KEPT).all() and found.chunks[1].max() < (ROWS + 1) * KEPT
    assert found.groups.tolist() == plain.groups.tolist()


def test_mixed_steps_are_padded_between_decodes_and_chunks() -> None:
    parts = (2, 9, 1), (2, 10, 1), (5, 0, 7)
    plain = arrays(step(*parts))
    found = arrays(pad_mixed(step(*parts), 16, 4, 3, scratch([1])))
    assert found.tokens[:, :9].tolist() == plain.tokens.tolist()
    assert (found.tokens[1, 9:] == -1).all()
    is_real = found.chunks[1] < ROWS * KEPT
    assert found.chunks[:, is_real].tolist() == plain.chunks.tolist()
    assert (found.chunks[0] < 16).all()
    assert found.groups.tolist() == plain.groups.tolist()


def test_scratch_steps_have_no_groups() -> None:
    made = scratch([1] * 7 + [5])
    assert (made.chunks[OfChunk.ROW] == ROWS).all()
    found = arrays(made)
    assert found.groups.shape == (4 + MAX_DRAFTS, 0)
    assert found.chunks[1].max() < (ROWS + 1) * KEPT
    empty = padded(found.groups, 2, ROWS)
    assert empty[0].tolist() == [ROWS, ROWS] and (empty[3] == 0).all()
