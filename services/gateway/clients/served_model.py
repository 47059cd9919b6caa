"""The model that all pods have to serve; a pod that serves another one gets no work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import PROTOCOL

# A decoder's context may be this much shorter than the others': where memory limits it, equal
# machines differ a little.
_NEARLY = 15 / 16
Value = TypeVar("Value", bytes, int)


@dataclass(slots=True)
class ServedModel:
    """What the gateway knows of its model.

    Attributes:
        fingerprint: of the checkpoint; empty: not known. A gateway whose directory holds no weights
            takes the decoders' (`adopt`).
        is_own: the fingerprint is that of the gateway's directory, and stays.
        vocab_size, hidden, num_features: of its configuration; None: not checked. Without vision,
            `num_features` is 0.
        max_model_len: context of the decoders; None: there was none.
    """

    fingerprint: bytes = b""
    vocab_size: int | None = None
    hidden: int | None = None
    num_features: int | None = None
    is_own: bool = False
    max_model_len: int | None = None

    def misfit_of_decoder(self, found: pb.DescribeDecoderResponse) -> str:
        """Why a decoder cannot serve the model; empty: it can."""
        # Asked twice for each request.
        if why := self.misfit_of_protocol(found.protocol):
            return why
        for name in ("vocab_size", "hidden", "num_features"):
            own, its = getattr(self, name), getattr(found, name)
            if own is not None and own != its:
                return f"its {name} is {its}, not {own}"
        if why := self.misfit_of(found.fingerprint):
            return why
        wanted, given = self.max_model_len, found.max_model_len
        if wanted is not None and given < wanted * _NEARLY:
            return f"its context is {given} tokens, not {wanted}"
        return ""

    def misfit_of_protocol(self, protocol: int) -> str:
        """Why a service cannot be spoken to; empty: it can."""
        if protocol == PROTOCOL:
            return ""
        return f"it speaks protocol {protocol}, this gateway {PROTOCOL}: they are of two releases"

    def misfit_of(self, fingerprint: bytes) -> str:
        """Why a checkpoint is not the served one; empty: it is, or one of both is not known."""
        if not fingerprint or not self.fingerprint or fingerprint == self.fingerprint:
            return ""
        return f"it serves checkpoint {fingerprint.hex()[:12]}, not {self.fingerprint.hex()[:12]}"

    def adopt(self, decoders: Sequence[pb.DescribeDecoderResponse]) -> None:
        """Takes the most frequent of the healthy decoders' fingerprints and contexts, unless one of
        them has the model's already.
        """
        decoders = [found for found in decoders if not self.misfit_of_protocol(found.protocol)]
        fingerprints = [found.fingerprint for found in decoders if found.fingerprint]
        if not self.is_own and fingerprints and self.fingerprint not in fingerprints:
            self.fingerprint = _most_frequent(fingerprints)
        former, self.max_model_len = self.max_model_len, None
        lengths = [d.max_model_len for d in decoders if not self.misfit_of_decoder(d)]
        self.max_model_len = former
        if lengths and (former is None or max(lengths) < former * _NEARLY):
            self.max_model_len = _most_frequent(lengths)

    def follow_context(self, decoders: Sequence[pb.DescribeDecoderResponse]) -> None:
        """Takes the shortest context of the decoders that fit: longer ones serve it, too."""
        if decoders:
            self.max_model_len = min(found.max_model_len for found in decoders)


def _most_frequent(values: list[Value]) -> Value:
    return max(sorted(set(values)), key=values.count)
