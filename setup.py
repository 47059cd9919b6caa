"""Where the packages lie. In a checkout, and what is installed from it in place, side by side; in a
wheel all under `triptych`, so that it installs one top-level name and no `services` of others meets
ours. `triptych/__init__.py` finds both; everything else is in pyproject.toml.
"""

import sys

from setuptools import find_packages, setup

_INNER = ["services*", "kernels*", "demo*", "benchmarks*"]
_FOLDER = "triptych._packages"
# Folders of files without code. setuptools warns of them unless they are packages, too.
_FOLDERS = ["services.gateway.static", "demo.model", "demo.samples"]
_DATA = {**{name: ["*"] for name in _FOLDERS}, "benchmarks": ["words.txt"]}

if "editable_wheel" in sys.argv:
    packages = find_packages(include=["triptych*", *_INNER])
    setup(packages=[*packages, *_FOLDERS], package_data=_DATA)
else:
    inner = [*find_packages(include=_INNER), *_FOLDERS]
    setup(
        packages=[*find_packages(include=["triptych*"]), *(f"{_FOLDER}.{name}" for name in inner)],
        package_dir={f"{_FOLDER}.{name}": name.replace(".", "/") for name in inner},
        package_data={f"{_FOLDER}.{name}": files for name, files in _DATA.items()},
    )
