"""A Python interpreter that a test can disable."""

import sys
from pathlib import Path


class Interpreter:
    """A Python interpreter that a test can disable, so that no process is started with it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "python"
        self.path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.enable()

    def enable(self) -> None:
        self.path.chmod(0o755)

    def disable(self) -> None:
        """Lets each start of a process fail. Processes that are starting can read on."""
        self.path.chmod(0o644)
