"""The encoder's metrics. The objects of the front process record them, and the metrics port exports
them. docs/metrics.md has a table of all metrics.
"""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram

from services.common.metrics_registry import new_registry
from services.common.telemetry import LATENCY_BUCKETS
from services.encoder.engine.messages import EngineStats

_BATCH_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCH_PATCHES = tuple(1 << n for n in range(6, 19))
_REMEMBERED = 0.9  # weight of the batches before, with each batch, in the device's speed


class EncoderMetrics:
    """All metrics of one encoder, in their own registry.

    Attributes:
        patch_s: the device's seconds per patch, over the last batches. 0 before the first batch.
    """

    def __init__(self) -> None:
        self.registry = registry = new_registry("encoder")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"triptych_encoder_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"triptych_encoder_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(
                f"triptych_encoder_{name}", text, labels, buckets=buckets, registry=registry
            )

        self.requests = counter(
            "requests",
            "Encode calls answered, by source: computed, memory, redis, joined.",
            "source",
        )
        self.failures = counter(
            "failures", "Calls that failed, by method and error code.", "method", "code"
        )
        self.images_encoded = counter("images_encoded", "Images run through the vision tower.")
        self.patches_encoded = counter("patches_encoded", "Patches run through the vision tower.")
        self.busy_seconds = counter("busy_seconds", "Seconds in which a batch was on the device.")
        self.turns = counter("gpu_turns", "Batches that had a shared GPU in a turn.")
        self.turn_wait_seconds = counter(
            "gpu_turn_wait_seconds", "Seconds of waiting for a turn on a shared GPU."
        )
        self.fetches = counter("fetches", "Embeddings sent to decoders.")
        self.fetched_bytes = counter("fetched_bytes", "Bytes of embeddings sent to decoders.")
        self.shared_fetches = counter(
            "shared_fetches", "Embeddings that a decoder read from shared memory."
        )
        self.hits = counter(
            "embedding_cache_hits",
            "Embeddings obtained, by tier: memory, redis, tower, joined (another encode).",
            "tier",
        )
        self.misses = counter(
            "embedding_cache_misses", "Embeddings not found, by tier: memory, redis.", "tier"
        )
        self.redis_writes_dropped = counter(
            "redis_writes_dropped", "Embeddings not written to Redis."
        )
        self.queue_images = gauge("queue_images", "Images queued or being encoded.")
        self.queue_patches = gauge("queue_patches", "Patches queued or being encoded.")
        self.backlog_seconds = gauge(
            "backlog_seconds",
            "Time to encode what is queued, from the time per patch of the last image.",
        )
        self.cache_bytes = gauge("embedding_cache_bytes", "Bytes of the arena in use.")
        self.batch_images = histogram("batch_images", "Images per batch.", _BATCH_IMAGES)
        self.batch_patches = histogram("batch_patches", "Patches per batch.", _BATCH_PATCHES)
        self.stages = histogram(
            "stage_seconds",
            "Time per image, by stage: lookup, queue, preprocess, forward.",
            LATENCY_BUCKETS,
            "stage",
        )
        self.kernel_calls = counter(
            "kernel_calls",
            "Kernel calls of the vision tower, replayed ones included.",
            "operation",
            "implementation",
        )
        self._last_stats = EngineStats(0, 0)
        self.patch_s = self._recent_s = self._recent_patches = 0.0
        self.silence = gauge(
            "engine_silence_seconds", "Time since the engine last showed that it works."
        )

    def observe_batch(self, stats: EngineStats) -> None:
        """Records a batch.

        Args:
            stats: totals of the engine after the batch.
        """
        last, self._last_stats = self._last_stats, stats
        self.batch_images.observe(stats.num_images - last.num_images)
        self.batch_patches.observe(stats.num_patches - last.num_patches)
        self.busy_seconds.inc(stats.busy_s - last.busy_s)
        self.turns.inc(stats.num_turns - last.num_turns)
        self.turn_wait_seconds.inc(stats.turn_wait_s - last.turn_wait_s)
        new_patches = stats.num_patches - last.num_patches
        self.patches_encoded.inc(new_patches)
        self._recent_s = _REMEMBERED * self._recent_s + stats.busy_s - last.busy_s
        self._recent_patches = _REMEMBERED * self._recent_patches + new_patches
        self.patch_s = self._recent_s / max(self._recent_patches, 1.0)
        for kernel, count in stats.kernel_calls.items():
            operation, _, implementation = kernel.partition("=")
            calls = self.kernel_calls.labels(operation, implementation)
            calls.inc(count - last.kernel_calls.get(kernel, 0))
