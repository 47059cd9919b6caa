"""Decodes the file of a unit and resizes its pixels, as the reference image processor does.

The engine's pool of threads calls a `Preprocessor`. Decoders in other processes give the pixels,
and torch resizes them without the interpreter lock. Frames of videos are resized as images are,
which is what the reference video processor does. The device later normalizes the bytes and divides
them into patches.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.errors import InvalidImage, InvalidVideo
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, read_header
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.decode_pool import DecodePool
from services.encoder.decoding.frame_buffers import FrameBuffers
from services.encoder.decoding.source import Source, Video

_MAX_PINNED_BYTES = 16 << 20


@dataclass(frozen=True)
class Preprocessor:
    """Makes the pixels of units. Several threads share it.

    Attributes:
        geometry: the model's rules for the sizes of units.
        image_decoders: processes that decode image files.
        pinned: True if the pixels are stored in pinned memory, except very large ones.
        video_decoders: processes that decode videos. None if the model takes no videos.
        frame_resample: interpolation mode for frames, as torch names it.
        max_source_pixels: most pixels of an image file.
        max_copied_bytes: most bytes of a pair of decoded frames (1080p: 12 MB) that are copied to
            free their decoder early. Larger frames are resized while the decoder is occupied.
    """

    geometry: Geometry
    image_decoders: DecodePool
    pinned: bool
    video_decoders: ClipPool | None = None
    frame_resample: str = "bicubic"
    max_source_pixels: int = MAX_SOURCE_PIXELS
    max_copied_bytes: int = 16 << 20
    _buffers: FrameBuffers = field(default_factory=FrameBuffers)

    def prepare(self, source: Source, unit: Unit) -> Tensor:
        """Decodes and resizes a unit that is made of image files.

        Args:
            source: the image file, or the two image files of a pair of frames.
            unit: the unit, as the gateway computed it from the file's header.

        Returns:
            Contiguous uint8 pixels of the unit's size: `[height, width, 3]`, or
            `[2, height, width, 3]` if the unit is a pair of frames.

        Raises:
            InvalidImage: the file is not a readable image or is too large, or the unit does not
                match the image's size.
        """
        if unit.frames is not None:
            return self._fill_pair(self._decoded_images(source), unit)
        header = read_header(source.image, max_source_pixels=self.max_source_pixels)
        size = header.upright_size
        height, width = self.geometry.size_of(unit)
        if not self.geometry.is_of(unit, size):
            raise InvalidImage(f"an image of {size[0]}x{size[1]} has no grid of {unit.grid}")
        out = self._allocate(height, width, 3)
        with self.image_decoders.decoded(source.image, header) as pixels:
            resized = resize(torch.from_numpy(pixels), height, width, self.geometry.resample)
            return out.copy_(resized)

    def max_decoders(self, video: Video) -> int:
        """Returns how many decoders may have videos of this size open at the same time."""
        return self.video_decoders.max_open(video.size) if self.video_decoders else 1

    def finish_video(self, name: str) -> None:
        """Notes that no unit of a video waits, so that its decoders may take other videos.

        Args:
            name: name of the video's file.
        """
        if self.video_decoders is not None:
            self.video_decoders.finish(name)

    def decode_video(self, video: Video, unit: Unit, lane: int = 0) -> list[Tensor]:
        """Decodes the frames of a unit of a video. The video's decoder is free afterwards.

        Args:
            lane: number of the video's decoder.

        Returns:
            The unit's different frames in order, `[height, width, 3]` uint8 each: two, or one if
            both frames of the unit are the same. They have the video's size, or the unit's size if
            they were too large to be copied.

        Raises:
            InvalidVideo: the frames cannot be decoded, or the model takes no videos.
            VideoNotHeld: the front no longer stores the video's file.
        """
        if self.video_decoders is None or unit.frames is None:
            raise InvalidVideo("this model takes no videos")
        height, width = self.geometry.size_of(unit)
        with self.video_decoders.frames(
            video.file, video.size, unit.frames, lane, video.index
        ) as shared:
            frames = [torch.from_numpy(pixels) for pixels in shared]
            if sum(frame.nbytes for frame in frames) > self.max_copied_bytes:
                frames = [resize(frame, height, width, self.frame_resample) for frame in frames]
            return [self._buffers.copy(frame) for frame in frames]

    def resize_frames(self, frames: list[Tensor], unit: Unit) -> Tensor:
        """Resizes the frames that `decode_video` returned for the unit. Their memory is used for
        other frames afterwards.

        Returns:
            `[2, height, width, 3]` uint8 of the unit's size, contiguous.
        """
        pair = self._fill_pair((frame.numpy() for frame in frames), unit)
        for frame in frames:
            self._buffers.release(frame)
        return pair

    def _decoded_images(self, source: Source) -> Generator[np.ndarray]:
        """Decodes the image files of a pair. Each frame is valid until the next is requested."""
        for data in (source.image, source.second) if source.second else (source.image,):
            header = read_header(data, max_source_pixels=self.max_source_pixels)
            with self.image_decoders.decoded(data, header) as pixels:
                yield pixels

    def _fill_pair(self, frames: Generator[np.ndarray], unit: Unit) -> Tensor:
        height, width = self.geometry.size_of(unit)
        out = self._allocate(2, height, width, 3)
        try:
            for index, pixels in enumerate(frames):
                # A single frame is both frames of the pair.
                out[index:] = resize(torch.from_numpy(pixels), height, width, self.frame_resample)
        finally:
            frames.close()  # frees the decoder of an image if resizing has failed
        return out

    def _allocate(self, *shape: int) -> Tensor:
        pinned = self.pinned and math.prod(shape) <= _MAX_PINNED_BYTES
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)


def resize(pixels: Tensor, height: int, width: int, mode: str = "bicubic") -> Tensor:
    """Resizes an image on the CPU, with antialiasing, as torch does: in two passes, each of which
    rounds to uint8.

    Args:
        pixels: `[H, W, 3]` uint8.
        height: rows of the result.
        width: columns of the result.
        mode: interpolation mode, as torch names it. Bicubic interpolation uses a = -0.5.

    Returns:
        `[height, width, 3]` uint8, possibly strided. `pixels` itself if the size is the same.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = pixels.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, (height, width), mode=mode, antialias=True)
    return resized[0].permute(1, 2, 0)
