"""Builds the files of a release from the checked-out commit into build/release.

Everything is built from `git archive`, so that nothing that git does not know gets into a file.
Times of files are that of the commit, so that the same commit gives the same bytes. Nothing is
published.
"""

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.ensure_helm import find_helm

_ROOT = Path(__file__).resolve().parents[1]
_OUTPUT = _ROOT / "build" / "release"
# Dockerfile of each image.
DOCKERFILES = {
    "gateway": "services/gateway/Dockerfile", "encoder": "services/encoder/Dockerfile",
    "decoder": "services/decoder/Dockerfile", "triptych": "deploy/Dockerfile",
}  # fmt: skip
# The versions that were tested: `pip install -c constraints-gpu.txt 'triptych[cuda]'`.
CONSTRAINTS = ("constraints.txt", "constraints-gpu.txt")
LEVEL = 6  # of the archives' compression
_COPY = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)


def main() -> None:
    """Builds everything, and prints the files with their sizes."""
    if _git("status", "--porcelain"):
        sys.exit(
            "release: the checkout is not clean: commit first, or remove what git status names"
        )
    commit, time_s = _git("rev-parse", "HEAD"), int(_git("show", "-s", "--format=%ct", "HEAD"))
    version = project_version(_ROOT)
    notes = release_notes((_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    shutil.rmtree(_OUTPUT, ignore_errors=True)
    _OUTPUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="triptych-release-") as folder:
        source = Path(folder) / "source"
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=_ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
        for name, dockerfile in DOCKERFILES.items():
            target = _OUTPUT / "contexts" / f"{name}.tar.gz"
            write_context(source, dockerfile, target, time_s)
        for name in CONSTRAINTS:
            shutil.copyfile(source / name, _OUTPUT / name)
        _chart(source, time_s)
        _distributions(source, time_s)
    files = sorted(path for path in _OUTPUT.rglob("*") if path.is_file())
    (_OUTPUT / "notes.md").write_text(_with_files(notes, commit, files), encoding="utf-8")
    sums = [f"{_sha256(path)}  {path.relative_to(_OUTPUT)}\n" for path in _files()]
    (_OUTPUT / "SHA256SUMS").write_text("".join(sums))
    for path in _files():
        print(f"{path.stat().st_size:>12,}  {path.relative_to(_ROOT)}")


def project_version(root: Path) -> str:
    """Reads the version of the project at `root`."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def release_notes(changelog: str, version: str) -> str:
    """Returns the section of a release from the changelog.

    Raises:
        SystemExit: the changelog has no such section.
    """
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if found is None:
        sys.exit(f"release: CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    return f"# Triptych {version}\n\n{found[1].strip()}\n"


def context_files(source: Path, dockerfile: str) -> list[Path]:
    """Returns the files that an image's build copies, relative to `source`, without bytecode."""
    found: set[Path] = set()
    for words in _COPY.findall((source / dockerfile).read_text()):
        for word in words.split():
            path = source / word
            found |= {p for p in path.rglob("*") if p.is_file()} if path.is_dir() else {path}
    names = (path.relative_to(source) for path in found)
    return sorted(name for name in names if "__pycache__" not in name.parts)


def write_context(source: Path, dockerfile: str, target: Path, time_s: int) -> None:
    """Writes an image's build context: its Dockerfile at the top, and the files that it copies."""
    members = {str(path): source / path for path in context_files(source, dockerfile)}
    members["Dockerfile"] = source / dockerfile
    target.parent.mkdir(parents=True, exist_ok=True)
    _write_tar(members, target, time_s)


def _write_tar(members: dict[str, Path], target: Path, time_s: int) -> None:
    """Writes a compressed archive whose bytes depend on names, modes and contents alone."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(members):
            info = tarfile.TarInfo(name)
            data = members[name].read_bytes()
            info.size, info.mtime = len(data), time_s
            info.mode = 0o755 if members[name].stat().st_mode & 0o100 else 0o644
            tar.addfile(info, io.BytesIO(data))
    with target.open("wb") as file, gzip.GzipFile("", "wb", LEVEL, file, mtime=time_s) as packed:
        packed.write(content.getvalue())


def _repacked(archive: Path, time_s: int) -> None:
    """Rewrites an archive with the times of the commit, and no owner."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        top = Path(folder)
        members = {str(p.relative_to(top)): p for p in top.rglob("*") if p.is_file()}
        _write_tar(members, archive, time_s)


def _chart(source: Path, time_s: int) -> None:
    helm = find_helm()
    if helm is None:
        sys.exit("release: helm is needed for the chart: install it, and try again")
    folder = _OUTPUT / "chart"
    folder.mkdir()
    _run([helm, "package", "deploy/helm/triptych", "--destination", str(folder)], source, time_s)
    (packed,) = folder.glob("*.tgz")
    _repacked(packed, time_s)


def _distributions(source: Path, time_s: int) -> None:
    """Builds the source distribution, and the wheel from it."""
    code = "import json, sys, setuptools.build_meta as b; print(json.dumps(b.build_{kind}({to!r})))"

    def build(kind: str, folder: Path) -> Path:
        done = _run([sys.executable, "-c", code.format(kind=kind, to=str(_OUTPUT))], folder, time_s)
        return _OUTPUT / json.loads(done.splitlines()[-1])

    packed = build("sdist", source)
    _repacked(packed, time_s)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        build("wheel", unpacked)


def _run(command: Sequence[str], folder: Path, time_s: int) -> str:
    # No package of this checkout is imported instead of those in `folder`.
    words = ["env", "-u", "PYTHONPATH", f"SOURCE_DATE_EPOCH={time_s}", "PYTHONDONTWRITEBYTECODE=1"]
    done = subprocess.run([*words, *command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release: {' '.join(command[:3])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _with_files(notes: str, commit: str, files: Iterable[Path]) -> str:
    rows = [
        f"| `{path.relative_to(_OUTPUT)}` | {path.stat().st_size / 1e6:.1f} MB |" for path in files
    ]
    table = "\n".join(["| file | size |", "|---|--:|", *rows])
    return f"{notes}\nBuilt from commit {commit}.\n\n{table}\n"


def _files() -> list[Path]:
    return sorted(path for path in _OUTPUT.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
