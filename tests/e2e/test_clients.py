"""The official Python clients and requests of agents; `make clients` runs more of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serve_command import ServeCommand

pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[1] / "clients"


@pytest.mark.parametrize(
    "client", ["openai", "anthropic", pytest.param("agents", marks=pytest.mark.nightly)]
)
def test_every_part_of_the_client_works(demo: ServeCommand, client: str) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPTS / f"with_{client}.py"],
        env={**os.environ, "TRIPTYCH_URL": demo.url},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    outcomes = json.loads(result.stdout.splitlines()[-1])
    assert {part: found for part, found in outcomes.items() if found != "works"} == {}
