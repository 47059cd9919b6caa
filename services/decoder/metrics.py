"""The decoder's metrics, all recorded in its front process, from the engine's messages."""

import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.process.engine_gauges import EngineGauges
from services.common.telemetry import LATENCY_BUCKETS
from services.decoder.engine.messages import EngineStats


class DecoderMetrics:
    """Names and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_rows = 1

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"decoder_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"decoder_{name}_seconds", text, registry=registry, buckets=LATENCY_BUCKETS
            )

        self._create_gauges(registry)
        self._totals = {
            "num_preemptions": counter(
                "preemptions", "Times that a running sequence lost its KV blocks."
            ),
            "num_prompt_tokens": counter("prompt_tokens", "Prompt tokens accepted."),
            "num_prefix_hit_tokens": counter(
                "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
            ),
            "num_steps": counter("engine_steps", "Steps launched."),
            "num_late_masks": counter(
                "late_token_masks", "Token masks that missed their step, which yielded no token."
            ),
            "busy_s": counter("busy_seconds", "Seconds in which a step was in flight."),
        }
        self._seen: dict[str, float] = dict.fromkeys(self._totals, 0)
        self.generated = counter("generated_tokens", "Completion tokens.")
        self.outcomes = counter(
            "sequences", "Sequences ended, by finish reason or error code.", "outcome"
        )
        self.queue = seconds(
            "queue", "Submitted to first scheduled; includes the wait for a first image."
        )
        self.transfer = seconds("transfer", "Submitted to last embedding in the arena.")
        self.prefill = seconds("prefill", "First scheduled to first token.")
        self.ttft = seconds("ttft", "Submitted to first token.")
        self.grammar_compile = seconds(
            "grammar_compile", "Compilation of a grammar that was not in the cache."
        )
        self.token_mask = Histogram(
            "decoder_token_mask_seconds",
            "Token to mask, of all of a process's sequences in a step together.",
            registry=registry, buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.5),
        )  # fmt: skip
        self.fetch = seconds("embedding_fetch", "Fetch of one embedding from an encoder.")
        self._hits = counter(
            "embedding_cache_hits",
            "Embeddings obtained, by tier: memory, redis, encoder, joined (another's fetch).",
            "tier",
        )
        self._misses = counter(
            "embedding_cache_misses", "Embeddings not found, by tier: memory, redis.", "tier"
        )
        self._errors = counter(
            "embedding_fetch_errors",
            "Fetches that failed, by kind: corrupt, unavailable, foreign (not dialled: the encoder "
            "is not one of DECODER_ENCODER_ADDRESSES).",
            "kind",
        )
        self._errors.labels("corrupt")  # 0 from the start: an alert asks for its increase
        self._bytes = counter(
            "embedding_fetch_bytes", "Bytes of embeddings fetched, by path: shm, grpc.", "path"
        )
        self._kernel_calls = counter(
            "kernel_calls", "Kernel calls of the model, replayed ones included.",
            "operation", "implementation",
        )  # fmt: skip
        self._kernel_calls_seen: dict[str, int] = {}

    def _create_gauges(self, registry: CollectorRegistry) -> None:
        self._stats: EngineStats | None = None
        self._reading = threading.Lock()  # scrapes have a thread each
        self._engine = EngineGauges("decoder", registry, self._read_stats)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return self._engine.gauge(name, text, *labels)

        self.running = gauge("sequences_running", "Sequences in the batch, each in a row.")
        self.row_usage = gauge("row_usage_ratio", "Share of the rows that sequences hold.")
        self.waiting = gauge(
            "sequences_waiting",
            "Sequences without a row, by what they wait for: image, engine (a row or KV blocks).",
            "for",
        )
        self._waiting_for_image = self.waiting.labels("image")
        self._waiting_for_engine = self.waiting.labels("engine")
        self.kv_usage = gauge("kv_usage_ratio", "Share of the KV blocks that sequences hold.")
        self.kv_free = gauge("kv_blocks_free", "KV blocks that no sequence holds.")
        self.kv_used = gauge("kv_blocks_used", "KV blocks that sequences hold.")
        self.kv_blocks = gauge("kv_blocks", "KV blocks in all.")
        self.cache_bytes = Gauge(
            "decoder_embedding_cache_bytes", "Bytes of the arena in use.", registry=registry
        )

    def record_kernel_calls(self, calls: dict[str, int]) -> None:
        """Records the engine's totals, by "operation=implementation"."""
        for kernel, total in calls.items():
            operation, _, implementation = kernel.partition("=")
            new = total - self._kernel_calls_seen.get(kernel, 0)
            self._kernel_calls.labels(operation, implementation).inc(new)
            self._kernel_calls_seen[kernel] = total

    def watch_silence(self, silence_s: Callable[[], float]) -> None:
        """Seconds since the engine last showed that it works."""
        self._engine.silence_s = silence_s

    def engine_step(self, stats: EngineStats, num_generated: int) -> None:
        """Records one StepDone."""
        self._stats = stats
        if num_generated:
            self.generated.inc(num_generated)

    def stats(self) -> EngineStats | None:
        """What the engine said last; None while it is silent."""
        return None if self._engine.is_silent else self._stats

    def _read_stats(self) -> None:
        """Sets gauges and totals; at each scrape, because steps are a thousand times as many."""
        with self._reading:
            if (stats := self._stats) is not None:
                self._record(stats)

    def _record(self, stats: EngineStats) -> None:
        used = stats.num_blocks - stats.num_free_blocks
        self.running.set(stats.num_running)
        self.row_usage.set(stats.num_running / self.num_rows)
        self._waiting_for_image.set(stats.num_lacking_images)
        self._waiting_for_engine.set(stats.num_waiting - stats.num_lacking_images)
        self.kv_free.set(stats.num_free_blocks)
        self.kv_used.set(used)
        self.kv_usage.set(used / stats.num_blocks)
        for name, counter in self._totals.items():
            total = getattr(stats, name)
            if total != self._seen[name]:
                counter.inc(total - self._seen[name])
                self._seen[name] = total

    def embedding_found(self, tier: str) -> None:
        """An image came from "memory", "redis", "encoder" or another's fetch, "joined"."""
        self._hits.labels(tier).inc()

    def embedding_missed(self, tier: str) -> None:
        self._misses.labels(tier).inc()

    def embedding_failed(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def embedding_fetched(self, seconds: float, size_bytes: int, path: str) -> None:
        self.fetch.observe(seconds)
        self._bytes.labels(path).inc(size_bytes)
