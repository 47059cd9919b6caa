"""The block manager: ownership of KV blocks, and the prefix cache; examples and a state machine."""

import statistics
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.sequence import Sequence
from tests.fake_runner import add_message
from tests.integrity import check_blocks

SIZE = 4


def sequence_of(number: int, tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(add_message(number, tokens, salt=salt))


def admit(blocks: BlockManager, sequence: Sequence, *, computed: bool = True) -> list[int]:
    prefix = blocks.find_prefix(sequence)
    blocks.allocate(sequence, len(sequence.token_ids), prefix)
    sequence.num_computed_tokens = len(sequence.token_ids) if computed else len(prefix) * SIZE
    blocks.register(sequence)
    return prefix


def test_full_blocks_are_shared_and_the_last_token_never_is():
    blocks = BlockManager(16, SIZE)
    first, second = sequence_of(1, list(range(12))), sequence_of(2, list(range(12)))
    assert admit(blocks, first) == []
    assert admit(blocks, second) == first.block_table[:2]
    assert second.block_table[2] not in first.block_table
    longer = sequence_of(3, [*range(12), 99])
    assert admit(blocks, longer) == first.block_table
    check_blocks(blocks, [first, second, longer])


def test_a_block_that_is_not_computed_is_not_found():
    blocks = BlockManager(16, SIZE)
    admit(blocks, sequence_of(1, list(range(12))), computed=False)
    assert blocks.find_prefix(sequence_of(2, list(range(12)))) == []


def test_a_block_whose_last_id_is_not_known_is_not_found():
    blocks = BlockManager(16, SIZE)
    first = sequence_of(1, list(range(7)))
    admit(blocks, first)
    first.num_in_flight = 1
    first.num_computed_tokens = 8  # launched, but the id of token 7 is still on the device
    blocks.register(first)
    assert len(blocks.find_prefix(sequence_of(2, list(range(12))))) == 1
    first.token_ids.append(7)
    blocks.register(first)
    assert len(blocks.find_prefix(sequence_of(3, list(range(12))))) == 2


def test_freed_blocks_are_found_until_they_are_needed_and_the_deepest_go_first():
    blocks = BlockManager(4, SIZE)
    first = sequence_of(1, list(range(16)))
    admit(blocks, first)
    table = first.block_table
    blocks.free(first)
    assert blocks.num_free == 4
    other = sequence_of(2, [7] * 4)
    admit(blocks, other)
    again = sequence_of(3, list(range(16)))
    assert blocks.find_prefix(again) == table[:3]
    assert not blocks.can_allocate(20, table[:3])
    assert blocks.can_allocate(12, table[:3])
    assert not blocks.can_allocate(12, table[:3], keep_free=1)
    check_blocks(blocks, [other])


def test_the_least_recently_used_prefix_is_reused_first():
    blocks = BlockManager(4, SIZE)
    for number, token in ((1, 1), (2, 2), (3, 1)):
        sequence = sequence_of(number, [token] * 8)
        admit(blocks, sequence)
        blocks.free(sequence)
    newcomer = sequence_of(4, [5] * 8)
    admit(blocks, newcomer)
    assert len(blocks.find_prefix(sequence_of(5, [1] * 9))) >= 1
    assert blocks.find_prefix(sequence_of(6, [2] * 9)) == []


def test_a_full_pool_allocates_as_fast_as_an_empty_one():
    """A queue that remembers what was taken from it took 90 times as long here."""
    blocks = BlockManager(30_000, SIZE)

    def seconds(number: int) -> float:
        sequence = sequence_of(number, [number] * 100 * SIZE)
        start = time.perf_counter()
        blocks.allocate(sequence, len(sequence.token_ids), [])
        taken = time.perf_counter() - start
        sequence.num_computed_tokens = len(sequence.token_ids)
        blocks.register(sequence)
        blocks.free(sequence)
        return taken

    taken = [seconds(number) for number in range(600)]  # full after 300
    assert statistics.median(taken[400:]) < 20 * statistics.median(taken[:200])


def test_invalidated_blocks_are_not_found():
    blocks = BlockManager(8, SIZE)
    first = sequence_of(1, list(range(12)))
    admit(blocks, first)
    blocks.invalidate(first)
    assert blocks.find_prefix(sequence_of(2, list(range(12)))) == []
    blocks.free(first)
    check_blocks(blocks, [])


@pytest.mark.parametrize("damage", ["lost", "twice", "reference"])
def test_check_integrity_sees_damage(damage):
    blocks = BlockManager(8, SIZE)
    first = sequence_of(1, list(range(8)))
    admit(blocks, first)
    match damage:
        case "lost":
            blocks.blank.pop()
        case "twice":
            blocks.blank.append(blocks.blank[0])
        case "reference":
            first.block_table.pop()
            first.capacity -= SIZE
    with pytest.raises(AssertionError):
        check_blocks(blocks, [first])


class Blocks(RuleBasedStateMachine):
    """No block is lost, none is owned twice, and none is found whose contents are another's."""

    @initialize(num_blocks=st.integers(4, 20))
    def start(self, num_blocks):
        self.blocks = BlockManager(num_blocks, SIZE)
        self.live: list[Sequence] = []
        self.count = 0
        # What the device would hold: block → the tokens up to its end.
        self.contents: dict[int, tuple[int, ...]] = {}

    def write(self, sequence: Sequence) -> None:
        for index in range(sequence.num_computed_tokens // SIZE):
            block = sequence.block_table[index]
            self.contents[block] = tuple(sequence.token_ids[: (index + 1) * SIZE])

    @rule(family=st.integers(0, 2), length=st.integers(1, 40), computed=st.booleans())
    def add(self, family, length, computed):
        self.count += 1
        tokens = [(family if i < 10 else family * i) % 5 for i in range(length)]
        sequence = sequence_of(self.count, tokens)
        prefix = self.blocks.find_prefix(sequence)
        assert len(prefix) * SIZE < length
        for index, block in enumerate(prefix):
            assert self.contents[block] == tuple(tokens[: (index + 1) * SIZE])
        if not self.blocks.can_allocate(length, prefix):
            return
        self.blocks.allocate(sequence, length, prefix)
        assert sequence.capacity >= length
        sequence.num_computed_tokens = length if computed else len(prefix) * SIZE
        self.write(sequence)
        self.blocks.register(sequence)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0), token=st.integers(0, 4))
    def decode(self, index, token):
        sequence = self.live[index % len(self.live)]
        sequence.num_computed_tokens = len(sequence.token_ids)
        if sequence.num_computed_tokens == sequence.capacity:
            if self.blocks.num_free == 0:
                return
            self.blocks.append_block(sequence)
        sequence.token_ids.append(token)
        self.write(sequence)
        self.blocks.register(sequence)

    @rule(family=st.integers(0, 2))
    def reset(self, family):
        self.blocks.reset()
        tokens = [(family if i < 10 else family * i) % 5 for i in range(40)]
        assert self.blocks.find_prefix(sequence_of(1 << 20, tokens)) == []

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0), poisoned=st.booleans())
    def end(self, index, poisoned):
        sequence = self.live.pop(index % len(self.live))
        if poisoned:
            self.blocks.invalidate(sequence)
        self.blocks.free(sequence)
        assert sequence.block_table == []

    @invariant()
    def books_agree(self):
        if hasattr(self, "blocks"):
            check_blocks(self.blocks, self.live)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
