"""Copies of frames: their values are the frames', and memory is used again but bounded."""

import torch
from torch import Tensor

from services.encoder.decoding.frame_buffers import FrameBuffers


def frame(seed: int, height: int = 4, width: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def test_a_released_copy_is_the_memory_of_the_next_frame_of_its_shape() -> None:
    buffers = FrameBuffers()
    first = buffers.copy(frame(0))
    place = first.data_ptr()
    buffers.release(first)
    assert buffers.idle_bytes == first.nbytes
    other = buffers.copy(frame(1, 6, 4))  # as many bytes, but of another shape
    again = buffers.copy(frame(2))
    assert again.data_ptr() == place != other.data_ptr() and buffers.idle_bytes == 0
    assert torch.equal(again, frame(2)) and torch.equal(other, frame(1, 6, 4))


def test_copies_that_are_not_released_share_no_memory() -> None:
    buffers = FrameBuffers()
    copies = [buffers.copy(frame(seed)) for seed in range(3)]
    assert all(torch.equal(copy, frame(seed)) for seed, copy in enumerate(copies))
    assert len({copy.data_ptr() for copy in copies}) == 3


def test_idle_memory_is_bounded_and_the_oldest_is_freed() -> None:
    size = frame(0).nbytes
    buffers = FrameBuffers(max_idle_bytes=2 * size)
    copies = [buffers.copy(frame(seed)) for seed in range(3)]
    places = [copy.data_ptr() for copy in copies]
    for copy in copies:
        buffers.release(copy)
    assert buffers.idle_bytes == 2 * size
    assert {buffers.copy(frame(seed)).data_ptr() for seed in range(2)} <= set(places[1:])
    buffers.release(buffers.copy(frame(0, 9, 9)))  # alone too large
    assert buffers.idle_bytes == 0


def test_a_strided_frame_is_copied() -> None:
    buffers = FrameBuffers()
    strided = frame(1, 8, 6)[::2]
    for _ in range(2):  # into new memory, and into memory that was released
        copy = buffers.copy(strided)
        assert torch.equal(copy, strided) and copy.is_contiguous()
        buffers.release(copy)
