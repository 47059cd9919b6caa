"""What a URL of a request may lead to, an image or a video, and how each is refused."""

from dataclasses import dataclass

from services.common.errors import InvalidImage, InvalidRequest, InvalidVideo


@dataclass(frozen=True, slots=True)
class Kind:
    """Of media.

    Attributes:
        noun: in errors.
        accept: of the request to an origin.
        error: of bytes that are not such media.
        fetch_s: for lookup, connections, redirects and bytes of a web address together.
    """

    noun: str
    accept: bytes
    error: type[InvalidImage] | type[InvalidVideo]
    fetch_s: float = 10.0

    def too_large(self, max_bytes: int) -> InvalidRequest:
        """The error for more than so many bytes."""
        return self.error(f"the {self.noun} has more than {max_bytes} bytes")


EMBEDDING = Kind("tensor", b"application/octet-stream", InvalidImage)
IMAGE = Kind("image", b"image/*", InvalidImage)
VIDEO = Kind("video", b"video/*", InvalidVideo, fetch_s=30.0)
