"""The wheel as a stranger installs it: one top-level name, and it serves from anywhere."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.light_environment import fill
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
_SOURCES = ("triptych", "services", "kernels", "demo", "benchmarks")
_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in _SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in _FILES:
        shutil.copy(ROOT / name, copy / name)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *words, "-w", "dist", "."], cwd=copy, check=True)
    (found,) = (copy / "dist").glob("*.whl")
    return found


def install(wheel: Path, environment: Path) -> Path:
    """Makes an environment with the wheel and nothing else, and returns its programs' folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    words = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *words, str(wheel)], check=True)
    return python.parent


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and, from this one, what it needs."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    programs = install(wheel, environment)
    (site,) = (environment / "lib").glob("python3*/site-packages")
    # Packages alone: what a file of paths names there, such as this checkout, is not followed.
    (site / "needs.pth").write_text(sysconfig.get_path("purelib"))
    return programs


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment as `pip install triptych` makes it, without extras."""
    environment = tmp_path_factory.mktemp("bare") / "venv"
    programs = install(wheel, environment)
    fill(environment, [Requirement(text) for text in PROJECT["dependencies"]])
    return programs


def test_it_installs_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"triptych", f"triptych-{VERSION}.dist-info"}
    inside = {name.removeprefix("triptych/_packages/") for name in names}
    assert {
        "services/gateway/static/index.html", "services/common/pb/decoder_pb2.py",
        "kernels/launches.py",
        "demo/model/model.safetensors", "demo/samples/samples.json", "benchmarks/words.txt",
    } <= inside  # fmt: skip
    assert not any(name.startswith(("tests/", "scripts/")) for name in inside)


def test_every_command_works_bare_or_names_its_extra(bare: Path, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [bare / "triptych", *words], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout

    assert run("--version") == (0, f"triptych {VERSION}\n")
    status, text = run("--help")
    commands = set(re.findall(r"^    (\w+) ", text, re.MULTILINE))
    nowhere = ("--url", "http://127.0.0.1:9")
    for command, words, status, part in (
        ("ask", (*nowhere, "hello"), 1, "is `triptych serve` running?"),
        ("chat", nowhere, 1, "is `triptych serve` running?"),
        ("key", ("me",), 0, "key, shown once: sk-"),
        ("serve", (), 2, "pip install 'triptych[all]'"),
        ("demo", (), 2, "pip install 'triptych[all]'"),
        ("bench", (), 2, "pip install 'triptych[bench]'"),
        ("compile", (), 2, "pip install 'triptych[cuda]'"),
    ):
        found, text = run(command, *words)
        assert found == status and part in text, (command, text)
        commands.remove(command)
    assert not commands


@pytest.mark.nightly
def test_it_serves_from_a_directory_with_another_services(installed: Path, tmp_path: Path) -> None:
    for name in ("services", "kernels", "benchmarks", "demo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger')")
    environment = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        return subprocess.run(
            [installed / "triptych", *words], cwd=tmp_path, env=environment, check=True,
            capture_output=True, text=True, timeout=PATIENCE_S,
        ).stdout  # fmt: skip

    assert run("--version") == f"triptych {VERSION}\n"
    assert "text_c256" in run("bench", "--help")
    with (tmp_path / "log").open("w") as log:
        serve = subprocess.Popen(
            [installed / "triptych", "serve", "--port", "0"], cwd=tmp_path, env=environment,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert serve.stdout is not None
    try:
        ready = re.match(r"Triptych is ready: (\S+)", serve.stdout.readline())
        assert ready, (tmp_path / "log").read_text()
        sample = next(installed.parent.glob("lib/*/site-packages/triptych/_packages/demo/samples"))
        words = ("ask", str(sample / "shapes.png"), "What colour is the circle?")
        assert "red" in run(*words, "--url", ready[1])
    finally:
        serve.terminate()
        assert serve.wait(PATIENCE_S) == 0
        serve.stdout.close()
