"""Fills an environment with what the gateway needs, and none of the rest: links into this one.

`.venv/bin/python scripts/light_environment.py .venv-gateway` gives it the distributions that the
extra `gateway` and its tests ask for, in the versions that pip has chosen here. A second run of pip
would choose and download the same.
"""

import importlib.metadata
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parent))

from closure import closure, own_requirements

_TESTS = (
    "hypothesis",
    "pillow",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
)
_PROJECT = "triptych"  # installed in place: a file that says where

Owners = dict[str, set[str]]  # by the path in `site`


def owners_of_paths(site: Path) -> Owners:
    """Whose each file and folder of `site` is."""
    owners: Owners = defaultdict(set)
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = distribution.name
        for file in distribution.files or ():
            path = str(file)
            while path and name not in owners[path]:
                owners[path].add(name)
                path = path.rpartition("/")[0]
    return owners


def link(site: Path, target: Path, wanted: set[str], owners: Owners, folder: str = "") -> None:
    """Links what is wanted; a folder that others share is made, and looked into."""
    (target / folder).mkdir(exist_ok=True)
    for entry in (site / folder).iterdir():
        path = str(entry.relative_to(site))
        found = owners.get(path, set())
        if found and found <= wanted:
            (target / path).symlink_to(entry)
        elif found & wanted:
            link(site, target, wanted, owners, path)


def fill(environment: Path, roots: list[Requirement], *others: str) -> None:
    """Links the distributions that `roots` need, and `others`, into an environment."""
    site = Path(sysconfig.get_path("purelib"))
    (target,) = environment.glob("lib/python3*/site-packages")
    names = {importlib.metadata.distribution(name).name for name in (*others, *closure(roots))}
    link(site, target, names, owners_of_paths(site))


def main() -> int:
    """Links; returns the exit status."""
    roots = own_requirements("gateway") + [Requirement(name) for name in _TESTS]
    fill(Path(sys.argv[1]).absolute(), roots, _PROJECT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
