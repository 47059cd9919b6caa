"""The command line. Installed from a wheel, this package holds the services' packages, too."""

import sys
from pathlib import Path

_INSTALLED = Path(__file__).resolve().parent / "_packages"
# The folder in which `services` lies: of processes that are started, the first of their path.
ROOT = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1]

if _INSTALLED.is_dir():
    sys.path.insert(0, str(_INSTALLED))
