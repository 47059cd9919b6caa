"""The `triptych` command line. In a wheel, this package also contains the services' packages."""

import sys
from pathlib import Path

_INSTALLED = Path(__file__).resolve().parent / "_packages"
# Folder that contains `services`. It comes first in the module search path of child processes.
ROOT = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1]

if _INSTALLED.is_dir():
    sys.path.insert(0, str(_INSTALLED))
