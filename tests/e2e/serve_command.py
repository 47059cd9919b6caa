"""`triptych serve` as a person runs it: one command, one line when it is ready."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.noise import PATIENCE_S

_START_TIMEOUT_S = 240.0


@dataclass
class ServeCommand:
    """The running command.

    Attributes:
        url: of the API, as the ready line names it.
        log_path: its standard error and that of its children.
    """

    process: subprocess.Popen[str]
    url: str
    log_path: Path

    def services(self) -> dict[str, psutil.Process]:
        """The processes behind it: redis, encoder, decoder, gateway and the engines."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            module = next((w for w in words if w.startswith("services.")), None)
            found[module or Path(child.exe()).name] = child
        return found


@contextmanager
def serve_command(directory: Path, options: Sequence[str] = ()) -> Iterator[ServeCommand]:
    """Starts it on a free port and stops it, as Ctrl-C would."""
    log_path = directory / "serve.log"
    command = [sys.executable, "-m", "triptych", "serve", "--port", "0", *options]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(_START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        match = re.fullmatch(r"Triptych is ready: (http://\S+) \(model \S+\)\n", line)
        assert match, f"{line!r}\n{log_path.read_text()}"
        yield ServeCommand(process, match[1], log_path)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
        process.stdout.close()
