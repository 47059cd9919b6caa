"""The benchmark of gateway and stream measures what it says: tokens, times, processes."""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_two_gateways_deliver_every_token_that_the_null_engine_sent() -> None:
    words = "--rates 400 --streams 8 --seconds 2 --tokens 20 --words 5 --clients 2 --gateways 2"
    command = [sys.executable, "-m", "benchmarks.gateway", *words.split()]
    # It compares each answer's tokens with what the engine sent, and ends with 1 otherwise.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"400 tokens/s asked, +(\d+) had .*p50 ([\d.]+)", ended.stdout, re.DOTALL)
    assert found is not None, ended.stdout
    assert 200 < int(found[1]) <= 404
    assert 0 < float(found[2]) < 200
