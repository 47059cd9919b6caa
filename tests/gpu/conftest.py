"""The 2B shape with random weights, loaded once for all tests that drive it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import IDS, ROPE, TEXT_2B, VISION, options
from tests.image_processor import write_image_processor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process compiles each kernel at its first use; several beside each other take minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failure at once, because time on a GPU may end before the summary."""
    if report.failed:
        print(
            f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext[-2000:]}", flush=True
        )


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 2B shape's configuration without weights."""
    made = tmp_path_factory.mktemp("dummy-2b")
    config = IDS | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": TEXT_2B | {"rope_scaling": ROPE, "rope_theta": 5e6},
        "vision_config": VISION,
    }
    (made / "config.json").write_text(json.dumps(config))
    write_image_processor(made, 65536, 1 << 24)
    return made


@pytest.fixture(scope="session")
def dummy(directory: Path) -> Iterator[Harness]:
    """The 2B shape with graphs."""
    with closing(Harness(directory, **options(load_format="dummy"))) as harness:
        yield harness
    torch.cuda.empty_cache()
