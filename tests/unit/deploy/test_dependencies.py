"""No dependency is older than its known faults, and images install what was locked."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from lock import SERVICES, lock_path, pins_of  # noqa: E402  # pyright: ignore

# The least version without the faults that SECURITY.md names.
FLOORS = {
    "grpcio": "1.80", "h11": "0.16", "jinja2": "3.1.6", "pillow": "13.0", "redis": "7",
    "starlette": "1.0.1",
}  # fmt: skip


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for each in lists for text in each]


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ \n]+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", FLOORS)
def test_no_version_with_known_faults_is_allowed(name: str) -> None:
    found = [r for r in requirements() if r.name == name]
    assert found
    for requirement in found:
        least = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
        assert max(least) >= Version(FLOORS[name]), requirement
    assert f"| {name} |" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("name", FLOORS)
def test_nor_is_it_pinned(name: str) -> None:
    locks = [lock_path(service) for service in SERVICES]
    files = [ROOT / "constraints.txt", ROOT / "constraints-gpu.txt", *locks]
    versions = [found[name] for file in files if name in (found := pins(file))]
    assert len(versions) >= 3
    assert all(Version(version) >= Version(FLOORS[name]) for version in versions)


@pytest.mark.parametrize("service", SERVICES)
def test_images_install_the_pinned_versions_by_their_hashes(service: str) -> None:
    text = lock_path(service).read_text()
    assert pins(lock_path(service)) == pins_of(service), "run: make locks"
    entries = re.split(r"\n(?=[a-z0-9])", text.split("\n", 1)[1].strip())
    for entry in entries:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64}){1,2}", entry), entry
    dockerfile = " ".join((ROOT / "services" / service / "Dockerfile").read_text().split())
    assert f"--no-deps --require-hashes \\ -r services/{service}/requirements.lock" in dockerfile


@pytest.mark.parametrize("service", SERVICES)
def test_a_base_image_can_be_pinned(service: str) -> None:
    text = (ROOT / "services" / service / "Dockerfile").read_text()
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    ours = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)) | {"build-${TARGET}"}
    assert bases - ours == {"${PYTHON_IMAGE}"}


def test_the_licence_is_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "!LICENSE" in (ROOT / ".dockerignore").read_text()
    for service in SERVICES:
        assert "LICENSE" in (ROOT / "services" / service / "Dockerfile").read_text()
