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


def test_a_closed_loop_prints_the_requests_a_second_of_one_gateway() -> None:
    words = "--closed 4x2,2x3 --tick 5 --seconds 1 --clients 2 --gateways 1 --gateway-cores 0"
    command = [sys.executable, "-m", "benchmarks.gateway", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"(\d) streams of (\d) tokens: +(\d+) requests/s", ended.stdout)
    assert [row[:2] for row in rows] == [("4", "2"), ("2", "3")], ended.stdout
    assert all(0 < int(rate) < 1000 for *_, rate in rows)
