"""The core and the extras of docs/architecture.md, and the contract between them."""

import re

from scripts import core_size

MOST_IGNORED = 7  # imports of extras by the core: lower it with each that goes
TEXT = (core_size.ROOT / "docs/architecture.md").read_text()
SECTION = TEXT.partition("## Core and extras\n")[2].partition("\n## ")[0]


def named(row: str) -> set[str]:
    """The modules that a row of the section's table names, as `folder/{a,b}` or `folder/a`."""
    found: set[str] = set()
    for text in re.findall(r"`([^`]+)`", row):
        folder, brace, names = text.partition("{")
        ends = names.rstrip("}").split(",") if brace else [""]
        found |= {f"{folder}{end}".replace("/", ".") for end in ends}
    return found


def test_the_core_that_is_described_is_the_contracts() -> None:
    rows = [line for line in SECTION.splitlines() if line.startswith("| core: ")]
    described = {f"services.{name}" for row in rows for name in named(row.split("|")[2])}
    assert described == set(core_size.contract()["source_modules"])


def test_extras_are_described_as_the_contract_has_them() -> None:
    """Each extra of the contract, which is a comment there, is a row."""
    config = (core_size.ROOT / "pyproject.toml").read_text()
    _, _, text = config.partition(f'name = "{core_size.CONTRACT}"')
    extras = re.findall(
        r"^    # (.+)$", text.partition("forbidden_modules")[2].partition("]")[0], re.M
    )
    assert len(extras) > 10
    rows = {line.split("|")[1].strip() for line in SECTION.splitlines() if line.startswith("| ")}
    assert set(extras) <= rows


def test_imports_of_extras_by_the_core_only_become_fewer() -> None:
    """Each is real: import-linter refuses one that is not there any more."""
    found = core_size.contract()
    assert len(found["ignore_imports"]) == MOST_IGNORED
    assert not [line for line in found["ignore_imports"] if "*" in line]
    assert found.get("unmatched_ignore_imports_alerting", "error") == "error"


def test_the_size_is_that_of_files() -> None:
    modules = core_size.contract()["source_modules"]
    assert len(modules) == len(set(modules))
    assert all(core_size.num_lines(name) >= 0 for name in modules)
    assert core_size.num_lines("services.decoder.engine.scheduler") > 300
