"""What has to hold of the engine's bookkeeping between any two steps; AssertionError if not."""

from collections.abc import Container, Iterable

from services.decoder.engine.engine import Engine
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.host_slots import HostSlots
from services.decoder.engine.schedule.recurrent_states import RecurrentStates
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence, SequenceState


def check_engine(engine: Engine) -> None:
    """The states of engine, scheduler and blocks agree."""
    check_scheduler(engine.scheduler)
    sequences = all_sequences(engine.scheduler)
    assert {s.sequence_id for s in sequences} == set(engine.sequences)
    launched = [c for _, b, _ in engine.pending for c in b.chunks if c.samples]
    if engine.planned is not None:
        launched += [c for c in engine.planned[0].chunks if c.samples]
    assert all(s.num_in_flight == sum(c.sequence is s for c in launched) for s in sequences)
    for sequence in {c.sequence for c in launched}:
        if sequence.state is SequenceState.RUNNING:
            most = sum(c.limit for c in launched if c.sequence is sequence)
            assert sequence.num_computed_tokens == len(sequence.token_ids) - 1 + most


def check_scheduler(scheduler: Scheduler) -> None:
    """Rows, blocks and states agree."""
    running = scheduler.running()
    rows = [s.row for s in running]
    assert len(set(rows)) == len(rows) and not set(rows) & set(
        scheduler.prefills.waiting.free_rows
    ), "a row held twice"
    assert all(s.state is SequenceState.RUNNING for s in running)
    idle = [*waiting(scheduler), *parked(scheduler)]
    assert all(s.state is SequenceState.WAITING and s.row == -1 for s in idle)
    assert all(s.plans_ahead for s in scheduler.decodes.decoding.values())
    awaiting = scheduler.decodes.awaiting.values()
    assert all(s.message.token_masks or s.drafts is not None for s in awaiting)
    assert scheduler.num_masked == sum(s.message.token_masks for s in (*running, *idle))
    assert not any(s.block_table for s in idle), "a waiting sequence holds blocks"
    assert len({s.sequence_id for s in running + idle}) == len(running) + len(idle)
    check_blocks(scheduler.blocks, running)


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """`sequences` own exactly the blocks that are not free, and the prefix cache is consistent."""
    owners, owned = [0] * blocks.num_blocks, set[int]()
    for sequence in sequences:
        assert sequence.capacity == len(sequence.block_table) * blocks.block_size
        assert len(set(sequence.block_table)) == len(sequence.block_table), "owned twice"
        for block in sequence.block_table:
            owners[block] += 1
        owned.update(sequence.block_table)
    assert owners == blocks.references, "reference counts differ from the owners"
    # Tests look at thousands of blocks after each step, so nothing here is a loop over free ones.
    free = {*blocks.blank, *blocks.reusable}
    assert len(blocks.blank) + len(blocks.reusable) == len(free), "a block is free twice"
    assert free.isdisjoint(owned), "a free block is owned"
    assert len(free) + len(owned) == blocks.num_blocks, "a block is lost"
    assert not free or 0 <= min(free) <= max(free) < blocks.num_blocks
    assert blocks.hash_of.keys().isdisjoint(blocks.blank)
    assert blocks.reusable.keys() <= blocks.hash_of.keys()
    assert blocks.block_of == dict(zip(blocks.hash_of.values(), blocks.hash_of, strict=True))
    check_host_slots(blocks.host)
    for name, block in blocks.host.offered.items():
        assert blocks.block_of.get(name) == block, "an offered block has other contents"
    if isinstance(blocks.states, RecurrentStates):
        check_checkpoints(blocks.states, blocks.block_of)
        check_host_slots(blocks.states.host)
        for name, slot in blocks.states.host.offered.items():
            assert blocks.states.slot_of.get(name) == slot, "an offered state has other contents"


def check_host_slots(host: HostSlots) -> None:
    """Each slot is held once, and no slot that the next step uses is free or written twice."""
    held = [*host.free, *host.slot_of.values(), *host.dropped]
    assert sorted(held) == list(range(len(held))), "a slot is lost, or held twice"
    writes = [*host.saves.values(), *host.idle_saves.values()]
    assert len(set(writes)) == len(writes), "a slot is written twice"
    assert set(writes) == host.saving
    assert not set(host.saves) & set(host.idle_saves), "a block that is changed counts as idle"
    assert not (host.saving | set(host.loads.values())) & set(host.free), "a slot in use is free"
    assert not host.saving & set(host.loads.values()), "a slot is read before it is written"


def check_checkpoints(checkpoints: RecurrentStates, registered: Container[bytes]) -> None:
    """Each slot is held once, and each checkpoint's block is registered."""
    held = [*checkpoints.free, *checkpoints.slot_of.values(), *checkpoints.planned]
    assert sorted(held) == list(range(checkpoints.num_slots)), "a slot is lost, or held twice"
    assert all(name in registered for name in checkpoints.slot_of), "a checkpoint without its KV"


def waiting(scheduler: Scheduler) -> list[Sequence]:
    """Those in the queues of tenants."""
    return list(scheduler.prefills.waiting)


def parked(scheduler: Scheduler) -> list[Sequence]:
    """Those that wait for an image or a mask."""
    return [
        *scheduler.prefills.parked_for_images.values(),
        *scheduler.prefills.parked_for_masks.values(),
    ]


def all_sequences(scheduler: Scheduler) -> list[Sequence]:
    """Those that have not ended."""
    return [*scheduler.running(), *parked(scheduler), *waiting(scheduler)]
