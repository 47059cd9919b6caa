"""Releases: one version everywhere, notes for users, whole build contexts, a safe workflow."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import release
from scripts.ensure_helm import find_helm
from scripts.release import (
    CONSTRAINTS,
    DOCKERFILES,
    context_files,
    project_version,
    release_notes,
    write_context,
)
from tests.unit.deploy.kustomize import LOADER

ROOT = Path(__file__).resolve().parents[3]
VERSION = project_version(ROOT)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text()


def jobs() -> dict[str, Any]:
    return yaml.load(WORKFLOW, LOADER)["jobs"]


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs().values() for step in job["steps"]]


def test_every_tag_of_our_images_is_the_projects_version() -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "deploy").rglob("*"):
        if path.suffix in (".yaml", ".md"):
            text = path.read_text(encoding="utf-8")
            tags = re.findall(r"\btriptych/\w+:(\d+\.\d+\.\d+)", text)
            tags += re.findall(r"\b(?:newTag|tag|appVersion): \"?(\d+\.\d+\.\d+)", text)
            tags += re.findall(r"\b(?:gateway|encoder|decoder):(\d+\.\d+\.\d+)", text)
            found[str(path.relative_to(ROOT))] = set(tags) - {"8.2.10"}  # Redis'
    assert sum(map(bool, found.values())) > 12
    assert {tag for tags in found.values() for tag in tags} == {VERSION}, found


def test_a_release_says_at_most_ten_things_to_its_users() -> None:
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    assert releases and releases[0][0] == VERSION
    assert releases == sorted(releases, key=lambda r: r[1], reverse=True)
    for version, _ in releases:
        notes = release_notes(CHANGELOG, version)
        assert 1 <= len(re.findall(r"^- ", notes, re.MULTILINE)) <= 10
        assert len(notes) < 4000 and notes.startswith(f"# Triptych {version}\n")
    assert CHANGELOG.index("## [Unreleased]") < CHANGELOG.index(f"## [{VERSION}]")
    with pytest.raises(SystemExit, match=r"no section '## \[9\.9\.9\]"):
        release_notes(CHANGELOG, "9.9.9")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_context_has_what_its_dockerfile_copies_and_no_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "context.tar.gz"
    # Compression is the greatest part of the time; a clean checkout's is compared at night.
    monkeypatch.setattr(release, "LEVEL", 0)
    write_context(ROOT, DOCKERFILES[name], target, 1_000_000_000)
    with tarfile.open(target) as tar:
        names = tar.getnames()
        dockerfile = tar.extractfile("Dockerfile")
        assert dockerfile is not None
        text = dockerfile.read().decode()
        assert {m.mtime for m in tar.getmembers()} == {1_000_000_000}
    assert text == (ROOT / DOCKERFILES[name]).read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    sources = [word.removeprefix("./") for line in copied for word in line.split()]
    for source in sources:
        assert any(n == source or n.startswith(f"{source}/") for n in names), source
    for found in set(names) - {"Dockerfile"}:
        assert any(found == s or found.startswith(f"{s}/") for s in sources), found
        assert not found.endswith((".pyc", ".so")) and "__pycache__" not in found
    assert set(map(str, context_files(ROOT, DOCKERFILES[name]))) == set(names) - {"Dockerfile"}


def test_the_workflow_may_do_no_more_than_it_has_to() -> None:
    assert yaml.load(WORKFLOW, LOADER)["permissions"] == {}
    rights = {name: job["permissions"] for name, job in jobs().items()}
    assert rights == {
        "build": {"contents": "read"}, "packages": {"id-token": "write"}, "images": {},
        "release": {"contents": "write"},
    }  # fmt: skip
    # Published is what the tests passed on, after a person allowed it.
    assert jobs()["packages"]["needs"] == jobs()["images"]["needs"] == "build"
    assert all("environment" in jobs()[name] for name in ("packages", "images"))
    for step in steps():
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
        # What an outsider could write into is no part of a shell's text.
        assert "${{" not in step.get("run", "")
    for action in re.findall(r"uses: (.*)", WORKFLOW):
        assert re.search(r" # v\d+\.\d+\.\d+$", action)


def test_the_workflow_names_targets_and_images_that_exist() -> None:
    targets = {
        word for step in steps() for word in re.findall(r"^make (\S+)$", step.get("run", ""), re.M)
    }
    assert targets == {"test", "release", "sbom"}
    assert all(f"\n{target}:" in MAKEFILE for target in targets)
    rows = jobs()["images"]["strategy"]["matrix"]["include"]
    assert {row["image"] for row in rows} == DOCKERFILES.keys()
    tags = [(row["image"], row["tag"]) for row in rows]
    assert len(tags) == len(set(tags))
    for row in rows:
        text = (ROOT / DOCKERFILES[row["image"]]).read_text()
        assert bool(row["target"]) == ("\nARG TARGET" in text)
        assert ("arch" in row) == (row["target"] == "gpu" and "\nARG CUDA_ARCH" in text)
    # The tags that manifests and examples name are made.
    named = {
        (image, tag)
        for path in (ROOT / "deploy").rglob("*.md")
        for image, tag in re.findall(
            rf"docker build -t \S*triptych/(\w+):{re.escape(VERSION)}([\w.-]*)", path.read_text()
        )
    }
    assert len(named) > 5 and named <= set(tags)


@pytest.mark.nightly
@pytest.mark.skipif(find_helm() is None, reason="helm packages the chart")
def test_a_clean_checkout_gives_the_same_files_twice(tmp_path: Path) -> None:
    sums: list[str] = []
    for number in range(2):
        clone = tmp_path / str(number)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        helm = find_helm()
        assert helm is not None
        (clone / "build" / "helm-tool").mkdir(parents=True)
        (clone / "build" / "helm-tool" / "helm").symlink_to(helm)
        done = subprocess.run(
            [sys.executable, "-m", "scripts.release"], cwd=clone, capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(clone)}, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr
        folder = clone / "build" / "release"
        sums.append((folder / "SHA256SUMS").read_text())
        assert {path.name for path in folder.rglob("*") if path.is_file()} == {
            f"triptych-{VERSION}-py3-none-any.whl", f"triptych-{VERSION}.tar.gz",
            f"triptych-{VERSION}.tgz", *(f"{name}.tar.gz" for name in DOCKERFILES), *CONSTRAINTS,
            "notes.md", "SHA256SUMS",
        }  # fmt: skip
        shutil.rmtree(clone)
    assert sums[0] == sums[1]
