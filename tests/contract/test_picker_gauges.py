"""What a picker of the inference extension reads on the gateway's metrics port."""

from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from services.common.pb import decoder_pb2 as pb
from tests.gateway_stack import MODEL, GatewayStack

NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture
def stack(loop_thread, tmp_path) -> Iterator[GatewayStack]:
    found = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0, num_decoders=2, log_level="ERROR"
    )
    yield found
    found.close()


def test_gauges_are_over_all_decoders_and_absent_without_news(stack: GatewayStack) -> None:
    registry = stack.gateway.metrics.registry

    def read() -> list[float | None]:
        return [registry.get_sample_value(name, {"model_name": MODEL}) for name in NAMES]

    first, second = stack.decoders
    first.load = pb.LoadResponse(num_running=3, num_waiting=1, num_blocks_used=30, num_blocks=100)
    second.load = pb.LoadResponse(num_running=4, num_blocks_used=90, num_blocks=300)
    stack.wait(lambda: read() == [7, 1, 0.3])
    text = generate_latest(registry).decode()
    for name in NAMES:
        assert f"# TYPE {name} gauge" in text
    first.load = None
    stack.wait(lambda: read() == [4, 0, 0.3])
    second.load = None
    stack.wait(lambda: read() == [None] * 3)
    assert stack.chat(max_tokens=2).status_code == 200
