"""What requests may take. These are no settings: they fit any model, and what a smaller machine can
bear follows from its memory.
"""

from dataclasses import dataclass

from services.common.process.pod_limits import memory_limit_bytes


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one gateway. Beyond the first three a request is a 400, beyond the others a 503.

    Attributes:
        max_images_per_request: in all its messages.
        max_image_bytes: of one encoded image.
        max_source_pixels: width times height of one image as sent; not above the encoder's.
        max_concurrent_requests: at a time.
        memory_bytes: of the process, which bounds what requests hold; 0: the pod's.
    """

    max_images_per_request: int = 32
    max_image_bytes: int = 20 << 20
    max_source_pixels: int = 40_000_000
    max_concurrent_requests: int = 1024
    memory_bytes: int = 0

    @property
    def process_bytes(self) -> int:
        """Memory of the process."""
        return self.memory_bytes or memory_limit_bytes()
