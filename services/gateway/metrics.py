"""What the gateway counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.telemetry import LATENCY_BUCKETS


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own.

    `outcome` is a finish reason, an error code of services/common/errors.py, or `cancelled`.
    `stage` is one of fetch, tokenize, encode, queue, transfer, prefill, first_token, total.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("gateway_requests", "Chat requests ended", "outcome")
        self.tokens = counter("gateway_tokens", "prompt, image, cached, completion", "kind")
        self.encodes = counter("gateway_encodes", "Good encode calls by source", "source")
        self.retries = counter("gateway_retries", "Attempts after a failure", "service")
        self.rejections = counter("gateway_rejections", "Requests refused as overload", "reason")
        self.stage = histogram("gateway_stage_seconds", "Time in each stage", "stage")
        self.ttft = histogram("gateway_ttft_seconds", "Arrival to first token")
        self.inter_token = histogram("gateway_inter_token_seconds", "Mean time per later token")
        self.request = histogram("gateway_request_seconds", "Arrival to end")
        self.healthy_pods = Gauge(
            "gateway_healthy_pods",
            "Pods that can be given work",
            ["service"],
            registry=self.registry,
        )
        self.running = Gauge(
            "gateway_running_requests", "Requests that hold a slot", registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=LATENCY_BUCKETS, registry=self.registry)
