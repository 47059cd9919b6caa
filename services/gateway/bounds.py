"""What requests may take: images, pixels, places; bytes of a body are `json_body`'s. These are no
settings: they fit any model, and what a smaller machine can bear follows from its memory.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one gateway. Beyond the last a request is a 503, beyond the others a 400.

    Attributes:
        max_images_per_request: in all its messages.
        max_image_bytes: of one encoded image.
        max_source_pixels: width times height of one image as sent; not above the encoder's.
        max_videos_per_request: in all its messages.
        max_video_bytes: of one file, which the call to an encoder carries whole, or of all frames
            that are given in its place.
        max_video_frames: that are sampled, of all videos of a request.
        max_video_seconds: of one file.
        max_concurrent_requests: at a time.
    """

    max_images_per_request: int = 32
    max_image_bytes: int = 20 << 20
    max_source_pixels: int = 40_000_000
    max_videos_per_request: int = 8
    max_video_bytes: int = 60 << 20
    max_video_frames: int = 768
    max_video_seconds: float = 3600.0
    max_concurrent_requests: int = 1024
