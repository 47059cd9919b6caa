"""Timings of one request, and metrics of all requests.

`chat`, `attempts` and `app` record them, and the metrics port exports them. docs/metrics.md has the
table of metrics.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.metrics_registry import new_registry
from services.common.spans import Attribute, span
from services.common.telemetry import LATENCY_BUCKETS

# Upper bounds of numbers of tokens, from a word to the longest contexts.
_LENGTHS = (1, 2, 5, *(base * 10**power for power in range(1, 5) for base in (1, 2, 5)), 1e5, 2e5)


@dataclass(slots=True)
class Timings:
    """Time of each stage of one request. A stage that did not run is absent.

    `fetch` (from URLs of images and videos to bytes and headers) and `tokenize` run in the gateway;
    `encode` is the longest encode call; the decoder measures `queue`, `transfer` and `prefill`;
    `handover` is the time from the loss of a decoder in mid-answer to the next token; `first_token`
    and `total` count from the request's arrival.

    Attributes:
        arrived: time of the request's arrival, in seconds of the monotonic clock.
        seconds: duration of each stage, in seconds.
    """

    arrived: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def since_arrival(self) -> float:
        """Returns the seconds since the request's arrival."""
        return time.monotonic() - self.arrived

    def record(self, stage: str, seconds: float) -> None:
        """Records the duration of a stage. The longest of several durations counts."""
        self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))

    @contextmanager
    def measure(
        self, stage: str, *, span_name: str = "", **attributes: Attribute
    ) -> Generator[None]:
        """Measures the block of a `with`, and records the duration if the block raises no error.

        The block is also a span of the trace.

        Args:
            stage: name of the stage.
            span_name: name of the span. Empty if it is the name of the stage.
            attributes: attributes of the span.
        """
        start = time.monotonic()
        with span(span_name or stage, "", **attributes):
            yield
        self.record(stage, time.monotonic() - start)

    def milliseconds(self) -> dict[str, float]:
        """Returns the duration of each stage in milliseconds."""
        return {stage: round(seconds * 1e3, 3) for stage, seconds in self.seconds.items()}


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own.

    The label `outcome` is a finish reason, an error code of services/common/errors.py, or
    `cancelled`. The label `stage` is a key of `Timings.seconds`.
    """

    def __init__(self) -> None:
        self.registry = new_registry("gateway")
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=LATENCY_BUCKETS)
        self._requests = requests = counter(
            "triptych_gateway_requests", "Chat requests that ended", ["outcome"]
        )
        self._tokens = tokens = counter(
            "triptych_gateway_tokens", "Tokens: prompt, image, cached, completion", ["kind"]
        )
        self.prompt_tokens = tokens.labels("prompt")
        self.image_tokens = tokens.labels("image")
        self.cached_tokens = tokens.labels("cached")
        self.completion_tokens = tokens.labels("completion")
        lengths = partial(Histogram, registry=self.registry, buckets=_LENGTHS)
        self.prompt_length = lengths("triptych_gateway_prompt_tokens", "Tokens of a prompt")
        self.answer_length = lengths(
            "triptych_gateway_answer_tokens", "Tokens of a request's answer, all choices together"
        )
        self.encodes = counter(
            "triptych_gateway_encodes",
            "Encode calls that succeeded, by where the embedding was",
            ["source"],
        )
        self.retries = counter(
            "triptych_gateway_retries", "Retries, by the service that failed", ["service"]
        )
        self.handovers = counter(
            "triptych_gateway_handovers", "Times that another decoder continued an answer"
        )
        self.rejections = counter(
            "triptych_gateway_rejections",
            "Requests refused: the gateway is full or draining",
            ["reason"],
        )
        self.tenant_request, self.used_by_tenant = _tenant_counters(self.registry)
        ignored = counter(
            "triptych_gateway_ignored_fields",
            "Requests with a field that changes no answer and was left out (docs/api.md); other: "
            "a field that the gateway does not know",
            ["field"],
        )
        self.ignored_field = cache(ignored.labels)
        stage = histogram(
            "triptych_gateway_stage_seconds", "Time of a request in a stage", ["stage"]
        )
        # Cached, since looking up the child of a label takes microseconds.
        self.stage = cache(stage.labels)
        self.request_ended = cache(requests.labels)
        self.ttft = histogram("triptych_gateway_ttft_seconds", "Time to first token, from arrival")
        self.tpot = histogram(
            "triptych_gateway_tpot_seconds",
            "Mean time per output token of a request, after its first",
        )
        self.request = histogram("triptych_gateway_request_seconds", "Arrival to end of a request")
        self.peers_refused = counter(
            "triptych_gateway_peers_refused",
            "Health checks that failed because the pod shows no valid certificate (certificate) or "
            "does not accept this gateway's credentials (token)",
            ["reason"],
        )
        self.healthy_pods = gauge(
            "triptych_gateway_healthy_pods", "Pods that accept work", ["service"]
        )
        self.batch_lines, self.batch_lines_running = _batch_metrics(self.registry)
        self.limits_divided = gauge(
            "triptych_gateway_limits_divided_by",
            "Gateways among which tenants' limits are divided: 1 while they are counted together",
        )
        self.running = gauge("triptych_gateway_requests_running", "Requests that hold a slot")

    def num_tokens(self, kind: str) -> float:
        """Returns the number of tokens of a kind so far."""
        (family,) = self._tokens.collect()
        return sum(
            sample.value
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels["kind"] == kind
        )

    def outcomes(self) -> dict[str, float]:
        """Returns the number of requests that have ended, by outcome."""
        (family,) = self._requests.collect()
        return {
            sample.labels["outcome"]: sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }


def _tenant_counters(
    registry: CollectorRegistry,
) -> tuple[Callable[[str, str], Counter], Callable[[str, str], Counter]]:
    """Makes the counters by tenant: requests by tenant and outcome, and usage by tenant and kind.

    The children are cached, since looking one up takes microseconds. Their number is bounded,
    because tenants are those of the key file.
    """
    requests = Counter(
        "triptych_gateway_tenant_requests",
        "Requests that ended, by tenant",
        ["tenant", "outcome"],
        registry=registry,
    )
    usage = Counter(
        "triptych_gateway_tenant_usage",
        "Used by a tenant's requests: prompt_tokens, completion_tokens, images",
        ["tenant", "kind"],
        registry=registry,
    )
    return cache(requests.labels), cache(usage.labels)


def _batch_metrics(registry: CollectorRegistry) -> tuple[Callable[[str], Counter], Gauge]:
    """Makes the metrics of batches: their lines by outcome, and the lines that run."""
    lines = Counter(
        "triptych_gateway_batch_lines",
        "Lines of batches that ended, and calls of lines that are tried again later (retried)",
        ["outcome"],
        registry=registry,
    )
    running = Gauge(
        "triptych_gateway_batch_lines_running", "Lines of batches that run now", registry=registry
    )
    return lines.labels, running
