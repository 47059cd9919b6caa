"""Embeddings that clients have computed: checked, converted, and stored beside those of images.

The servicer checks that the key covers the file, so that no client's embedding has an image's key.
The tensor of a file has one row per token, with the token's features one after another, as in vLLM.
"""

import asyncio

import numpy as np
import numpy.typing as npt

from services.common.embeddings.embedding import EmbeddingSpec, all_within
from services.common.embeddings.tensor_file import TensorPlace, find_tensor
from services.common.errors import InvalidRequest
from services.common.threads import finished
from services.encoder.front.embeddings import Embeddings, Encoded, Origin

_HALF = 0x7FFF  # half of the last bit of a bfloat16, in bits of a float32


class ClientEmbeddings:
    """Writes clients' embeddings into memory.

    They are not written to Redis. Each request brings the file, from which an embedding costs one
    copy, and files that cost nothing would replace embeddings that were computed.

    Args:
        embeddings: gets the embeddings, and wakes the readers that wait for one.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    async def store(self, key: bytes, file: bytes, spec: EmbeddingSpec) -> Encoded:
        """Makes a client's embedding available here.

        Args:
            key: the embedding's key.
            file: a file of torch.save or safetensors with the tensor.
            spec: the embedding's shape and dtype.

        Raises:
            InvalidRequest: the file has no such tensor.
            Overloaded: no memory was free for too long.
        """
        place = checked(file, spec)
        write = await self._embeddings.store.reserve(key, spec)
        try:
            if write.entry.committed:
                return Encoded(Origin.MEMORY)
            loop = asyncio.get_running_loop()
            arguments = file, place, spec, write.view
            await finished([loop.run_in_executor(None, write_tensor, *arguments)])
            write.commit()
            self._embeddings.announce(key)
            return Encoded(Origin.COMPUTED)
        finally:
            write.release()


def checked(file: bytes, spec: EmbeddingSpec) -> TensorPlace:
    """Returns where the tensor lies in the file, before memory is reserved for the embedding.

    Raises:
        InvalidRequest: the file has no tensor, or its tensor has another shape.
    """
    place = find_tensor(file)
    wanted = spec.num_tokens, spec.num_features * spec.hidden
    if place.shape != wanted:
        raise InvalidRequest(
            f"the tensor has shape {list(place.shape)}; an embedding of this grid and model has "
            f"{list(wanted)}"
        )
    return place


def write_tensor(file: bytes, place: TensorPlace, spec: EmbeddingSpec, into: memoryview) -> None:
    """Writes the tensor of a file as the model's embedding, feature after feature.

    Args:
        file: the file.
        place: the tensor `[num_tokens, num_features * hidden]` in the file, as `checked` found it.
        spec: the embedding `[num_features, num_tokens, hidden]`.
        into: memory for the embedding.

    Raises:
        InvalidRequest: a value is not finite in the model's dtype, or is so large that the language
            model would overflow.
    """
    kind = np.uint16 if place.dtype == "bfloat16" else np.dtype(place.dtype)
    rows = np.frombuffer(file, kind, offset=place.offset).reshape(place.shape)
    size = spec.size_bytes // spec.num_features
    for feature in range(spec.num_features):
        part = rows[:, feature * spec.hidden : (feature + 1) * spec.hidden]
        data = part if place.dtype == spec.dtype else _cast(part, place.dtype, spec.dtype)
        target = into[feature * size : (feature + 1) * size]
        np.frombuffer(target, data.dtype).reshape(part.shape)[:] = data
        if not all_within(target, spec.dtype, spec.max_magnitude):
            raise InvalidRequest(
                f"the tensor has values that are NaN or infinite, or beyond {spec.max_magnitude:g} "
                f"in magnitude: a model that computes in {spec.dtype} would overflow"
            )


def _cast(part: npt.NDArray[np.generic], given: str, dtype: str) -> npt.NDArray[np.generic]:
    """Converts values, rounding half to even as torch does; values out of range become infinite."""
    if given == "bfloat16":
        values = (part.astype(np.uint32) << 16).view(np.float32)
    else:
        values = part.astype(np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32)
    rounded = (bits + (_HALF + ((bits >> 16) & 1))) >> 16
    # The sum of a NaN may overflow to a number.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
