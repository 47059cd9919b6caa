"""Three gauges under vLLM's names, which pickers of the Gateway API's inference extension read.

A picker chooses among the endpoints of an InferencePool, which may be gateways, each with decoders
of its own behind it. Each gauge is over all decoders of the gateway; there are none while no
decoder says what it has to do.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.pb import decoder_pb2 as pb

_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the decoders' batches, under vLLM's name."),
    ("vllm:num_requests_waiting", "Sequences that wait in the decoders, under vLLM's name."),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the decoders' KV blocks that sequences hold, 0 to 1, under vLLM's name.",
    ),
)


class PickerGauges(Collector):
    """Exports the gauges.

    Args:
        loads: of the decoders that say what they have to do.
    """

    _labelnames = ("model_name",)  # as prometheus_client's own metrics have it

    def __init__(self, model_name: str, loads: Callable[[], Sequence[pb.LoadResponse]]) -> None:
        self._model_name = model_name
        self._loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily]:
        loads = self._loads()
        used, blocks = sum(d.num_blocks_used for d in loads), sum(d.num_blocks for d in loads)
        running, waiting = sum(d.num_running for d in loads), sum(d.num_waiting for d in loads)
        values = (running, waiting, used / max(1, blocks))
        for (name, text), value in zip(_GAUGES, values, strict=True):
            family = GaugeMetricFamily(name, text, labels=self._labelnames)
            if loads:
                family.add_metric([self._model_name], value)
            yield family
