"""The kinds of media behind a request's URLs, and their errors."""

from dataclasses import dataclass

from services.common.errors import InvalidImage, InvalidRequest, InvalidVideo


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of media.

    Attributes:
        noun: name of an image, a video or a tensor in errors.
        accept: `Accept` header of the request to an origin.
        error: class of the error for bytes that are not media of this kind.
        fetch_s: seconds for lookup, connections, redirects and bytes of a web address together.
        setting: setting of the most bytes, which errors name. Empty if there is none.
    """

    noun: str
    accept: bytes
    error: type[InvalidImage] | type[InvalidVideo]
    fetch_s: float = 10.0
    setting: str = ""

    def too_large(self, max_bytes: int) -> InvalidRequest:
        """Returns the error for media of more than `max_bytes` bytes."""
        named = f" ({self.setting})" if self.setting else ""
        return self.error(f"the {self.noun} has more than {max_bytes} bytes{named}")


EMBEDDING = Kind("tensor", b"application/octet-stream", InvalidImage)
IMAGE = Kind("image", b"image/*", InvalidImage, setting="GATEWAY_MAX_IMAGE_BYTES")
VIDEO = Kind("video", b"video/*", InvalidVideo, fetch_s=30.0)
