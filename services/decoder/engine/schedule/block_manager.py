"""The block manager: the owners of KV blocks, and the prefix cache. Pure Python.

A block has the keys and values of `block_size` tokens. It is free, or owned by one or more
sequences. A full block whose token ids are known is registered under a hash of the whole prefix up
to its end: token ids, image keys and the tenant's salt. A later prompt with the same prefix finds
the block by this hash and shares it. When the last owner of a registered block ends, the block
becomes free but can still be found, until it is given to another sequence for new contents.

A block is registered as soon as the step that fills it was launched and the ids of its tokens are
known, even if the step still runs. Another sequence that finds the block reads it in a later step,
and the device runs the steps in order, so the contents are there by then. A model for search
registers the blocks of a prompt's chunk when the chunk is planned, so that prompts with the same
prefix share it within one step: each layer stores all keys and values of the step before any token
attends to them.
"""

from collections import OrderedDict

from services.decoder.engine.schedule.host_slots import HostCopies, HostSlots
from services.decoder.engine.schedule.prefix_hash import extend_hashes
from services.decoder.engine.schedule.recurrent_states import NoStates
from services.decoder.engine.schedule.sequence import Sequence


class BlockManager:
    """Owner of the free list, the reference counts and the prefix cache.

    Args:
        num_blocks: number of blocks of the pool, whose ids are 0 .. num_blocks - 1.
        block_size: number of tokens of a block.
        states: checkpoints of recurrent states. With them, a shared prefix has to end at a
            checkpoint. None if the model has no recurrent states.
        num_host_blocks: number of slots for copies of blocks in the host's memory.

    Attributes:
        host: the copies in the host's memory.
        copies: the copies that the next step makes, of blocks and of checkpoints.
        references: number of sequences that own each block, by block id.
        blank: free blocks that are not registered.
        reusable: free blocks that are registered, least recently used first.
        hash_of: hash of each registered block, by block id.
        block_of: id of each registered block, by hash.
        num_registrations: number of registrations so far. As long as it stays the same, no
            sequence can find a longer prefix than before.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        states: NoStates | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states or NoStates()
        self.host = HostSlots(num_host_blocks, num_blocks)
        self.copies = HostCopies(self.host, self.states.host, block_size)
        self.num_registrations = 0
        self.references = [0] * num_blocks
        self.blank = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict and not a dict: after many deletions at its front, a dict takes long to
        # find its first key.
        self.reusable: OrderedDict[int, None] = OrderedDict()
        self.hash_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence owns."""
        return len(self.blank) + len(self.reusable)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the ids of the blocks that have the sequence's longest cached prefix. The id of a
        block that is only in the host's memory is negative (`HostSlots`).

        With recurrent states, the prefix ends at a checkpoint. The sequence's last token is never
        part of the prefix, because it has to be computed so that a next token can be sampled. If
        logprobs of prompt tokens are wanted, the prefix is empty, because all tokens have to be
        computed.
        """
        if sequence.needs_scores:
            return []
        most = (len(sequence.token_ids) - 1) // self.block_size
        prefix: list[int] = []
        while len(prefix) < most:
            if len(prefix) >= len(sequence.block_hashes):
                # Hashes are computed a few at a time, because most prompts have no cached prefix.
                extend_hashes(sequence, self.block_size, min(most, 2 * len(prefix) + 1))
            block_hash = sequence.block_hashes[len(prefix)]
            block = self.block_of.get(block_hash)
            if block is None and (block := self.host.find(block_hash)) is None:
                break
            prefix.append(block)
        while prefix and sequence.block_hashes[len(prefix) - 1] not in self.states:
            prefix.pop()
        return prefix

    def can_allocate(self, num_tokens: int, prefix: list[int], keep_free: int = 0) -> bool:
        """Returns whether there are enough free blocks for a sequence of `num_tokens` tokens that
        shares the blocks `prefix`. At least `keep_free` blocks must then stay free.
        """
        # Blocks of the prefix that no sequence owns are free now, and will not be free afterwards.
        # A block in the host's memory needs a free block, too.
        revived = sum([block < 0 or self.references[block] == 0 for block in prefix])
        needed = self.num_blocks_for(num_tokens) - len(prefix) + revived
        return needed + keep_free <= self.num_free

    def allocate(self, sequence: Sequence, num_tokens: int, prefix: list[int]) -> None:
        """Gives a sequence without blocks the prefix, and new blocks for the rest of `num_tokens`.

        The caller must call `can_allocate` first, and must not give away blocks in between.
        """
        assert not sequence.block_table, "the sequence has blocks already"
        self.host.claim(prefix)
        for block in prefix:
            if block >= 0:
                if self.references[block] == 0:
                    del self.reusable[block]
                self.references[block] += 1
        fresh = [self._take() for _ in range(self.num_blocks_for(num_tokens) - len(prefix))]
        sequence.block_table = [
            block if block >= 0 else self._load(block_hash)
            for block, block_hash in zip(prefix, sequence.block_hashes, strict=False)
        ] + fresh
        sequence.capacity = len(sequence.block_table) * self.block_size
        sequence.num_registered_blocks = len(prefix)

    def append_block(self, sequence: Sequence) -> None:
        """Gives the sequence one more block. Call it only while `num_free` is not 0."""
        sequence.block_table.append(self._take())
        sequence.capacity += self.block_size

    def register(self, sequence: Sequence) -> None:
        """Registers the sequence's blocks that are full, as far as the ids of their tokens are
        known and the steps that compute them were launched.
        """
        known = min(len(sequence.token_ids), sequence.num_computed_tokens)
        num_full = known // self.block_size
        first = sequence.num_registered_blocks
        if num_full <= first:
            return
        extend_hashes(sequence, self.block_size, num_full)
        for index in range(first, num_full):
            block_hash = sequence.block_hashes[index]
            # Only one of several blocks with the same contents is registered: the first one.
            if block_hash not in self.block_of:
                block = sequence.block_table[index]
                self.block_of[block_hash] = block
                self.hash_of[block] = block_hash
                self.num_registrations += 1
        sequence.num_registered_blocks = num_full

    def retract(self, sequence: Sequence, num_tokens: int) -> None:
        """Unregisters the blocks behind `num_tokens` tokens, whose step was not launched."""
        first = num_tokens // self.block_size
        for block in sequence.block_table[first : sequence.num_registered_blocks]:
            self._unregister(block)
        sequence.num_registered_blocks = min(first, sequence.num_registered_blocks)

    def free(self, sequence: Sequence) -> None:
        """Takes the blocks from a sequence. Registered ones can be found until they are reused."""
        # Registered blocks are reused in the order in which they became free. The last block of a
        # sequence is freed first, because a cached block is useless without all blocks before it.
        for block in reversed(sequence.block_table):
            self.references[block] -= 1
            if self.references[block] == 0:
                if (block_hash := self.hash_of.get(block)) is not None:
                    self.reusable[block] = None
                    self.host.offer(block_hash, block)
                else:
                    self.blank.append(block)
        sequence.block_table = []
        sequence.capacity = 0
        sequence.num_registered_blocks = 0
        sequence.num_sent_blocks = 0

    def invalidate(self, sequence: Sequence) -> None:
        """Removes a sequence's blocks and states from the prefix cache: their values are wrong."""
        # If the sequence was preempted since, its blocks are known by their hashes alone.
        by_hash = [self.block_of.get(block_hash, -1) for block_hash in sequence.block_hashes]
        for block in sequence.block_table or by_hash:
            self._unregister(block)
        for block_hash in sequence.block_hashes:
            self.states.drop(block_hash)
            self.host.drop(block_hash)

    def reset(self) -> None:
        """Empties the prefix cache. Sequences keep the blocks that they own."""
        self.host.clear()
        self.states.host.clear()
        for block, block_hash in list(self.hash_of.items()):
            self.states.drop(block_hash)
            self._unregister(block)

    def _take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.reusable.popitem(last=False)
            self.host.save(self.hash_of[block], block)
            self.states.evict(self.hash_of[block])
            self._unregister(block)
        self.references[block] = 1
        return block

    def _load(self, block_hash: bytes) -> int:
        """Takes and registers a block, to which the next step copies a block of the host."""
        block = self._take()
        self.host.load(block_hash, block)
        self.block_of[block_hash], self.hash_of[block] = block, block_hash
        return block

    def _unregister(self, block: int) -> None:
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None:
            del self.block_of[block_hash]
            self.host.offered.pop(block_hash, None)
            if block in self.reusable:
                del self.reusable[block]
                self.blank.append(block)
