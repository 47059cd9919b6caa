"""A gateway sends itself a few requests before it says that it is ready."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from prometheus_client import generate_latest

from services.common.errors import InternalError
from tests.gateway_stack import GatewayStack, LoopThread
from tests.noise import PATIENCE_S


@contextmanager
def stack_of(thread: LoopThread, directory: Path, **settings: object) -> Iterator[GatewayStack]:
    stack = GatewayStack(thread, directory, log_level="ERROR", **settings)
    try:
        yield stack
    finally:
        stack.close()


def wait_until_ready(stack: GatewayStack) -> set[tuple[int, str]]:
    """All answers of `/ready` until the gateway was ready."""
    seen: set[tuple[int, str]] = set()
    deadline = time.monotonic() + PATIENCE_S
    while (200, "ready") not in seen:
        answer = httpx2.get(f"{stack.url}/ready")
        seen.add((answer.status_code, answer.json()["status"]))
        assert time.monotonic() < deadline
    return seen


def test_texts_and_images_reach_the_services_and_no_metric(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, warm_up_rounds=3) as stack:
        wait_until_ready(stack)
        asked = stack.decoder.submits
        assert [len(submit.images) for submit in asked] == [0, 1] * 3
        keys = {request.image_key for request in stack.encoder.requests}
        assert len(keys) == 3, "an image was sent twice: a cache would answer it"
        assert len({bytes(submit.prompt_token_ids) for submit in asked}) == 6
        metrics = generate_latest(stack.gateway.metrics.registry).decode()
        counted = [line for line in metrics.splitlines() if "_requests_total{" in line]
        assert not counted
        assert stack.gateway.admission.num_running == 0


def test_the_gateway_is_not_ready_before(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, warm_up_rounds=50) as stack:
        assert (503, "warming up") in wait_until_ready(stack)


def test_the_path_is_closed_afterwards(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, warm_up_rounds=1, api_keys="secret") as stack:
        wait_until_ready(stack)
        assert len(stack.decoder.submits) == 2  # without a key
        path = stack.gateway.warm_up.path
        assert httpx2.post(f"{stack.url}{path}", json={}).status_code == 404
        assert httpx2.post(f"{stack.url}/warm-up/x", json={}).status_code == 401


def test_no_images_are_sent_if_none_are_served(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, warm_up_rounds=2, max_images_per_request=0) as stack:
        wait_until_ready(stack)
        assert [len(submit.images) for submit in stack.decoder.submits] == [0, 0]


def test_a_failure_changes_nothing(loop_thread, tmp_path) -> None:
    async def fail(_: object) -> None:
        raise InternalError("broken")

    with stack_of(loop_thread, tmp_path, warm_up_rounds=20) as stack:
        stack.decoder.before = fail
        stack.encoder.before = fail
        assert (200, "ready") in wait_until_ready(stack)
        assert stack.decoder.submits, "it failed before it sent anything"
