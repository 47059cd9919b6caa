"""The benchmark of one clip over one encoder and two, with the demonstration model. All processes
share the machine's cores, of which there may be two.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_one_encoder_works_for_one_gateway_and_two_for_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "--seconds 12 --height 256 --kinds u60 --images 4 --edge 256 --rounds 1 --cores 0"
    command = [sys.executable, "-m", "benchmarks.two_encoders", "--model", str(DEMO_MODEL)]
    ended = subprocess.run(
        [*command, *words.split(), "--device", "cpu", "--out", str(out)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(out.read_text())
    assert [(a["kind"], a["encoders"]) for a in answers] == [
        ("u60", 1), ("u60", 2), ("images", 1), ("images", 2)
    ]  # fmt: skip
    for answer in answers:
        assert 0 < answer["encode_ms"] < answer["ttft_ms"]
        assert answer["tokens"] > 20
    clip, _, _, divided = (answer["cpu_s"] for answer in answers)
    assert clip[1] < clip[0] / 2  # the gateway of one encoder knows the first
    assert min(divided) > 0
    assert [line.split(",")[0] for line in ended.stdout.splitlines()[-4:]] == [
        "u60 encode", "u60 TTFT", "images encode", "images TTFT"
    ]  # fmt: skip
