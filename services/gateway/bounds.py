"""Bounds of requests: images, pixels, number of requests. Some are settings of the gateway
(`settings`), the others fit any model. The memory for all requests follows from the pod's memory
(`tenancy.admission`).
"""

from dataclasses import dataclass

# Most bytes of a request's body, unless the gateway's settings give another number.
MAX_BODY_BYTES = 64 << 20
# Seconds in which a body has to begin to arrive.
BODY_START_S = 10.0
# Memory that a byte of a body may take until its request ends: as received, in the parsed strings,
# decoded from base64, in the call to an encoder.
MEMORY_PER_BODY_BYTE = 4
# Memory that a byte of an image or video takes that is not in the request's body: as received, and
# in the call to an encoder.
MEMORY_PER_FETCHED_BYTE = 3
# Memory that a byte of a file takes in a call to an encoder: in the message, and in gRPC.
MEMORY_PER_CALLED_BYTE = 2


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one request's body.

    Attributes:
        max_bytes: most bytes of the body.
        start_s: seconds in which the body has to begin to arrive. Each byte that arrives extends
            the time.
    """

    max_bytes: int = MAX_BODY_BYTES
    start_s: float = BODY_START_S


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one gateway. A request beyond the last bound is a 503, beyond another a 400.

    Attributes:
        max_images_per_request: most images in all messages of a request.
        max_image_bytes: most bytes of one encoded image.
        max_source_pixels: most pixels of one image as sent, width times height.
        max_videos_per_request: most videos in all messages of a request.
        max_video_bytes: most bytes of one file, which the call to an encoder carries whole, or of
            all frames that are given in its place.
        max_video_frames: most sampled frames of all videos of a request.
        max_video_seconds: longest duration of one file.
        max_concurrent_requests: most requests at a time.
        body_start_s: seconds in which a body has to begin to arrive. A later body is a 504.
    """

    max_images_per_request: int = 32
    max_image_bytes: int = 32 << 20
    max_source_pixels: int = 52_000_000
    max_videos_per_request: int = 8
    max_video_bytes: int = 60 << 20
    max_video_frames: int = 768
    max_video_seconds: float = 3600.0
    max_concurrent_requests: int = 1024
    body_start_s: float = BODY_START_S
