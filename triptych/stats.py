"""Collects the metrics of all processes for one Prometheus endpoint and for status lines.

`serve` runs both beside the stack. The metrics of a process that does not answer are left out; this
is not an error.
"""

import asyncio
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_PERIOD_S = 10.0
_TIMEOUT_S = 2.0
_STOPPING_PERIOD_S = 1.0


class Scraper(Collector):
    """Reads the metrics endpoints of the processes."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = dict(urls)
        self._threads = ThreadPoolExecutor(max(1, len(urls)), "metrics")

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of all processes, with the process name in the label `process`."""
        merged: dict[str, Metric] = {}
        for process, text in self._threads.map(_fetch, self._urls, self._urls.values()):
            for family in text_string_to_metric_families(text):
                kept = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = sample.labels | {"process": process}
                    kept.samples.append(sample._replace(labels=labels))
        yield from merged.values()

    def sums(self) -> dict[str, float]:
        """Sums the samples of each metric over all processes and labels.

        If a metric has a single label besides `process`, the result also has the sum for each of
        its values, under the key `name{value}`.
        """
        found: dict[str, float] = {}
        for metric in self.collect():
            for sample in metric.samples:
                names = [sample.name]
                own = [value for label, value in sample.labels.items() if label != "process"]
                if len(own) == 1:
                    names.append(f"{sample.name}{{{own[0]}}}")
                for name in names:
                    found[name] = found.get(name, 0.0) + sample.value
        return found


def _fetch(process: str, url: str) -> tuple[str, str]:
    """Reads an endpoint, never through a proxy of the environment. Empty if it fails."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return process, answer.read().decode()
    except (OSError, ValueError, HTTPException):  # the last if a process ends amid its answer
        return process, ""


def serve_metrics(scraper: Scraper, host: str, port: int) -> None:
    """Serves `/metrics` of all processes from a thread.

    Raises:
        OSError: the port is already in use.
    """
    registry = CollectorRegistry()
    registry.register(scraper)
    start_http_server(port, addr=host, registry=registry)


class Reading(NamedTuple):
    """Sums of the metrics at a time of the monotonic clock. A missing sum counts as 0."""

    at: float
    sums: Mapping[str, float]


def line(before: Reading, now: Reading) -> str | None:
    """Status line about the time between two readings. None if no work was done."""
    sums = now.sums

    def gained(name: str) -> float:
        return max(0.0, sums.get(name, 0.0) - before.sums.get(name, 0.0))

    running = sums.get("triptych_decoder_sequences_running", 0.0)
    waiting = sums.get("triptych_decoder_sequences_waiting", 0.0)
    prompt, output = (
        gained("triptych_decoder_prompt_tokens_total"),
        gained("triptych_decoder_generated_tokens_total"),
    )
    if not (running or waiting or prompt or output):
        return None
    seconds = max(1e-9, now.at - before.at)
    parts = [
        f"running {running:.0f}, waiting {waiting:.0f}",
        f"tokens/s in {prompt / seconds:,.1f}, out {output / seconds:,.1f}",
    ]
    if blocks := sums.get("triptych_decoder_kv_blocks"):
        parts.append(f"KV cache {sums.get('triptych_decoder_kv_blocks_used', 0.0) / blocks:.1%}")
    if prompt:
        parts.append(
            f"prefix hits {gained('triptych_decoder_prefix_cache_hit_tokens_total') / prompt:.1%}"
        )
    if images := gained("triptych_gateway_encodes_total"):
        known = 1 - gained("triptych_gateway_encodes_total{computed}") / images
        parts.append(f"images {images:.0f}, cached {known:.1%}")
    if turns := gained("triptych_encoder_gpu_turns_total"):
        encoder_s = gained("triptych_encoder_gpu_turn_wait_seconds_total")
        decoder_s = gained("triptych_decoder_gpu_turn_wait_seconds_total")
        parts.append(f"GPU turns {turns:.0f}, waited {encoder_s:.1f} s, decoder {decoder_s:.1f} s")
    return "; ".join(parts)


async def report_throughput(
    scraper: Scraper, report: Callable[[str], None], period_s: float = _PERIOD_S
) -> None:
    """Reports a status line for each period with work, until cancelled."""

    async def read() -> Reading:
        return Reading(time.monotonic(), await asyncio.to_thread(scraper.sums))

    before = await read()
    while True:
        await asyncio.sleep(period_s)
        now = await read()
        if (text := line(before, now)) is not None:
            report(text)
        before = now


async def report_stopping(scraper: Scraper, report: Callable[[str], None], grace_s: float) -> None:
    """Reports how many requests a stop waits for, until cancelled."""
    deadline = time.monotonic() + grace_s
    before = -1
    while True:
        sums = await asyncio.to_thread(scraper.sums)
        running = round(sums.get("triptych_gateway_requests_running", 0.0))
        left = max(0.0, deadline - time.monotonic())
        if running and running != before:
            what = "1 request is" if running == 1 else f"{running} requests are"
            report(f"stopping: {what} running and will be ended in {left:.1f} s (Ctrl-C: now)")
        elif before < 0 and not running:
            report("stopping")
        before = running
        await asyncio.sleep(_STOPPING_PERIOD_S)
