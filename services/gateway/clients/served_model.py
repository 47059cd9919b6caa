"""The model that all pods have to serve; a pod that serves another one gets no work."""

from dataclasses import dataclass

from services.common.pb import decoder_pb2 as pb


@dataclass(slots=True)
class ServedModel:
    """What the gateway knows of its model.

    Attributes:
        fingerprint: of the checkpoint; empty: not known. A gateway whose directory holds no weights
            takes the decoders' (`adopt`).
        is_own: the fingerprint is that of the gateway's directory, and stays.
        vocab_size, hidden, num_features: of its configuration; None: not checked. Without vision,
            `num_features` is 0.
    """

    fingerprint: bytes = b""
    vocab_size: int | None = None
    hidden: int | None = None
    num_features: int | None = None
    is_own: bool = False

    def misfit_of_decoder(self, found: pb.DescribeDecoderResponse) -> str:
        """Why a decoder cannot serve the model; empty: it can."""
        for name in ("vocab_size", "hidden", "num_features"):
            wanted, given = getattr(self, name), getattr(found, name)
            if wanted is not None and wanted != given:
                return f"its {name} is {given}, not {wanted}"
        return self.misfit_of(found.fingerprint)

    def misfit_of(self, fingerprint: bytes) -> str:
        """Why a checkpoint is not the served one; empty: it is, or one of both is not known."""
        if not fingerprint or not self.fingerprint or fingerprint == self.fingerprint:
            return ""
        return f"it serves checkpoint {fingerprint.hex()[:12]}, not {self.fingerprint.hex()[:12]}"

    def adopt(self, fingerprints: list[bytes]) -> None:
        """Takes the most frequent of the healthy decoders' fingerprints, unless one of them is the
        model's already.
        """
        if self.is_own or not fingerprints or self.fingerprint in fingerprints:
            return
        self.fingerprint = max(sorted(set(fingerprints)), key=fingerprints.count)
