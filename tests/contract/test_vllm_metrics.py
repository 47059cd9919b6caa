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


def test_dashboards_made_for_vllm_find_their_metrics(stack: GatewayStack) -> None:
    usage = stack.chat(max_tokens=2).json()["usage"]
    stack.chat(stream=True)
    name = {"model_name": MODEL}

    def read(metric: str, **labels: str) -> float | None:
        return stack.gateway.metrics.registry.get_sample_value(f"vllm:{metric}", name | labels)

    stack.wait(lambda: read("e2e_request_latency_seconds_count") == 2)
    assert read("request_success_total", finished_reason="length") == 1
    assert read("request_success_total", finished_reason="stop") == 1
    assert read("request_success_total", finished_reason="abort") == 0
    assert read("time_to_first_token_seconds_count") == 2
    assert read("inter_token_latency_seconds_count") == 2
    assert read("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    own = stack.metric("triptych_gateway_tokens_total", kind="completion")
    assert read("generation_tokens_total") == own > usage["completion_tokens"]
    assert read("request_prompt_tokens_sum") == 2 * usage["prompt_tokens"]
    assert read("request_generation_tokens_bucket", le="2.0") == 1
    assert read("request_generation_tokens_sum") == own


def test_endpoints_show_build_and_process_and_former_names_but_no_twins(
    stack: GatewayStack,
) -> None:
    stack.chat(max_tokens=2)
    stack.wait(lambda: stack.metric("triptych_gateway_requests_total", outcome="length") == 1)
    with stack.client() as client:
        text = client.get("/metrics").text
    assert 'triptych_build_info{python="' in text and 'service="gateway"' in text
    assert "process_resident_memory_bytes" in text
    for metric in ("triptych_gateway_requests_total", "triptych_gateway_requests_total"):
        assert f'{metric}{{outcome="length"}} 1.0' in text
    assert "\nbuild_info" not in text
    assert "_created" not in text
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if line[:1] != "#"]
    assert len(set(samples)) == len(samples)
