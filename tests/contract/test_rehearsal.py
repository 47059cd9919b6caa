"""A gateway asks a few requests of its own before it says that it is ready."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

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
    """What `/ready` said until then."""
    seen: set[tuple[int, str]] = set()
    deadline = time.monotonic() + PATIENCE_S
    while (200, "ready") not in seen:
        answer = httpx2.get(f"{stack.url}/ready")
        seen.add((answer.status_code, answer.json()["status"]))
        assert time.monotonic() < deadline
    return seen


def test_texts_and_pictures_go_all_the_way_and_count_nowhere(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, rehearsals=3) as stack:
        wait_until_ready(stack)
        asked = stack.decoder.submits
        assert [len(submit.images) for submit in asked] == [0, 1] * 3
        keys = {request.image_key for request in stack.encoder.requests}
        assert len(keys) == 3, "a picture came twice, so a cache would have answered"
        assert len({bytes(submit.prompt_token_ids) for submit in asked}) == 6
        metrics = httpx2.get(f"{stack.url}/metrics").text
        counted = [line for line in metrics.splitlines() if "_requests_total{" in line]
        assert not counted
        assert stack.gateway.admission.num_running == 0


def test_it_is_not_ready_before(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, rehearsals=50) as stack:
        assert (503, "rehearsing") in wait_until_ready(stack)


def test_its_path_is_closed_when_it_is_over(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, rehearsals=1, api_keys="secret") as stack:
        wait_until_ready(stack)
        assert len(stack.decoder.submits) == 2  # without a key
        path = stack.gateway.rehearsal.path
        assert httpx2.post(f"{stack.url}{path}", json={}).status_code == 404
        assert httpx2.post(f"{stack.url}/rehearsal/x", json={}).status_code == 401


def test_where_no_picture_is_served_none_is_asked(loop_thread, tmp_path) -> None:
    with stack_of(loop_thread, tmp_path, rehearsals=2, max_images_per_request=0) as stack:
        wait_until_ready(stack)
        assert [len(submit.images) for submit in stack.decoder.submits] == [0, 0]


def test_a_failure_changes_nothing(loop_thread, tmp_path) -> None:
    async def fail(_: object) -> None:
        raise InternalError("out of tune")

    with stack_of(loop_thread, tmp_path, rehearsals=20) as stack:
        stack.decoder.before = fail
        stack.encoder.before = fail
        assert (200, "ready") in wait_until_ready(stack)
        assert stack.decoder.submits, "it had failed before it asked"
