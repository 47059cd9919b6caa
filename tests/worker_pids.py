"""The processes of the encoder's pools, which tests count and kill."""

from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.decode_pool import DecodePool


def worker_pids(pool: ClipPool | DecodePool) -> list[int]:
    """In the order in which they were started."""
    if isinstance(pool, DecodePool):
        children = pool._workers
    else:
        children = [slot.child for slot in pool._slots]
    return [child._process.pid for child in children]
