"""The decoder's metrics. The front process records all of them, also from the engine's messages."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.process.engine_process import EngineProcess
from services.common.telemetry import LATENCY_BUCKETS
from services.decoder.engine.messages import DraftTotals, EngineStats

# This time is longer than the period of pings to an idle engine, and longer than the time after
# which an engine that hangs during work is killed.
MAX_SILENCE_S = 30.0
_TOTALS = {
    "num_preemptions": ("preemptions", "Times that a running sequence lost its KV blocks."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens accepted."),
    "num_prefix_hit_tokens": (
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache.",
    ),
    "num_blocks_to_host": ("blocks_to_host", "KV blocks copied to the host's memory."),
    "num_blocks_from_host": ("blocks_from_host", "KV blocks copied back to the KV cache."),
    "num_steps": ("engine_steps", "Steps launched."),
    "num_late_masks": (
        "late_token_masks",
        "Token masks that missed their step, so that the sequence got no token in it.",
    ),
    "busy_s": ("busy_seconds", "Seconds in which a step was in flight."),
    "num_turns": ("gpu_turns", "Turns taken on a GPU that an encoder may share."),
    "turn_wait_s": ("gpu_turn_wait_seconds", "Seconds of waiting for a turn on a shared GPU."),
}


class DecoderMetrics(Collector):
    """The metrics by name. The engine's last report is exported at each scrape rather than at each
    step, because there are about a thousand steps per scrape.

    Args:
        registry: registry of the process.

    Attributes:
        num_rows: number of sequences that can run at once.
        model_name: name of the model, for metrics under vLLM's names.
        engine: the engine process. None if the engine runs inside this process, as in tests.
        kernel_calls: total number of kernel calls, by `operation=implementation`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_rows = 1
        self.model_name = ""
        self.engine: EngineProcess | None = None
        self.kernel_calls: dict[str, int] = {}
        self._stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"triptych_decoder_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"triptych_decoder_{name}_seconds", text, registry=registry, buckets=LATENCY_BUCKETS
            )

        registry.register(self)
        self.cache_bytes = Gauge(
            "triptych_decoder_embedding_cache_bytes",
            "Bytes of the arena in use.",
            registry=registry,
        )
        self.generated = counter("generated_tokens", "Completion tokens.")
        self.outcomes = counter(
            "sequences", "Sequences ended, by finish reason or error code.", "outcome"
        )
        self.queue = seconds(
            "queue",
            "Time from submission to the first scheduled step, with the wait for a first image.",
        )
        self.transfer = seconds(
            "transfer", "Time from submission to the last embedding in the arena."
        )
        self.prefill = seconds("prefill", "Time from the first scheduled step to the first token.")
        self.ttft = seconds("ttft", "Time from submission to the first token.")
        self.grammar_compile = seconds(
            "grammar_compile", "Time to compile a grammar that was not in the cache."
        )
        self.token_mask = Histogram(
            "triptych_decoder_token_mask_seconds",
            "Time to fill the masks of all sequences of a mask process in a step.",
            registry=registry,
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.5),
        )
        self.fetch = seconds("embedding_fetch", "Time to fetch one embedding from an encoder.")
        self.hits = counter(
            "embedding_cache_hits",
            "Embeddings obtained, by tier: memory, redis, encoder, joined (another fetch).",
            "tier",
        )
        self.misses = counter(
            "embedding_cache_misses", "Embeddings not found, by tier: memory, redis.", "tier"
        )
        self.fetch_errors = counter(
            "embedding_fetch_errors",
            "Fetches that failed, by kind: corrupt, unavailable, foreign (not dialled: the encoder "
            "is not one of DECODER_ENCODER_ADDRESSES).",
            "kind",
        )
        self.fetch_errors.labels(
            "corrupt"
        )  # exported as 0 at the start, for an alert on its increase
        self.fetch_bytes = counter(
            "embedding_fetch_bytes", "Bytes of embeddings fetched, by path: shm, grpc.", "path"
        )
        self.fetch_fallbacks = counter(
            "embedding_fetch_fallbacks",
            "Embeddings fetched over gRPC from an encoder of its machine, by cause: memory (the "
            "encoder's memory cannot be read; the log says why).",
            "cause",
        )

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last showed that it works."""
        return 0.0 if self.engine is None else self.engine.silence_s

    def collect(self) -> Iterator[Metric]:
        """Exports the engine's last report. Gauges are left out while the engine is silent, so that
        a hung engine does not look alive.
        """
        silence = "Time since the engine last showed that it works."
        yield GaugeMetricFamily("triptych_decoder_engine_silence_seconds", silence, self.silence_s)
        if (stats := self.stats()) is not None:
            yield from self._state(stats)
        for field, (name, text) in _TOTALS.items():
            yield CounterMetricFamily(f"triptych_decoder_{name}", text, getattr(self._stats, field))
        calls = CounterMetricFamily(
            "triptych_decoder_kernel_calls",
            "Kernel calls of the model, including calls in replayed graphs.",
            labels=["operation", "implementation"],
        )
        for kernel, total in self.kernel_calls.items():
            calls.add_metric(kernel.split("=", 1), total)
        yield calls
        yield from self._drafts(self._stats.drafts or DraftTotals())

    def _drafts(self, totals: DraftTotals) -> Iterator[Metric]:
        """Exports the totals of drafts, under own names and under vLLM's."""
        for name, twin, text, value in (
            ("draft_verifications", "num_drafts", "Chunks with drafts.", totals.num_chunks),
            ("drafted_tokens", "num_draft_tokens", "Drafts verified.", totals.num_drafts),
            ("accepted_drafts", "num_accepted_tokens", "Drafts accepted.", totals.num_accepted),
        ):
            yield CounterMetricFamily(f"triptych_decoder_{name}", text, value)
            yield self._of_vllm(twin, text, {(): value})
        text = "Drafts accepted, by their place behind the sequence's last token."
        at = {(str(place),): count for place, count in enumerate(totals.accepted_at)}
        own = CounterMetricFamily("triptych_decoder_accepted_drafts_at", text, labels=["position"])
        for labels, count in at.items():
            own.add_metric(labels, count)
        yield own
        yield self._of_vllm("num_accepted_tokens_per_pos", text, at, "position")

    def _of_vllm(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        """Returns a counter under vLLM's name."""
        family = CounterMetricFamily(
            f"vllm:spec_decode_{name}", f"{text} Under vLLM's name.", labels=["model_name", *labels]
        )
        for found, value in values.items():
            family.add_metric((self.model_name, *found), value)
        return family

    def _state(self, stats: EngineStats) -> Iterator[Metric]:
        running, used = stats.num_running, stats.num_blocks - stats.num_free_blocks
        rows, usage = running / self.num_rows, used / max(1, stats.num_blocks)
        for name, text, value in (
            ("sequences_running", "Sequences in the batch, each in a row.", running),
            ("row_usage_ratio", "Share of the rows that sequences hold.", rows),
            ("kv_usage_ratio", "Share of the KV blocks that sequences hold.", usage),
            ("kv_blocks_free", "KV blocks that no sequence holds.", stats.num_free_blocks),
            ("kv_blocks_used", "KV blocks that sequences hold.", used),
            ("kv_blocks", "KV blocks in all.", stats.num_blocks),
        ):
            yield GaugeMetricFamily(f"triptych_decoder_{name}", text, value)
        waiting = GaugeMetricFamily(
            "triptych_decoder_sequences_waiting",
            "Sequences without a row, by what they wait for: image, engine (a row or KV blocks).",
            labels=["for"],
        )
        lacking = stats.num_lacking_images
        waiting.add_metric(["image"], lacking)
        waiting.add_metric(["engine"], stats.num_waiting - lacking)
        yield waiting

    def engine_step(self, stats: EngineStats, num_generated: int) -> None:
        """Records a step of the engine.

        Args:
            stats: the engine's report after the step.
            num_generated: number of completion tokens that the step has generated.
        """
        self._stats = stats
        if num_generated:
            self.generated.inc(num_generated)

    def stats(self) -> EngineStats | None:
        """Returns the engine's last report. None if the engine has been silent for too long."""
        return None if self.silence_s > MAX_SILENCE_S else self._stats
