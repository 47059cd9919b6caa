"""The processes of the encoder's pool, which tests count and kill."""

from services.encoder.decoding.media_pool import MediaPool


def worker_pids(pool: MediaPool) -> list[int]:
    """Returns the process ids of a pool's workers, in the order of their start."""
    return [worker.pid for worker in pool.workers]
