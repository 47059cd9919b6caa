"""Embeddings that clients bring: checked, in the model's dtype, where those of images are.

`service` checks that the key covers the file, so that none stands under an image's name. A file's
tensor has a row per token: its features one after another, as vLLM has them.
"""

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from services.common.embeddings.embedding import EmbeddingSpec, all_within
from services.common.embeddings.tensor_file import TensorPlace, find_tensor
from services.common.errors import InvalidRequest
from services.common.threads import finished
from services.encoder.front.embeddings import Encoded, Origin
from services.encoder.front.memory_tier import MemoryTier

_HALF = 0x7FFF  # of the part of a float32 that bfloat16 has no bits for


class BroughtEmbeddings:
    """Puts embeddings of clients into memory.

    Redis gets none of them: each request has the file, from which an embedding costs a copy, and
    files that cost nothing would take the place of embeddings that were computed.

    Args:
        announce: called with the key of one that is there now, for those who wait for it.
    """

    def __init__(self, memory: MemoryTier, announce: Callable[[bytes], None]) -> None:
        self._memory = memory
        self._announce = announce

    async def bring(self, key: bytes, file: bytes, spec: EmbeddingSpec) -> Encoded:
        """Makes an embedding available here.

        Raises:
            InvalidRequest: the file is not such a tensor.
            Overloaded: there was no room for too long.
        """
        place = checked(file, spec)
        entry = await self._memory.reserve(key, spec)
        try:
            if entry.committed:
                return Encoded(Origin.MEMORY)
            self._memory.begin(entry)
            try:
                view = self._memory.arena.view(entry)
                loop = asyncio.get_running_loop()
                await finished([loop.run_in_executor(None, write_tensor, file, place, spec, view)])
            except BaseException:
                self._memory.abort(entry)
                raise
            self._memory.commit(entry)
            self._announce(key)
            return Encoded(Origin.COMPUTED)
        finally:
            self._memory.arena.release(entry)


def checked(file: bytes, spec: EmbeddingSpec) -> TensorPlace:
    """Where the tensor lies. Its size is known to be the embedding's before memory is taken.

    Raises:
        InvalidRequest: the file is none, or its tensor has another shape.
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
    """Writes a file's tensor `[num_tokens, num_features * hidden]`, which `checked` has found, as
    the model's embedding `[num_features, num_tokens, hidden]`, feature after feature.

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
    """Rounded half to even, as torch does; too large ones become infinite."""
    if given == "bfloat16":
        values = (part.astype(np.uint32) << 16).view(np.float32)
    else:
        values = part.astype(np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32)
    rounded = (bits + (_HALF + ((bits >> 16) & 1))) >> 16
    # Of a NaN the sum may overflow to a number.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
