"""The image key: the one name of an image's embedding, in every process and in Redis.

Two requests share a key only if they must get the same embedding. So the key covers the encoded
bytes and everything else that decides the result. It does not cover decoded pixels, whose bytes are
equal for 30x100 and 100x30, and never a URL or a client's id. Fields are length-prefixed, so that
different lists of fields have different hashes. The encoder's engine makes the prefix, the gateway
the keys, of `KEY_BYTES` each. The encoder computes each key again from what it is given, so that no
caller stores an embedding under another image's key; the decoder only compares them.
"""

from collections.abc import Iterable

from blake3 import blake3

from services.common.geometry import Grid, Unit

KEY_BYTES = 32
# Of a salt, as each service takes it: of image keys here, of prefixes in the decoder.
MAX_SALT_BYTES = 256
_PREFIX_DOMAIN = b"triptych/prefix/v1"
_IMAGE_DOMAIN = b"triptych/v1"
_EMBEDDING_DOMAIN = b"triptych/embedding/v1"
# Bump when the decode of videos, their conversion to RGB or their frames' digests change.
_FRAMES_DOMAIN = b"triptych/frames/v1"
FRAME_DIGEST_BYTES = 16  # as ProbeResponse's

# Bump when decode, orientation, alpha, resize or normalization changes its output.
PREPROCESSING_VERSION = b"exif-transpose/alpha-on-white/bicubic-aa-u8/3"


def key_prefix(*, model: str, weights: bytes, vision_config: bytes, dtype: str) -> bytes:
    """Digest of everything that an encoder contributes to its image keys.

    Args:
        model: model id and revision.
        weights: fingerprint of the vision weights.
        vision_config: canonical JSON of the vision config and image processor settings.
        dtype: compute and storage dtype.
    """
    fields = (model.encode(), weights, vision_config, dtype.encode(), PREPROCESSING_VERSION)
    return _digest(_PREFIX_DOMAIN, fields)


def image_key(prefix: bytes, image: bytes, *, unit: Unit, salt: bytes) -> bytes:
    """The key of one unit of an image. Its grid stands for min and max pixels, which decide nothing
    else; requests with different salts never share an entry.
    """
    return _digest(_IMAGE_DOMAIN, (prefix, b"%d,%d,%d" % unit.grid, salt, image))


def frames_key(prefix: bytes, first: bytes, second: bytes, *, grid: Grid, salt: bytes) -> bytes:
    """The key of a pair of frames. Neither its file nor its place in it is covered: a longer cut of
    a video shares what is equal. Digests are those of frames, as Probe says, or of the images that
    they are, which differ in length.
    """
    return _digest(_FRAMES_DOMAIN, (prefix, b"%d,%d,%d" % grid, salt, first, second))


def embedding_key(prefix: bytes, file: bytes, *, unit: Unit, salt: bytes) -> bytes:
    """The key of an embedding that a client brings; of no image, whatever the file is."""
    return _digest(_EMBEDDING_DOMAIN, (prefix, b"%d,%d,%d" % unit.grid, salt, file))


def still_digest(image: bytes) -> bytes:
    """Of an encoded image that is a frame: 32 bytes."""
    return blake3(image).digest(KEY_BYTES)


def _digest(domain: bytes, fields: Iterable[bytes]) -> bytes:
    hasher = blake3(domain)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest(KEY_BYTES)
