"""Random steps for the kernels that prepare steps and drafts, and checks against their twins."""

from collections.abc import Callable
from dataclasses import fields

import torch

from kernels import draft_places, plain
from kernels.rows import MAX_CHANGING_CHUNKS, DeviceRows, EnteredStep, StepEntry

BLOCK_SIZE, MAX_BLOCKS, ROWS = 16, 40, 300


def check_step_entry(enter: Callable[..., None], count: int, device: str) -> None:
    """Decodes from the device, known tokens, chunks and padding, three steps on the same rows."""
    generator = torch.Generator().manual_seed(count)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    start = (
        integers(900, ROWS + 1, MAX_BLOCKS), integers(MAX_BLOCKS * BLOCK_SIZE - 4, ROWS + 1),
        integers(50, ROWS + 1) - 25, integers(1000, ROWS + 1),
    )  # fmt: skip
    ours, twins = (DeviceRows(*(part.clone().to(device) for part in start)) for _ in range(2))
    for turn in range(3):
        num_decodes = min(count, ROWS - 1) if turn == 2 else min(count // 2, 200)
        owners = torch.randperm(ROWS, generator=generator).int()
        num_chunks = num_decodes + 3
        tokens, chunks = torch.zeros(6, count, dtype=torch.int32), torch.zeros(4, num_chunks)
        tokens[2:] = integers(5000, 4, count)
        tokens[0], tokens[1] = -1, 0
        tokens[0, :num_decodes] = owners[:num_decodes]
        tokens[1, :num_decodes] = -integers(2, num_decodes)  # 0: known
        used = num_decodes + (count - num_decodes) * 2 // 3  # one chunk, then padding
        tokens[0, num_decodes:used] = owners[-1]
        tokens[1, num_decodes:used] = torch.arange(used - num_decodes) % (MAX_BLOCKS * BLOCK_SIZE)
        chunks[0], chunks[2] = ROWS, -1
        if max(count, num_chunks) <= MAX_CHANGING_CHUNKS:
            changing = torch.randperm(num_chunks, generator=generator)[: num_chunks // 3]
            chunks[2, changing] = owners[: len(changing)] * MAX_BLOCKS + turn + 0.0
            chunks[3, changing] = 900.0 + turn
        chunks[0, :num_decodes], chunks[1, :num_decodes] = tokens[0, :num_decodes], 1
        chunks[1, :num_decodes][tokens[1, :num_decodes] < 0] = -1
        chunks[0, num_decodes], chunks[1, num_decodes] = owners[-1], 5
        step = StepEntry(tokens.to(device), chunks.int().to(device))
        found, expected = (
            EnteredStep.allocate(count, num_chunks, torch.device(device)).part(count, num_chunks)
            for _ in range(2)
        )
        enter(step, ours, found, BLOCK_SIZE)
        plain.enter_step(step, twins, expected, BLOCK_SIZE)
        for name in (field.name for field in fields(EnteredStep)):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert torch.equal(ours.lengths[:ROWS], twins.lengths[:ROWS])
        assert torch.equal(ours.blocks, twins.blocks)
        for rows in (ours, twins):  # tokens that the step samples
            rows.last_tokens[:ROWS] = integers(1000, ROWS).to(device)
        twins.last_tokens.copy_(ours.last_tokens)


def check_draft_places(
    kernel: Callable[..., draft_places.DraftPlaces],
    size: int,
    sizes: tuple[int, int, int],
    device: str,
) -> None:
    """Groups of which none to all drafts are accepted, some of them without blocks, and padding."""
    count, max_drafts, width = sizes
    draw = torch.Generator().manual_seed(size + max_drafts)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int32)

    per_row = 1 + max_drafts
    num_accepted = integers(0, per_row, size)
    sampled = integers(0, 1000, size * per_row + per_row)
    sampled[::7] = -1
    index = integers(0, (MAX_BLOCKS - 1) * BLOCK_SIZE, size)
    capacity = ((index + integers(-4, 12, size)) // BLOCK_SIZE + 1) * BLOCK_SIZE
    groups = torch.zeros(4 + max_drafts, size, dtype=torch.int32)
    groups[0] = torch.randperm(ROWS, generator=draw)[:size].int()
    groups[1] = torch.arange(size) * per_row
    groups[2], groups[3] = index, capacity
    for group, number in enumerate(num_accepted.tolist()):
        drafts = sampled[group * per_row :][:max_drafts].clone()
        drafts[number:] = -(1 << 31)
        groups[4:, group] = drafts
    groups[2:4, -1] = 0  # as padding, without blocks
    kept = draft_places.KeptHidden(
        torch.randn((ROWS + 1) * per_row, width, generator=draw).to(device),
        integers(0, 5000, (ROWS + 1) * per_row, 3).to(device),
    )
    blocks = integers(0, 900, ROWS + 1, MAX_BLOCKS).to(device)
    arguments = groups.to(device), sampled.to(device), kept, blocks, count, BLOCK_SIZE
    found, expected = kernel(*arguments), draft_places.draft_places(*arguments)
    for name, ours, twin in zip(expected._fields, found, expected, strict=True):
        assert ours.dtype == twin.dtype and torch.equal(ours, twin), name
    assert (found.slots >= 0).any() and (found.slots < 0).any()
    at = groups[0].long() * per_row + num_accepted
    assert torch.equal(found.hidden, kept.hidden[at.to(device)])


def check_draft_states(
    sources: Callable[..., tuple[torch.Tensor, ...]],
    keep: Callable[..., None],
    count: int,
    width: int,
    device: str,
) -> None:
    """Tokens behind others of the step, behind kept ones and without any, and padding."""
    draw, per_row = torch.Generator().manual_seed(count), 4
    num_kept = (ROWS + 1) * per_row

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int32)

    tokens = torch.stack((integers(-num_kept, count, count), integers(-1, 600, count)))
    tokens[0, ::2] = torch.arange(-1, count - 1, 2)
    tokens[1, -1] = -1
    rows = integers(-1, ROWS, count)
    chunks = torch.stack((integers(0, count, 9), torch.randperm(num_kept, generator=draw)[:9]))
    hidden = torch.randn(count, width, generator=draw).to(device)
    positions = integers(0, 5000, 3, count).to(device)
    blocks = integers(0, 900, ROWS + 1, MAX_BLOCKS).to(device)
    kept = draft_places.KeptHidden(
        torch.randn(num_kept, width, generator=draw).to(device),
        integers(0, 5000, num_kept, 3).to(device),
    )
    step = tokens.to(device), rows.to(device), hidden, positions, kept, blocks, BLOCK_SIZE
    found, expected = sources(*step), draft_places.draft_sources(*step)
    for ours, twin in zip(found, expected, strict=True):
        assert ours.dtype == twin.dtype and ours.is_contiguous() and torch.equal(ours, twin)
    twin = draft_places.KeptHidden(*(part.clone() for part in kept))
    entered = chunks.int().to(device)
    keep(entered, hidden, positions, kept)
    draft_places.keep_hidden(entered, hidden, positions, twin)
    assert torch.equal(kept.hidden, twin.hidden) and torch.equal(kept.positions, twin.positions)
    assert torch.equal(kept.hidden[entered[1].long()], hidden[entered[0].long()])
