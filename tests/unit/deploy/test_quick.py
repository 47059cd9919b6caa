"""`make quick`: which tests a change runs."""

import re
import subprocess
from pathlib import Path

import pytest

from scripts import quick

MAKEFILE = Path(__file__).resolve().parents[3] / "Makefile"


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("services/common/process/channel.py", "tests/unit/common"),
        ("services/decoder/engine/engine.py", "tests/unit/decoder"),
        ("services/gateway/static/page.js", "tests/unit/gateway"),
        ("triptych/plan.py", "tests/unit/triptych"),
        ("deploy/k8s/base/decoder.yaml", "tests/unit/deploy"),
        ("benchmarks/simulation/engines.py", "tests/unit/simulation"),
        ("tests/unit/kernels/interpreted_kernels.py", "tests/unit/kernels"),
        ("kernels/gemm/gemv.py", "tests/unit/kernels"),
        ("tests/contract/test_partition.py", "tests/contract/test_partition.py"),
    ],
)
def test_a_changed_file_runs_its_folders_tests(changed: str, test: str) -> None:
    assert test in quick.tests_of([changed])


def test_the_deepest_folder_is_taken(tmp_path) -> None:
    (tmp_path / "tests/unit/decoder/engine").mkdir(parents=True)
    files = ["services/decoder/engine/engine.py", "services/decoder/front/service.py"]
    assert "tests/unit/decoder/engine" in quick.tests_of(files[:1], tmp_path)
    assert "tests/unit/decoder" not in quick.tests_of(files[:1], tmp_path)
    both = quick.tests_of(files, tmp_path)
    assert "tests/unit/decoder" in both
    assert "tests/unit/decoder/engine" not in both  # part of it


@pytest.mark.parametrize(
    "changed", ["README.md", "tests/e2e/test_chaos.py", "tests/gpu/twins.py", "docs/tuning.md"]
)
def test_what_needs_a_stack_or_a_gpu_runs_the_light_tests_alone(changed: str) -> None:
    assert quick.tests_of([changed]) == sorted(quick.LIGHT)


def test_light_tests_and_folders_of_every_service_are_there() -> None:
    for name in quick.LIGHT:
        assert (quick.ROOT / name).is_file(), name
    for service in (quick.ROOT / "services").iterdir():
        if (service / "__main__.py").exists():
            assert f"tests/unit/{service.name}" in quick.tests_of([f"services/{service.name}/x.py"])


def test_only_changed_python_is_styled() -> None:
    commands = quick.commands(["README.md", "triptych/plan.py"])
    assert commands["style"][-1] == "triptych/plan.py"
    assert "README.md" not in commands["style"]
    assert "style" not in quick.commands(["README.md"])


def test_a_heading_of_make_runs_nothing() -> None:
    """A word in backquotes was a command: `make nightly` ran all of `make test`."""
    makefile = MAKEFILE.read_text()
    (say,) = re.findall(r"^say = .*$", makefile, re.MULTILINE)
    headings = re.findall(r"\$\(call say,([^$]*)\)$", makefile, re.MULTILINE)
    assert len(headings) > 5
    for heading in (*headings, "pytest: what `false` has"):
        rule = f"{say}\nall:\n\t$(call say,{heading})\n"
        shown = subprocess.run(
            ["make", "-s", "-f", "-"], input=rule, capture_output=True, text=True, check=True
        ).stdout
        assert shown == f"\n==> {heading}\n"
