"""The model that all pods have to serve. A pod that serves another model gets no work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.common.model_spec import Task
from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import PROTOCOL

# Least context of a decoder, as a part of the other decoders' context. Contexts that memory limits
# differ a little between equal machines.
_MIN_CONTEXT_PART = 15 / 16
Value = TypeVar("Value", bytes, int)


@dataclass(slots=True)
class ServedModel:
    """The gateway's knowledge of the model that it serves.

    Attributes:
        fingerprint: fingerprint of the checkpoint. Empty if it is unknown: a gateway whose model
            directory has no weights adopts the fingerprint of the decoders (`adopt`).
        vocab_size: size of the vocabulary. None if it is not checked.
        hidden: hidden size of the model. None if it is not checked.
        num_features: number of features of an embedding, 0 for a model without vision. None if it
            is not checked.
        is_own: True if the fingerprint is that of the gateway's directory, and is never replaced.
        max_model_len: context length of the decoders. None if no decoder has been healthy.
        task: task of the model. None if it is not checked.
    """

    fingerprint: bytes = b""
    vocab_size: int | None = None
    hidden: int | None = None
    num_features: int | None = None
    is_own: bool = False
    max_model_len: int | None = None
    task: Task | None = None

    def misfit_of_decoder(self, found: pb.DescribeDecoderResponse) -> str:
        """Returns the reason why a decoder cannot serve the model. Empty if it can."""
        # This is called twice for each request.
        if why := self.misfit_of_protocol(found.protocol):
            return why
        for name in ("vocab_size", "hidden", "num_features"):
            own, its = getattr(self, name), getattr(found, name)
            if own is not None and own != its:
                return f"its {name} is {its}, not {own}"
        if self.task is not None and (task := found.task or "generate") != self.task:
            return f"its task is {task}, not {self.task}"
        if why := self.misfit_of(found.fingerprint):
            return why
        wanted, given = self.max_model_len, found.max_model_len
        if wanted is not None and given < wanted * _MIN_CONTEXT_PART:
            return f"its context is {given} tokens, not {wanted}"
        return ""

    def misfit_of_protocol(self, protocol: int) -> str:
        """Returns the reason why a service's protocol does not fit. Empty if it fits."""
        if protocol == PROTOCOL:
            return ""
        return f"it speaks protocol {protocol}, this gateway {PROTOCOL}: they are of two releases"

    def misfit_of(self, fingerprint: bytes) -> str:
        """Returns the reason why a checkpoint is not the served checkpoint. Empty if it is, or if a
        fingerprint is unknown.
        """
        if not fingerprint or not self.fingerprint or fingerprint == self.fingerprint:
            return ""
        return f"it serves checkpoint {fingerprint.hex()[:12]}, not {self.fingerprint.hex()[:12]}"

    def adopt(self, decoders: Sequence[pb.DescribeDecoderResponse]) -> None:
        """Adopts the most frequent fingerprint and context length of the healthy decoders, unless a
        decoder already serves the gateway's model.
        """
        decoders = [found for found in decoders if not self.misfit_of_protocol(found.protocol)]
        fingerprints = [found.fingerprint for found in decoders if found.fingerprint]
        if not self.is_own and fingerprints and self.fingerprint not in fingerprints:
            self.fingerprint = _most_frequent(fingerprints)
        former, self.max_model_len = self.max_model_len, None
        lengths = [d.max_model_len for d in decoders if not self.misfit_of_decoder(d)]
        self.max_model_len = former
        if lengths and (former is None or max(lengths) < former * _MIN_CONTEXT_PART):
            self.max_model_len = _most_frequent(lengths)

    def follow_context(self, decoders: Sequence[pb.DescribeDecoderResponse]) -> None:
        """Adopts the shortest context length of the decoders that fit the model, because decoders
        with a longer context can serve it, too.
        """
        if decoders:
            self.max_model_len = min(found.max_model_len for found in decoders)


def _most_frequent(values: list[Value]) -> Value:
    return max(sorted(set(values)), key=values.count)
