"""Hashes of KV blocks for the prefix cache. Pure Python.

The keys and values in a block depend on all tokens up to the block's end, on the images among these
tokens, whose placeholders all have the same id, and on positions. So the hash of a block
covers tokens, images, positions, and the hash of the block before. The hash function is
collision-resistant. Sequences with different salts share no hash.
"""

import numpy as np
from blake3 import blake3

from services.decoder.engine.schedule.sequence import Sequence

_ROOT = b"triptych/kv-block/v1"


def extend_hashes(sequence: Sequence, block_size: int, num_blocks: int) -> None:
    """Extends `sequence.block_hashes` to `num_blocks` blocks, whose token ids must be known."""
    hashes = sequence.block_hashes
    if len(hashes) >= num_blocks:
        return
    first, end_of_all = len(hashes) * block_size, num_blocks * block_size
    parent = hashes[-1] if hashes else blake3(_ROOT + sequence.message.cache_salt).digest()
    positions = _positions(sequence, first, end_of_all, block_size)
    images, first_image = sequence.message.images, 0
    for start in range(first, end_of_all, block_size):
        end = start + block_size
        parts = [parent, sequence.token_ids[start:end].tobytes()]
        while first_image < len(images):
            span = images[first_image]
            if span.offset + span.num_tokens > start:
                break
            first_image += 1
        for span in images[first_image : first_image + block_size]:
            if span.offset >= end:
                break
            parts.append(b"image%d,%d,%d:" % (span.offset - start, span.num_tokens, len(span.key)))
            parts.append(span.key)
        if positions and (own := positions[(start - first) // block_size]):
            parts += (b"positions:", own)
        parent = blake3(b"".join(parts)).digest()
        hashes.append(parent)


def _positions(sequence: Sequence, start: int, end: int, block_size: int) -> list[bytes]:
    """Returns the positions of each block of tokens [start, end), as bytes to hash.

    A block whose positions are the indices of its tokens has empty bytes. All blocks before the
    first image are such blocks, so a text prompt and a prompt with an image share the blocks of
    their common prefix. The list is empty if all blocks are.
    """
    if sequence.positions is None and sequence.message.position_delta == 0:
        return []
    index = np.arange(start, end, dtype=np.int32)[:, None]
    positions = np.repeat(index + np.int32(sequence.message.position_delta), 3, axis=1)
    num_prompt = min(end, sequence.num_prompt_tokens) - start
    if num_prompt > 0:
        given = sequence.positions
        positions[:num_prompt] = (
            index[:num_prompt] if given is None else given[:, start : start + num_prompt].T
        )
    plain = (positions == index).reshape(-1, 3 * block_size).all(axis=1).tolist()
    data = positions.tobytes()
    size = 12 * block_size
    return [b"" if p else data[i * size : (i + 1) * size] for i, p in enumerate(plain)]
