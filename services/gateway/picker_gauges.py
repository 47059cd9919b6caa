"""Three gauges with vLLM's names, which pickers of the Gateway API's inference extension read.

A picker chooses among the endpoints of an InferencePool. The endpoints may be gateways that each
have decoders of their own. Each gauge covers all decoders of the gateway. The gauges are left out
while no decoder reports its load.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.gateway.clients.decoders import DecoderPool

_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the decoders' batches, under vLLM's name."),
    ("vllm:num_requests_waiting", "Sequences that wait in the decoders, under vLLM's name."),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the decoders' KV blocks that sequences hold, 0 to 1, under vLLM's name.",
    ),
)


class PickerGauges(Collector):
    """Exporter of the gauges.

    Args:
        model_name: name of the served model, which is the gauges' label.
        decoders: decoders whose loads are added up.
    """

    _labelnames = ("model_name",)  # prometheus_client's metrics have this attribute, too.

    def __init__(self, model_name: str, decoders: DecoderPool) -> None:
        self._model_name = model_name
        self._decoders = decoders

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauges with their current values."""
        loads = self._decoders.loads()
        used, blocks = sum(d.num_blocks_used for d in loads), sum(d.num_blocks for d in loads)
        running, waiting = sum(d.num_running for d in loads), sum(d.num_waiting for d in loads)
        values = (running, waiting, used / max(1, blocks))
        for (name, text), value in zip(_GAUGES, values, strict=True):
            family = GaugeMetricFamily(name, text, labels=self._labelnames)
            if loads:
                family.add_metric([self._model_name], value)
            yield family
