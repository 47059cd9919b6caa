"""docs/models.md names architectures that are served, and configs that are read are those of the
tests.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.common.families import FAMILIES, read_spec
from services.common.families.keys import unknown_keys

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "fixtures" / "published_configs.json").read_text()
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|--")
]
# Layers and width of the language model and of the tower, as published.
SIZES = {
    "Qwen3-VL-2B": (28, 2048, 24, 1024), "Qwen3-VL-4B": (36, 2560, 24, 1024),
    "Qwen3-VL-8B": (36, 4096, 27, 1152), "Qwen3-VL-32B": (64, 5120, 27, 1152),
    "Qwen3-VL-30B-A3B": (48, 2048, 27, 1152), "Qwen2.5-VL-3B": (36, 2048, 32, 1280),
    "Qwen2.5-VL-7B": (28, 3584, 32, 1280), "PaddleOCR-VL-1.5": (18, 1024, 27, 1152),
}  # fmt: skip


def test_architectures_of_the_page_are_served() -> None:
    named = set(re.findall(r"`(\w+ForConditionalGeneration)`", PAGE))
    assert named and named <= set(FAMILIES)
    seeing = {name for name in FAMILIES if name.endswith("ForConditionalGeneration")}
    assert seeing == named


def test_each_row_says_whether_its_config_was_seen() -> None:
    bodies = [row for row in ROWS if row[0] != "checkpoint"]
    assert len(bodies) > 15
    for row in bodies:
        assert any(re.match("config read|excerpt read|not seen", cell) for cell in row), row


def test_rows_whose_config_is_read_are_those_of_the_fixture() -> None:
    known = [row for row in ROWS if re.search("config read|excerpt read", " ".join(row))]
    read = " ".join(" ".join(row) for row in known)
    for name in CONFIGS:
        family, _, size = name.removesuffix("-1.5").rpartition("-")
        assert family.split("-")[0] in read and size.split("-")[0] in read, name
    assert CONFIGS.keys() == SIZES.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read(name: str, tmp_path: Path) -> None:
    config, vision = CONFIGS[name], CONFIGS[name]["vision_config"]
    is_paddle = name.startswith("PaddleOCR")
    processor = {
        "patch_size": vision["patch_size"], "merge_size": 2,
        "temporal_patch_size": 1 if is_paddle else 2,
        "image_processor_type": f"{'PaddleOCRVL' if is_paddle else 'Qwen2VL'}ImageProcessor",
    }  # fmt: skip
    for file, content in (("config", config), ("preprocessor_config", processor)):
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    spec = read_spec(tmp_path)
    tower = spec.vision_part.tower
    found = spec.text.num_layers, spec.text.hidden_size, tower.depth, tower.hidden_size
    assert found == SIZES[name]
    assert tower.out_hidden_size == spec.text.hidden_size
    assert unknown_keys(tmp_path) == []
