"""Metrics under vLLM's names, for dashboards and pickers that were made for vLLM.

The gauges are read by the pickers of the Gateway API's inference extension. A picker chooses
among the endpoints of an InferencePool. The endpoints may be gateways that each have decoders of
their own. Each gauge covers all decoders of the gateway. The gauges are left out while no decoder
reports its load.

The other metrics are read by the dashboards that vLLM and others publish. They are copies of the
gateway's own metrics.
"""

import time
from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.decoders import DecoderPool
from services.gateway.metrics import GatewayMetrics

_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the decoders' batches, under vLLM's name."),
    ("vllm:num_requests_waiting", "Sequences that wait in the decoders, under vLLM's name."),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the decoders' KV blocks that sequences hold, 0 to 1, under vLLM's name.",
    ),
)
# vLLM's reason for the end of a request, by our outcome. vLLM counts no failed requests.
_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "cancelled": "abort"}


class VllmMetrics(Collector):
    """Exporter of the metrics.

    Args:
        model_name: name of the served model, which is a label of each metric.
        decoders: decoders whose loads are added up.
        metrics: metrics of the gateway.
    """

    _labelnames = ("model_name",)  # prometheus_client's metrics have this attribute, too.

    def __init__(self, model_name: str, decoders: DecoderPool, metrics: GatewayMetrics) -> None:
        self._model_name = model_name
        self._decoders = decoders
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics with their current values."""
        yield from self._gauges()
        metrics = self._metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time to the first token.", metrics.ttft),
            ("inter_token_latency_seconds", "Mean time between a request's tokens.", metrics.tpot),
            ("e2e_request_latency_seconds", "Time from arrival to end.", metrics.request),
            ("request_prompt_tokens", "Tokens of a request's prompt.", metrics.prompt_length),
            ("request_generation_tokens", "Tokens of a request's answer.", metrics.answer_length),
        ):
            yield self._copied(f"vllm:{name}", text, histogram)
        for name, text, kind in (
            ("prompt_tokens", "Tokens of prompts.", "prompt"),
            ("generation_tokens", "Tokens of answers.", "completion"),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=self._labelnames)
            family.add_metric([self._model_name], metrics.num_tokens(kind))
            yield family
        yield self._successes()

    def _gauges(self) -> Iterator[Metric]:
        loads = self._decoders.loads()
        used, blocks = sum(d.num_blocks_used for d in loads), sum(d.num_blocks for d in loads)
        running, waiting = sum(d.num_running for d in loads), sum(d.num_waiting for d in loads)
        values = (running, waiting, used / max(1, blocks))
        for (name, text), value in zip(_GAUGES, values, strict=True):
            family = GaugeMetricFamily(name, text, labels=self._labelnames)
            if loads:
                family.add_metric([self._model_name], value)
            yield family
        yield self._adapters(loads)

    def _adapters(self, loads: list[pb.LoadResponse]) -> Metric:
        """Returns the adapters by name. The value is the time, as vLLM's. All loaded adapters count
        as running, because the pickers' protocol calls so the adapters that are ready for requests.
        Those with sequences that have no token yet count as waiting, too.
        """
        text = "Loaded adapters, those with waiting sequences, and the most that can be loaded."
        labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
        if most := max((load.max_adapters for load in loads), default=0):
            adapters = [adapter for load in loads for adapter in load.adapters]
            loaded = ",".join(dict.fromkeys(each.name for each in adapters))
            waiting = ",".join(dict.fromkeys(each.name for each in adapters if each.num_waiting))
            family.add_metric([self._model_name, str(most), loaded, waiting], time.time())
        return family

    def _copied(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Returns a histogram under another name, with the model's name as its label."""
        (own,) = histogram.collect()
        copy = Metric(name, text, "histogram")
        for sample in own.samples:
            labels = {"model_name": self._model_name, **sample.labels}
            copy.add_sample(name + sample.name.removeprefix(own.name), labels, sample.value)
        return copy

    def _successes(self) -> Metric:
        text = "Requests that ended, by reason."
        labels = ("model_name", "finished_reason")
        family = CounterMetricFamily("vllm:request_success", text, labels=labels)
        counts = dict.fromkeys(_REASONS.values(), 0.0)
        for outcome, count in self._metrics.outcomes().items():
            if outcome in _REASONS:
                counts[_REASONS[outcome]] += count
        for reason, count in counts.items():
            family.add_metric([self._model_name, reason], count)
        return family
