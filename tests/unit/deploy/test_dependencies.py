"""No dependency is older than its known faults, and images install what was locked."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from services.gateway.settings import GatewaySettings
from triptych.cli import build_parser

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from closure import GPU_PINS  # noqa: E402  # pyright: ignore
from lock import (  # noqa: E402  # pyright: ignore
    DEV_LOCK,
    GPU_SERVICES,
    SERVE_EXTRAS,
    SERVE_LOCK,
    SERVICES,
    lock_path,
    pins_of,
)

DOCKERFILES = [
    *(ROOT / "services" / service / "Dockerfile" for service in SERVICES),
    ROOT / "deploy" / "Dockerfile",
]
# The least version without the faults that SECURITY.md names.
FLOORS = {
    "av": "18.1", "grpcio": "1.80", "h11": "0.16", "httptools": "0.9", "jinja2": "3.1.6",
    "llguidance": "1.9.1", "pillow": "13.0", "redis": "7", "starlette": "1.0.1",
}  # fmt: skip

ENCODERS_ALONE = ("av",)


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
    assert len(versions) >= (2 if name in ENCODERS_ALONE else 3)
    assert all(Version(version) >= Version(FLOORS[name]) for version in versions)


def check_hashes(lock: str) -> None:
    """Each entry is one version with the hashes of its wheels."""
    for entry in re.split(r"\n(?=[a-z0-9])", lock.split("\n", 1)[1].strip()):
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64}){1,6}", entry), entry


@pytest.mark.parametrize("service", GPU_SERVICES)
def test_gpu_images_install_what_was_measured_by_its_hash(service: str) -> None:
    path = lock_path(service, "requirements-gpu")
    check_hashes(path.read_text())
    locked = pins(path)
    constraints = pins(ROOT / "constraints-gpu.txt")
    assert locked["torch"] == GPU_PINS["torch"] and locked["triton"] == GPU_PINS["triton"]
    assert not locked.keys() & pins(lock_path(service)).keys()
    assert all(constraints.get(name, pin) == pin for name, pin in locked.items())
    wanted = {r.name: r for r in requirements() if r.name == "flashinfer-python"}
    assert service != "decoder" or all(locked[n] in r.specifier for n, r in wanted.items())
    dockerfile = (ROOT / "services" / service / "Dockerfile").read_text()
    assert f"-r services/{service}/requirements-gpu.lock" in dockerfile


def test_development_installs_the_pinned_versions_by_their_hashes() -> None:
    assert pins(DEV_LOCK) == pins_of("dev"), "run: make locks"
    check_hashes(DEV_LOCK.read_text())
    assert "--require-hashes -r $(DEV_LOCK)" in (ROOT / "Makefile").read_text()


def test_the_documents_name_the_ffmpeg_that_reads_strangers_files() -> None:
    av = pytest.importorskip("av")
    ffmpeg = av.ffmpeg_version_info
    assert Version(ffmpeg) >= Version("8.1")
    assert av.__version__ == pins(ROOT / "constraints.txt")["av"]
    assert f"FFmpeg\n{ffmpeg}" in (ROOT / "NOTICE").read_text()
    assert f"(FFmpeg {ffmpeg})" in (ROOT / "SECURITY.md").read_text()


def test_licences_of_others_are_named() -> None:
    """Those that ask for a notice: what is not MIT, BSD, Apache or the like."""
    notice = (ROOT / "NOTICE").read_text()
    for name in ("certifi", "tqdm"):  # MPL-2.0, locked
        assert name in notice
    assert "!NOTICE" in (ROOT / ".dockerignore").read_text()
    for path in DOCKERFILES:
        assert "LICENSE NOTICE" in path.read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_images_install_the_pinned_versions_by_their_hashes(service: str) -> None:
    text = lock_path(service).read_text()
    assert pins(lock_path(service)) == pins_of(service, "tracing"), "run: make locks"
    check_hashes(text)
    dockerfile = " ".join((ROOT / "services" / service / "Dockerfile").read_text().split())
    assert f"--no-deps --require-hashes \\ -r services/{service}/requirements.lock" in dockerfile


def test_the_one_container_installs_the_same_by_hashes() -> None:
    locked = pins(SERVE_LOCK)
    assert locked == pins_of(*SERVE_EXTRAS), "run: make locks"
    check_hashes(SERVE_LOCK.read_text())
    for service in SERVICES:
        assert pins(lock_path(service)).items() <= locked.items()
    for service in GPU_SERVICES:  # one environment holds both services
        gpu = pins(lock_path(service, "requirements-gpu"))
        assert gpu.items() <= pins(lock_path("decoder", "requirements-gpu")).items()
    assert all(locked.get(name, pin) == pin for name, pin in gpu.items())
    text = " ".join((ROOT / "deploy" / "Dockerfile").read_text().split())
    for lock in ("requirements.lock", "requirements-gpu.lock"):
        assert f"--no-deps --require-hashes -r {lock}" in text


def test_what_the_one_container_copies_is_in_its_context() -> None:
    """`.dockerignore` leaves out all that it does not name."""
    names = (ROOT / ".dockerignore").read_text().split()
    allowed = [name[1:] for name in names if name.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKERFILES[-1]).read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert any(f"{name}/".startswith(f"{a}/") or a.startswith(f"{name}/") for a in allowed), (
            name
        )


def test_the_one_container_serves_with_variables_that_exist() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    program, *arguments = json.loads(words)
    assert program == "triptych"
    build_parser().parse_args([*arguments, "Qwen/Qwen3-VL-8B-Instruct"])
    variables = dict(re.findall(r"^ +(GATEWAY_\w+)=(\S+)", text, re.MULTILINE))
    assert len(variables) == 2
    known = {f"GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    assert variables.keys() <= known


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_base_image_is_pinned_and_can_be_another(path: Path) -> None:
    text = path.read_text()
    (default,) = set(re.findall(r"^ARG PYTHON_IMAGE=(\S+)", text, re.MULTILINE))
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", default)
    assert default in (ROOT / "services" / "gateway" / "Dockerfile").read_text()
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    ours = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)) | {"build-${TARGET}"}
    assert bases - ours == {"${PYTHON_IMAGE}"}


def test_an_old_python_is_refused_before_there_is_an_environment_of_it(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 10)\nexec(sys.argv[2])\n"
    )
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "-f", ROOT / "Makefile", ".venv/bin/python", f"PYTHON={old}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.stderr.startswith(f"{old} is too old: make PYTHON=python3.11")
    assert made.returncode == 2 and not (tmp_path / ".venv").exists()


def test_the_licence_is_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE", "NOTICE"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "!LICENSE" in (ROOT / ".dockerignore").read_text()
    for path in DOCKERFILES:
        assert "LICENSE" in path.read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_images_of_engines_have_the_kernels_and_the_gateways_has_not(service: str) -> None:
    text = (ROOT / "services" / service / "Dockerfile").read_text()
    assert ("\nCOPY kernels ./kernels\n" in text) == (service != "gateway")
    assert "\n!kernels\n" in (ROOT / ".dockerignore").read_text()
