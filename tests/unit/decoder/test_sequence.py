"""Sequences, their block hashes, and the tokens of their chunks."""

from typing import Any

import numpy as np

from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.schedule.chunk import Chunk, known_tokens
from services.decoder.engine.schedule.prefix_hash import extend_hashes
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from tests.fake_runner import add_message

KEY, OTHER = b"a" * 32, b"b" * 32


def sequence_of(length: int = 12, **fields: Any) -> Sequence:
    return Sequence(add_message(1, list(range(length)), **fields))


def hashes_of(sequence: Sequence, num_blocks: int = 3) -> list[bytes]:
    extend_hashes(sequence, 4, num_blocks)
    return sequence.block_hashes


def test_a_message_becomes_a_waiting_sequence():
    positions = np.arange(36).reshape(3, 12)
    sequence = sequence_of(positions=positions, delta=-2, stop_token_ids=(7, 9), salt=b"s")
    assert sequence.state is SequenceState.WAITING
    assert sequence.token_ids.tolist() == list(range(12))
    assert sequence.positions is not None and (sequence.positions == positions).all()
    assert sequence.stop_ids == {7, 9}
    assert (sequence.num_generated, sequence.row, sequence.plans_ahead) == (0, -1, True)
    assert not sequence_of(token_masks=True).plans_ahead


def test_the_last_token_is_not_ready_without_its_mask():
    sequence = sequence_of(images=(ImageSpan(KEY, 3, 4),), token_masks=True)
    assert sequence.num_ready_tokens(0) == 3
    sequence.image_offsets[KEY] = 0
    assert sequence.num_ready_tokens(0) == 11 and sequence.awaits_mask
    sequence.token_mask = np.empty(0, np.int32)
    assert sequence.num_ready_tokens(0) == 12


def test_tokens_before_the_first_missing_image_are_ready():
    sequence = sequence_of(images=(ImageSpan(KEY, 3, 4), ImageSpan(OTHER, 8, 2)))
    assert sequence.num_ready_tokens(0) == 3
    assert sequence.num_ready_tokens(5) == 5  # in the middle of a missing image
    assert sequence.num_ready_tokens(7) == 8  # the image before is not needed any more
    sequence.image_offsets[KEY] = 0
    assert sequence.num_ready_tokens(0) == 8
    sequence.image_offsets[OTHER] = 0
    assert sequence.num_ready_tokens(0) == 12


def test_hashes_do_not_depend_on_how_many_are_asked_for_at_once():
    positions = np.arange(12) - np.array([[0], [3], [1]])
    fields = {"images": (ImageSpan(KEY, 2, 5),), "positions": positions, "delta": -3}
    whole = sequence_of(**fields)
    slowly = sequence_of(**fields)
    for sequence in (whole, slowly):
        sequence.token_ids.extend([5, 6, 7, 8])
    for count in (1, 1, 2, 4):
        extend_hashes(slowly, 4, count)
    assert hashes_of(whole, 4) == slowly.block_hashes
    assert len(set(whole.block_hashes)) == 4


def test_completion_and_prompt_hash_alike():
    positions = np.arange(12) - 3 * (np.arange(12) >= 6)
    first = sequence_of(8, positions=np.tile(positions[:8], (3, 1)), delta=-3)
    first.token_ids.extend([8, 9, 10, 11])
    second = sequence_of(12, positions=np.tile(positions, (3, 1)), delta=-3)
    assert hashes_of(first) == hashes_of(second)


def test_positions_that_are_the_index_need_not_be_given():
    assert hashes_of(sequence_of()) == hashes_of(
        sequence_of(positions=np.tile(np.arange(12), (3, 1)))
    )


def test_everything_that_decides_contents_decides_the_hash():
    variants = [
        sequence_of(),
        sequence_of(salt=b"x"),
        sequence_of(images=(ImageSpan(KEY, 1, 2),)),
        sequence_of(images=(ImageSpan(KEY, 1, 3),)),
        sequence_of(images=(ImageSpan(KEY, 0, 3),)),
        sequence_of(images=(ImageSpan(OTHER, 1, 2),)),
        sequence_of(images=(ImageSpan(KEY, 1, 1), ImageSpan(KEY, 2, 1))),
        sequence_of(positions=np.tile(np.arange(12) + 1, (3, 1))),
        sequence_of(positions=np.stack([np.arange(12), np.arange(12), np.zeros(12)])),
    ]
    assert len({hashes_of(v)[0] for v in variants}) == len(variants)
    # A difference stays in all that follows.
    assert len({hashes_of(v)[2] for v in variants}) == len(variants)


def test_an_image_across_a_block_edge_is_in_both_blocks():
    base = sequence_of(images=(ImageSpan(KEY, 2, 4),))
    other = sequence_of(images=(ImageSpan(KEY, 3, 4),))
    same_tail = sequence_of(images=(ImageSpan(KEY, 4, 2),))
    assert hashes_of(base)[0] != hashes_of(other)[0]
    assert hashes_of(base)[1] != hashes_of(same_tail)[1]


def test_decodes_have_the_tokens_and_positions_of_each_chunk_alone() -> None:
    """A token, two drafts of it, and a token behind an image, whose positions are fewer."""
    plain, image = sequence_of(5), sequence_of(9, delta=-4)
    for sequence in (plain, image):
        sequence.token_ids.extend((70, 71))
    drafting = Chunk(plain, 6, 1, False, True, 3, drafts=(80, 81))
    chunks = [*drafting.parts, Chunk(image, 10, 1, False, True)]
    ids, positions = known_tokens(chunks)
    assert ids.tolist() == [71, 80, 81, 71] and positions[0].tolist() == [6, 7, 8, 6]
    for index, chunk in enumerate(chunks):
        alone, places = known_tokens([chunk])
        assert alone.tolist() == [ids[index]]
        assert places.tolist() == positions[:, index : index + 1].tolist()
    piece = Chunk(plain, 2, 1, False, False)  # of a prompt, which is laid out by itself
    mixed_ids, mixed = known_tokens([*chunks, piece])
    assert mixed_ids.tolist() == [*ids, 2] and mixed.tolist() == [[*row, 2] for row in positions]
    assert mixed.dtype == positions.dtype and mixed_ids.dtype == ids.dtype
