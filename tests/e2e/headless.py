"""A headless Service of Kubernetes, imitated: a DNS server of ours, and a gateway that asks it.

The gateway runs with its own `/etc/resolv.conf`, in a mount namespace. Where namespaces or port 53
are not permitted, `is_possible` says so.
"""

import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path

_HEADER = struct.Struct("!HHHHHH")
_ADDRESS = "127.0.0.53"
_ANSWER, _TYPE_A, _CLASS_IN = 0x8180, 1, 1


class DnsServer:
    """Answers questions for A records, to be cached for no time.

    Attributes:
        addresses: of each name that `names` does not have.
        names: addresses by the first label of a name.
    """

    def __init__(self, host: str = _ADDRESS) -> None:
        self.addresses: list[str] = []
        self.names: dict[str, list[str]] = {}
        self.num_questions = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(512)
                self.num_questions += 1
                self._socket.sendto(self._answer(question), sender)
            except OSError:
                return

    def _answer(self, question: bytes) -> bytes:
        number = _HEADER.unpack_from(question)[0]
        end = question.index(b"\0", _HEADER.size) + 5
        asked = question[_HEADER.size : end]
        (kind,) = struct.unpack_from("!H", asked, len(asked) - 4)
        label = asked[1 : 1 + asked[0]].decode(errors="replace")
        addresses = self.names.get(label, self.addresses)
        records = [
            struct.pack("!HHHIH", 0xC00C, _TYPE_A, _CLASS_IN, 0, 4) + socket.inet_aton(address)
            for address in (addresses if kind == _TYPE_A else ())
        ]
        return _HEADER.pack(number, _ANSWER, 1, len(records), 0, 0) + asked + b"".join(records)


def is_possible(host: str = _ADDRESS) -> bool:
    """Whether this machine permits both halves."""
    if shutil.which("unshare") is None or not Path("/etc/resolv.conf").is_file():
        return False
    tried = subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 53))
        except OSError:
            return False
    return tried.returncode == 0


def with_resolver(directory: Path, host: str = _ADDRESS) -> list[str]:
    """A command prefix: what it runs asks the DNS server."""
    file = directory / "resolv.conf"
    file.write_text(f"nameserver {host}\noptions timeout:1 attempts:2\n")
    script = f'mount --bind "{file}" /etc/resolv.conf && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", script, "sh"]
