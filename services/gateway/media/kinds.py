"""What a URL of a request may lead to, an image or a video, and how each is refused; and how a pair
of frames is sent.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidImage, InvalidRequest, InvalidVideo


@dataclass(frozen=True, slots=True)
class Kind:
    """Of media.

    Attributes:
        noun: in errors.
        types: that a `data:` URL may declare; the bytes decide.
        listed: the common ones, for errors.
        accept: of the request to an origin.
        error: of bytes that are not such media.
    """

    noun: str
    types: frozenset[str]
    listed: str
    accept: bytes
    error: type[InvalidImage] | type[InvalidVideo]

    def too_large(self, max_bytes: int) -> InvalidRequest:
        """The error for more than so many bytes."""
        return self.error(f"the {self.noun} has more than {max_bytes} bytes")


class SentPair(NamedTuple):
    """What an encode call says of a pair of frames, beside the first still; as EncodeRequest's.

    Attributes:
        second_image: empty: there is none, or it is the first.
        video_digest: of a file that the encoder was sent; empty: the frames are images.
    """

    frames: tuple[int, int]
    second_image: bytes = b""
    video_digest: bytes = b""


_UNKNOWN = ("", "application/octet-stream")
_BINARY = "application/octet-stream"
EMBEDDING = Kind("tensor", frozenset(_UNKNOWN), _BINARY, _BINARY.encode(), InvalidImage)
IMAGE = Kind(
    "image",
    frozenset(
        (*_UNKNOWN, "image/*", "image/gif", "image/jpeg", "image/jpg", "image/png", "image/webp")
    ),
    "image/jpeg, image/png, image/webp, image/gif",
    b"image/*",
    InvalidImage,
)
VIDEO = Kind(
    "video",
    frozenset(
        (
            *_UNKNOWN, "video/*", "video/mp4", "video/webm", "video/quicktime", "video/mpeg",
            "video/x-matroska", "video/matroska", "video/x-msvideo", "video/avi", "video/ogg",
            "video/mp2t", "video/x-ms-wmv", "video/x-ms-asf", "video/x-flv", "video/3gpp",
            "video/x-m4v", "video/mov", "video/mkv",
        )
    ),
    "video/mp4, video/webm, video/quicktime, video/x-matroska, and video/jpeg of frames",
    b"video/*",
    InvalidVideo,
)  # fmt: skip
