"""The encoder's Prometheus metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from services.common.embedding_cache import CacheCounters
from services.common.telemetry import LATENCY_BUCKETS
from services.encoder.engine.messages import EngineStats

_BATCH_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCH_PATCHES = tuple(1 << n for n in range(6, 19))


class EncoderMetrics:
    """All metrics of one encoder, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.images_encoded = Counter(
            "encoder_images_encoded", "Images that ran through the tower", registry=registry
        )
        self.requests = Counter(
            "encoder_requests", "Encode calls answered, by source", ["source"], registry=registry
        )
        self.failures = Counter(
            "encoder_failures", "Calls that failed, by method and code", ["method", "code"],
            registry=registry,
        )  # fmt: skip
        self.fetches = Counter("encoder_fetches", "Embeddings given out", registry=registry)
        self.fetched_bytes = Counter(
            "encoder_fetched_bytes", "Bytes of embeddings given out", registry=registry
        )
        self.shared_fetches = Counter(
            "encoder_shared_fetches", "Of these, those read from shared memory", registry=registry
        )
        self.memory_lookups = Counter(
            "encoder_memory_lookups", "Lookups in the memory tier", ["outcome"], registry=registry
        )
        self.redis_writes_dropped = Counter(
            "encoder_redis_writes_dropped", "Entries not written to Redis", registry=registry
        )
        self.queue_images = Gauge("encoder_queue_images", "Images in work", registry=registry)
        self.queue_patches = Gauge("encoder_queue_patches", "Patches in work", registry=registry)
        self.cache_bytes = Gauge(
            "encoder_cache_used_bytes", "Bytes of the memory tier in use", registry=registry
        )
        self.batch_images = Histogram(
            "encoder_batch_images", "Images per batch", buckets=_BATCH_IMAGES, registry=registry
        )
        self.batch_patches = Histogram(
            "encoder_batch_patches", "Patches per batch", buckets=_BATCH_PATCHES, registry=registry
        )
        self._stages = Histogram(
            "encoder_stage_seconds", "Time per image in each stage", ["stage"],
            buckets=LATENCY_BUCKETS, registry=registry,
        )  # fmt: skip
        self.kernel_calls = Counter(
            "encoder_kernel_calls", "Kernel calls of the tower, replayed ones included",
            ["operation", "implementation"], registry=registry,
        )  # fmt: skip
        self._last_stats = EngineStats(0, 0)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """`stage` is lookup, queue, preprocess or forward."""
        self._stages.labels(stage).observe(seconds)

    def observe_batch(self, stats: EngineStats) -> None:
        """Called after each batch with the engine's totals."""
        last, self._last_stats = self._last_stats, stats
        self.batch_images.observe(stats.num_images - last.num_images)
        self.batch_patches.observe(stats.num_patches - last.num_patches)
        for kernel, count in stats.kernel_calls.items():
            operation, _, implementation = kernel.partition("=")
            calls = self.kernel_calls.labels(operation, implementation)
            calls.inc(count - last.kernel_calls.get(kernel, 0))

    def export_redis(self, counters: CacheCounters) -> None:
        """Exports what the Redis tier counts; read when scraped."""
        self.registry.register(_RedisCollector(counters))


class _RedisCollector:
    def __init__(self, counters: CacheCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        counters = self._counters
        family = CounterMetricFamily(
            "encoder_redis_events", "What happened at the Redis tier", labels=["event"]
        )
        for event in ("hits", "misses", "corrupt", "errors", "skipped", "writes"):
            family.add_metric([event], getattr(counters, event))
        yield family
