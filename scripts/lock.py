"""Writes services/<name>/requirements.lock: what an image installs, each file by its hash.

Names and versions are those of constraints.txt; pip asks the package index for the hashes of the
wheels for the images' Python on x86-64 and ARM. torch and what it alone needs are not among them:
each index has its own builds of the same version.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from closure import closure, own_requirements

_ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("gateway", "encoder", "decoder")
_PYTHON = "3.12"  # the images'
_MACHINES = ("x86_64", "aarch64")
# The wheels' oldest and newest manylinux that the images' glibc (2.36) can run.
_GLIBCS = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34")


def lock_path(service: str) -> Path:
    """Of a service's lock."""
    return _ROOT / "services" / service / "requirements.lock"


def pins_of(service: str) -> dict[str, str]:
    """Name -> version of what the service's image installs from hashes."""
    constraints = dict(
        line.split("==")
        for line in (_ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    wanted = [
        requirement
        for requirement in own_requirements(service) + own_requirements("tracing")
        if requirement.name != "torch"
    ]
    return {name: constraints[name] for name in sorted(closure(wanted))}


def hashes_of(pins: dict[str, str], machine: str) -> dict[str, str]:
    """Name -> `sha256:...` of the wheel for a machine."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in _GLIBCS]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:",
        f"--python-version={_PYTHON}", *platforms, f"--platform=manylinux2014_{machine}",
        "--target=unused", "--report=-", *(f"{name}=={pin}" for name, pin in pins.items()),
    ]  # fmt: skip
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, str] = {}
    for item in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        found[name] = "sha256:" + item["download_info"]["archive_info"]["hashes"]["sha256"]
    return found


def main() -> None:
    """Writes all locks."""
    pins = {service: pins_of(service) for service in SERVICES}
    everything = dict(pair for each in pins.values() for pair in each.items())
    hashes = [hashes_of(everything, machine) for machine in _MACHINES]
    for service in SERVICES:
        lines = ["# What the image installs. Regenerate: make locks"]
        for name, pin in pins[service].items():
            options = [f"--hash={value}" for value in sorted({each[name] for each in hashes})]
            lines.append(" \\\n    ".join([f"{name}=={pin}", *options]))
        lock_path(service).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
