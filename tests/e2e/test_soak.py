"""Requests of all kinds on services with hardly any memory, while some of them are replaced."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import soak
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_requests_of_all_kinds_end_as_they_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest request fits into the caches and into the KV pool, but not beside another."""
    with Cluster(
        tmp_path,
        encoders=2,
        decoders=2,
        encoder={"cache_bytes": 1 << 20},
        decoder={"embedding_cache_bytes": 1 << 20, "kv_cache_bytes": 6_000_000},
    ) as cluster, ThreadPoolExecutor(1) as others:  # fmt: skip

        def replace() -> list[int]:
            time.sleep(6)  # what has most to lose is under way
            codes: list[int] = []
            for service in (cluster.encoders[0], cluster.decoders[0]):
                codes.append(service.terminate())
                service.start()
            return codes

        replaced = others.submit(replace)
        services = (cluster.gateway, cluster.encoders[1], cluster.decoders[1])
        metrics = [f"http://127.0.0.1:{service.metrics_port}/metrics" for service in services]
        words = "--seconds 20 --clients 24 --words 200 --tokens 60 --edge 400 --images 2"
        code = soak.main(["--url", cluster.url, *words.split(), "--metrics", *metrics])
        shown = capsys.readouterr().out
        assert code == 0, shown
        for end in ("answered", "given up", "mistakes: 400"):
            assert end in shown
        assert cluster.decoders[1].metric("decoder_preemptions_total") > 0
        assert replaced.result() == [0, 0]
