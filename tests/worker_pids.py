"""The processes of the encoder's pools, which tests count and kill."""

from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.decode_pool import DecodePool


def worker_pids(pool: ClipPool | DecodePool) -> list[int]:
    """Returns the process ids of a pool's workers."""
    return [worker.pid for worker in pool.workers]
