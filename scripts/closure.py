"""Prints pins for everything that the project's `dev` extra has installed in this environment.

With `--gpu`: the same, but with the versions that the GPU figures were measured with.
"""

import argparse
import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parents[1]
# What benchmarks/LOG.md was measured with; CPU pins follow the newest release.
GPU_PINS = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0"}


def closure(roots: list[Requirement]) -> dict[str, str]:
    """Name and public version of each installed distribution that `roots` need."""
    pins: dict[str, str] = {}
    seen: set[str] = set()
    queue = list(roots)
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        distribution = importlib.metadata.distribution(requirement.name)
        pins[canonicalize_name(requirement.name)] = distribution.version.split("+")[0]
        for text in distribution.requires or ():
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                queue.append(child)
    return pins


def own_requirements(extra: str) -> list[Requirement]:
    """The project's requirements with one extra, which may name its other extras."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    for text in project["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            for other in requirement.extras:
                found += own_requirements(other)
        else:
            found.append(requirement)
    return found


def main() -> None:
    """Prints the constraints file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="with the versions of the GPU figures")
    gpu = parser.parse_args().gpu
    what = (
        "What GPU images install, and the GPU figures ran with"
        if gpu
        else ("What the test command installs, exactly")
    )
    print(f"# {what}. Regenerate: make constraints")
    pins = closure(own_requirements("dev")) | (GPU_PINS if gpu else {})
    for name, version in sorted(pins.items()):
        if name != "setuptools":
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()
