"""Gateways that are killed while they run a batch: no line is lost, and none is answered twice."""

import signal
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.contract.test_batches import counts, end_of, jsonl, line, results, send
from tests.contract.test_gateway_process import fakes, gateway
from tests.noise import wait_until
from tests.redis_server import RedisServer

__all__ = ["fakes"]
NUM_LINES = 400


@pytest.mark.nightly
def test_killed_gateways_lose_no_line(fakes, tmp_path: Path) -> None:
    """Three gateways in a row run the batch. The first two get SIGKILL in the middle."""
    _, decoder = fakes
    decoder.delay_s = 0.05
    with RedisServer() as server, ExitStack() as stack:
        settings = {
            "GATEWAY_REDIS_URL": server.url,
            "GATEWAY_REPLICAS": "3",
            "GATEWAY_LOG_LEVEL": "ERROR",  # nobody reads the pipe of their logs
        }
        gateways = []
        for number in range(3):
            (tmp_path / str(number)).mkdir()
            gateways.append(stack.enter_context(gateway(fakes, tmp_path / str(number), **settings)))
        clients = [
            stack.enter_context(openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x"))
            for _, http in gateways
        ]
        batch = send(clients[0], jsonl([line(str(n)) for n in range(NUM_LINES)]))
        alive = {0, 1, 2}
        for share in (0.1, 0.4):
            watcher = clients[max(alive)]
            wait_until(
                lambda: counts(watcher, batch.id).completed >= share * NUM_LINES,  # noqa: B023
                "a part of the lines",
            )
            runs = _running(gateways, alive)
            gateways[runs][0].send_signal(signal.SIGKILL)
            gateways[runs][0].wait()
            alive.discard(runs)
        client = clients[min(alive)]
        batch = end_of(client, batch.id)
        assert batch.status == "completed"
        found = results(client, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [str(n) for n in range(NUM_LINES)]
        assert all(each["response"]["status_code"] == 200 for each in found)
        assert batch.error_file_id is None


def _running(gateways, alive: set[int]) -> int:
    """Returns the index of the gateway that runs lines."""
    found: list[int] = []

    def is_running() -> bool:
        for number in alive:
            text = gateways[number][1].get("/metrics").text
            for each in text.splitlines():
                name, _, value = each.rpartition(" ")
                if name.startswith("triptych_gateway_batch_lines_running") and float(value):
                    found.append(number)
                    return True
        return False

    wait_until(is_running, "a gateway runs lines")
    return found[0]
