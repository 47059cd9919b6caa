"""GPU images install what the GPU figures were measured with."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MEASURED = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_gpu_pins_differ_from_the_tested_ones_in_the_measured_versions_alone() -> None:
    tested, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert gpu == tested | MEASURED
    assert all(tested[name] != version for name, version in MEASURED.items())


def test_the_generator_knows_the_same_versions() -> None:
    source = importlib.util.spec_from_file_location("closure", ROOT / "scripts" / "closure.py")
    assert source is not None and source.loader is not None
    closure = importlib.util.module_from_spec(source)
    source.loader.exec_module(closure)
    assert closure.GPU_PINS == MEASURED


@pytest.mark.parametrize("service", ["encoder", "decoder"])
def test_a_gpu_image_takes_the_gpu_pins(service: str) -> None:
    dockerfile = (ROOT / "services" / service / "Dockerfile").read_text()
    assert "constraints-gpu.txt ./" in dockerfile
    assert (
        "-c constraints-gpu.txt" in dockerfile
        or "mv constraints-gpu.txt constraints.txt" in dockerfile
    )
    assert "!constraints-gpu.txt" in (ROOT / ".dockerignore").read_text()
