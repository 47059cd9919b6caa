"""Image keys, which name an image's embedding in every process and in Redis.

Two requests share a key only if they must get the same embedding. A key therefore covers the bytes
of the encoded image and everything else that decides the result. It covers neither decoded pixels,
whose bytes are equal for images of 30x100 and 100x30, nor a URL or an id of a client. The fields
are length-prefixed, so that different lists of fields have different hashes.

The encoder's engine computes the prefix, and the gateway computes the keys, of `KEY_BYTES` each.
The encoder computes each key again from the image, so that no caller stores an embedding under a
wrong key. The decoder only compares keys.
"""

from collections.abc import Iterable

from blake3 import blake3

from services.common.geometry import Grid, Unit

KEY_BYTES = 32
# Largest size of a salt, both of image keys and of the decoder's prefix cache.
MAX_SALT_BYTES = 256
_PREFIX_DOMAIN = b"triptych/prefix/v1"
_IMAGE_DOMAIN = b"triptych/v1"
_EMBEDDING_DOMAIN = b"triptych/embedding/v1"
# Changes with the decoding of videos, the conversion to RGB or the digests of frames.
_FRAMES_DOMAIN = b"triptych/frames/v1"
FRAME_DIGEST_BYTES = 16  # size of a digest in ProbeResponse

# Changes with the output of decoding, orientation, alpha, resizing or normalization.
PREPROCESSING_VERSION = b"exif-transpose/alpha-on-white/bicubic-aa-u8/3"


def key_prefix(*, model: str, weights: bytes, vision_config: bytes, dtype: str) -> bytes:
    """Returns the digest of everything that an encoder contributes to its image keys.

    Args:
        model: model id and revision.
        weights: fingerprint of the vision weights.
        vision_config: canonical JSON of the vision config and the image processor's settings.
        dtype: data type in which embeddings are computed and stored.
    """
    fields = (model.encode(), weights, vision_config, dtype.encode(), PREPROCESSING_VERSION)
    return _digest(_PREFIX_DOMAIN, fields)


def image_key(prefix: bytes, image: bytes, *, unit: Unit, salt: bytes) -> bytes:
    """Returns the key of one unit of an image.

    Args:
        prefix: the encoder's `key_prefix`.
        image: bytes of the encoded image.
        unit: the unit, whose grid also covers min and max pixels, which decide nothing else.
        salt: salt of the request. Requests with different salts never share an embedding.
    """
    return _digest(_IMAGE_DOMAIN, (prefix, b"%d,%d,%d" % unit.grid, salt, image))


def frames_key(prefix: bytes, first: bytes, second: bytes, *, grid: Grid, salt: bytes) -> bytes:
    """Returns the key of a pair of frames. The key covers neither the file nor the pair's place in
    the file, so that two cuts of a video share their equal pairs.

    Args:
        prefix: the encoder's `key_prefix`.
        first, second: digests of the frames. The digest in a ProbeResponse and the `still_digest`
            of an image have different lengths.
        grid: grid of the pair in patches.
        salt: salt of the request.
    """
    return _digest(_FRAMES_DOMAIN, (prefix, b"%d,%d,%d" % grid, salt, first, second))


def embedding_key(prefix: bytes, file: bytes, *, unit: Unit, salt: bytes) -> bytes:
    """Returns the key of an embedding that a client supplies as a file. It is no image's key."""
    return _digest(_EMBEDDING_DOMAIN, (prefix, b"%d,%d,%d" % unit.grid, salt, file))


def adapted_salt(salt: bytes, adapter: bytes) -> bytes:
    """Returns the salt of keys of images that an adapter's vision tower encodes.

    Args:
        salt: salt of the request.
        adapter: digest of the adapter. Empty for the tower of the base model, which leaves the
            salt as it is.
    """
    return b"adapter" + blake3(adapter + salt).digest() if adapter else salt


def still_digest(image: bytes) -> bytes:
    """Returns the digest, of 32 bytes, of an encoded image that is a frame of a video."""
    return blake3(image).digest(KEY_BYTES)


def _digest(domain: bytes, fields: Iterable[bytes]) -> bytes:
    hasher = blake3(domain)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest(KEY_BYTES)
