"""Checks the token ids of a gateway's Submit."""

from collections.abc import Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.decoder.engine.messages import EngineInfo

MAX_STOP_TOKEN_IDS = 1024
INT_BYTES = 4
# Up to this number of ids, a Python loop is faster than the calls of numpy.
_FEW_IDS = 256


def check_ids(name: str, ids: Sequence[int], engine: EngineInfo, most: int | None = None) -> None:
    """Checks a list of token ids, none of which is negative.

    Args:
        name: name of the field, for the error message.
        ids: token ids.
        engine: description of the engine, with the size of the vocabulary.
        most: largest number of ids. None if the number is not limited.

    Raises:
        InvalidRequest: there are too many ids, or an id is not in the vocabulary.
    """
    if most is not None and len(ids) > most:
        raise InvalidRequest(f"{name} has more than {most} entries")
    if ids and max(ids) >= engine.vocab_size:
        raise InvalidRequest(f"{name} has ids outside [0, {engine.vocab_size})")


def count_packed_ids(name: str, data: bytes, engine: EngineInfo) -> int:
    """Checks token ids that are packed as little-endian int32, and returns their number.

    Args:
        name: name of the field, for the error message.
        data: the packed ids.
        engine: description of the engine, with the size of the vocabulary.

    Raises:
        InvalidRequest: the data are no list of int32, or an id is not in the vocabulary.
    """
    if not data:
        return 0
    if len(data) % INT_BYTES:
        raise InvalidRequest(f"{name} is not a list of int32")
    # Read as unsigned integers, negative ids are larger than all ids of the vocabulary.
    few = len(data) <= _FEW_IDS * INT_BYTES
    largest = max(memoryview(data).cast("I")) if few else int(np.frombuffer(data, "<u4").max())
    if largest >= engine.vocab_size:
        raise InvalidRequest(f"{name} has ids outside [0, {engine.vocab_size})")
    return len(data) // INT_BYTES
