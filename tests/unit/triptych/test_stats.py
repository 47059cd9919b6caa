"""Metrics of all processes on one port, and the line about them."""

import asyncio
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tests.ports import free_port
from triptych.stats import Reading, Scraper, line, report_stopping, report_throughput, serve_metrics


class Process:
    """A process with an endpoint."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter(
            "triptych_decoder_generated_tokens", "Tokens.", registry=self.registry
        )
        self.running = Gauge(
            "triptych_gateway_requests_running", "Requests.", registry=self.registry
        )
        self.encodes = Counter(
            "triptych_gateway_encodes", "Encodes.", ["source"], registry=self.registry
        )
        self.server, self.thread = start_http_server(0, "127.0.0.1", self.registry)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    found = [Process(), Process()]
    yield found
    for process in found:
        process.close()


@pytest.fixture
def scraper(processes: list[Process]) -> Scraper:
    urls = {f"p{index}": process.url for index, process in enumerate(processes)}
    return Scraper(urls | {"dead": "http://127.0.0.1:9/metrics"})


def test_one_endpoint_has_all_processes(processes: list[Process], scraper: Scraper) -> None:
    processes[0].tokens.inc(3)
    processes[1].tokens.inc(4)
    port = free_port()
    serve_metrics(scraper, "127.0.0.1", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'triptych_decoder_generated_tokens_total{process="p0"} 3.0' in text
    assert 'triptych_decoder_generated_tokens_total{process="p1"} 4.0' in text
    assert text.count("# TYPE triptych_decoder_generated_tokens_total counter") == 1
    assert "dead" not in text


def test_sums_are_over_processes_and_labels(processes: list[Process], scraper: Scraper) -> None:
    processes[0].encodes.labels("computed").inc()
    processes[1].encodes.labels("computed").inc()
    processes[1].encodes.labels("memory").inc(2)
    found = scraper.sums()
    assert found["triptych_gateway_encodes_total"] == 4
    assert found["triptych_gateway_encodes_total{computed}"] == 2


def test_the_line_says_what_happened() -> None:
    before = {
        "triptych_decoder_prompt_tokens_total": 100.0,
        "triptych_decoder_generated_tokens_total": 10.0,
    }
    now = {
        "triptych_decoder_prompt_tokens_total": 1100.0,
        "triptych_decoder_generated_tokens_total": 510.0,
        "triptych_decoder_sequences_running": 3.0, "triptych_decoder_sequences_waiting": 1.0,
        "triptych_decoder_kv_blocks": 200.0, "triptych_decoder_kv_blocks_used": 50.0,
        "triptych_decoder_prefix_cache_hit_tokens_total": 250.0,
        "triptych_gateway_encodes_total": 4.0,
        "triptych_gateway_encodes_total{computed}": 1.0,
    }  # fmt: skip
    assert line(Reading(5.0, before), Reading(15.0, now)) == (
        "running 3, waiting 1; tokens/s in 100.0, out 50.0; KV cache 25.0%; prefix hits 25.0%; "
        "images 4, cached 75.0%"
    )
    assert line(Reading(5.0, now), Reading(15.0, now | {"triptych_decoder_sequences_running": 0.0,
                "triptych_decoder_sequences_waiting": 0.0})) is None  # fmt: skip
    turns = {
        "triptych_encoder_gpu_turns_total": 28.0,
        "triptych_encoder_gpu_turn_wait_seconds_total": 0.5,
        "triptych_decoder_gpu_turn_wait_seconds_total": 2.1,
    }
    text = line(Reading(5.0, now), Reading(15.0, now | turns))
    assert text is not None and text.endswith("; GPU turns 28, waited 0.5 s, decoder 2.1 s")
    # A process that has just been away does not count as work undone.
    assert line(Reading(5.0, now), Reading(15.0, {})) is None


async def test_a_line_comes_for_each_period_with_work(
    processes: list[Process], scraper: Scraper
) -> None:
    lines: list[str] = []
    reporting = asyncio.create_task(report_throughput(scraper, lines.append, 0.01))
    while not lines:
        processes[0].tokens.inc(5)
        await asyncio.sleep(0.01)
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    assert lines[0].startswith("running 0, waiting 0; tokens/s in 0.0, out ")


@pytest.mark.parametrize(
    ("running", "said"),
    [
        (0, "stopping"),
        (1, "stopping: 1 request is running"),
        (3, "stopping: 3 requests are running"),
    ],
)
async def test_a_stop_says_what_it_waits_for(
    processes: list[Process], scraper: Scraper, running: int, said: str
) -> None:
    processes[0].running.set(running)
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stopping = asyncio.create_task(report_stopping(scraper, first.set_result, 9.0))
    text = await first
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert text.startswith(said)
    assert ("will be ended in" in text) == bool(running)
