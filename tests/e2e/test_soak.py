"""Requests of all kinds on services with hardly any memory. Those that fail under requests of all
kinds are `test_chaos`'s.
"""

from pathlib import Path

import pytest

from benchmarks import soak
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]


def test_requests_of_all_kinds_end_as_they_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest request fits into the caches and into the KV pool, but not beside another."""
    with Cluster(
        tmp_path,
        encoder={"cache_bytes": 1 << 20},
        decoder={"kv_cache_bytes": 6_000_000},
    ) as cluster:
        ports = [service.metrics_port for service in cluster.services]
        metrics = [f"http://127.0.0.1:{port}/metrics" for port in ports]
        words = "--seconds 6 --clients 24 --words 200 --tokens 60 --edge 400 --images 2"
        code = soak.main(["--url", cluster.url, *words.split(), "--metrics", *metrics])
        shown = capsys.readouterr().out
        assert code == 0, shown
        for end in ("answered", "given up", "mistakes: 400"):
            assert end in shown
        assert cluster.decoders[0].metric("triptych_decoder_preemptions_total") > 0
