"""Authorities and certificates for tests and benchmarks, in the layout of a mounted secret.

`python -m tests.certificates DIR NAME...` makes a directory with a certificate of these names.
"""

import datetime
import os
import sys
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.security.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "triptych") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.name = name
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str) -> dict[str, bytes]:
        """A certificate of some DNS names, its key, and this authority, by file."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = (
            _builder(subject, self._name, key.public_key())
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return {
            CA_FILE: self.pem,
            CERTIFICATE_FILE: certificate.public_bytes(serialization.Encoding.PEM),
            KEY_FILE: key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        }


def mount(files: dict[str, bytes], directory: Path) -> Path:
    """Puts files there as the kubelet does: all are replaced at once, by a link to a folder."""
    directory.mkdir(exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="..", dir=directory))
    for name, content in files.items():
        (data / name).write_bytes(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    (directory / "..new").symlink_to(data.name)
    os.rename(directory / "..new", directory / "..data")
    return directory


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


if __name__ == "__main__":
    mount(Authority().issue(*sys.argv[2:]), Path(sys.argv[1]))
