"""Writes what is installed by its hash: the images' packages, and those of development and tests.

services/<name>/requirements.lock: of a service's image, without torch, which indexes build anew.
deploy/requirements.lock: likewise of the image that runs `triptych serve`.
services/<name>/requirements-gpu.lock: what a GPU image has besides: torch, what it needs, and for
the decoder the kernels and their compilers, of the default index.
requirements-dev.lock: of `make setup`, without torch, for each Python and machine that it supports.

Names and versions are those of constraints.txt and constraints-gpu.txt; pip asks the package index
for the hashes of the wheels.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from closure import closure, own_requirements

_ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("gateway", "encoder", "decoder")
GPU_SERVICES = {"encoder": (), "decoder": ("gpu", "kernels")}  # extras of the GPU image
SERVE_LOCK = _ROOT / "deploy" / "requirements.lock"
SERVE_EXTRAS = (*SERVICES, "cli", "tracing")
DEV_LOCK = _ROOT / "requirements-dev.lock"
_PYTHON = "3.12"  # the images'
_DEV_PYTHONS = ("3.11", "3.12", "3.13")
_MACHINES = ("x86_64", "aarch64")
# The wheels' manylinux versions that the images' glibc (2.36) can run.
_GLIBCS = (
    "2_5",
    "2_12",
    "2_17",
    "2_18",
    "2_24",
    "2_25",
    "2_26",
    "2_27",
    "2_28",
    "2_31",
    "2_34",
    "2_35",
)
_BY_INDEX = ("torch", "setuptools")  # setuptools: torch's alone

Wheels = dict[tuple[str, str], set[str]]  # (name, version) -> hashes


def lock_path(service: str, kind: str = "requirements") -> Path:
    """Of a service's lock; `kind`: requirements or requirements-gpu."""
    return _ROOT / "services" / service / f"{kind}.lock"


def pins_of(*extras: str) -> dict[str, str]:
    """Name -> version of what some extras install from hashes."""
    constraints = _constraints("constraints.txt")
    wanted = [found for extra in extras for found in own_requirements(extra)]
    wanted = [found for found in wanted if extras == ("dev",) or found.name != "torch"]
    return {name: constraints[name] for name in sorted(closure(wanted)) if name not in _BY_INDEX}


def _constraints(name: str) -> dict[str, str]:
    lines = (_ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def _wheels(requirements: list[str], machine: str, python: str = _PYTHON, *options: str) -> Wheels:
    """What pip would install for a machine and a Python, with the hash of each wheel."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in _GLIBCS]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--dry-run",
        "--ignore-installed",
        "--only-binary=:all:",
        f"--python-version={python}",
        *platforms,
        f"--platform=manylinux2014_{machine}",
        f"--platform=manylinux1_{machine}",
        "--target=unused",
        "--report=-",
        *options,
        *requirements,
    ]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: Wheels = {}
    item: dict[str, Any]
    for item in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        value = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found[name, item["metadata"]["version"]] = {f"sha256:{value}"}
    return found


def _pinned(pins: dict[str, str], pythons: tuple[str, ...]) -> Wheels:
    """The wheels of exact versions for all machines."""
    texts = [f"{name}=={pin}" for name, pin in pins.items()]
    merged: Wheels = {pin: set() for pin in pins.items()}
    for python in pythons:
        for machine in _MACHINES:
            for (name, _), values in _wheels(texts, machine, python, "--no-deps").items():
                merged[name, pins[name]] |= values
    return merged


def _gpu_wheels(service: str) -> Wheels:
    """What a GPU image has besides its lock; on x86-64."""
    extras = GPU_SERVICES[service]
    roots = ["torch", *(str(found) for extra in extras for found in own_requirements(extra))]
    constraints = f"--constraint={_ROOT / 'constraints-gpu.txt'}"
    known = pins_of(service, "tracing")
    found = _wheels(roots, "x86_64", _PYTHON, constraints)
    return {pin: hashes for pin, hashes in found.items() if pin[0] not in known}


def _write(path: Path, wheels: Wheels, what: str) -> None:
    lines = [f"# What {what}. Regenerate: make locks"]
    for name, pin in sorted(wheels):
        options = [f"--hash={value}" for value in sorted(wheels[name, pin])]
        lines.append(" \\\n    ".join([f"{name}=={pin}", *options]))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Writes all locks."""
    wheels = _pinned(pins_of(*SERVE_EXTRAS), (_PYTHON,))
    _write(SERVE_LOCK, wheels, "the image that runs `triptych serve` installs")
    for service in SERVICES:
        own = {pin: wheels[pin] for pin in pins_of(service, "tracing").items()}
        _write(lock_path(service), own, "the image installs")
    for service in GPU_SERVICES:
        path = lock_path(service, "requirements-gpu")
        _write(path, _gpu_wheels(service), "a GPU image installs besides")
    _write(DEV_LOCK, _pinned(pins_of("dev"), _DEV_PYTHONS), "`make setup` installs, besides torch")


if __name__ == "__main__":
    main()
