"""Which pod should do a piece of work: the same for equal keys, unless it is too busy."""

from collections.abc import Sequence
from typing import TypeVar

from blake3 import blake3

from services.gateway.clients.pods import Pod

PodT = TypeVar("PodT", bound=Pod)

# A pod may have this many more pieces of work than the mean before equal keys go elsewhere.
_SLACK = 1.25
_HEADROOM = 8


def pick(pods: Sequence[PodT], key: bytes) -> PodT:
    """Rendezvous hashing with bounded loads: the highest-ranked pod that is not overfull."""
    if len(pods) == 1:
        return pods[0]
    bound = sum(pod.num_in_flight for pod in pods) / len(pods) * _SLACK + _HEADROOM
    ranked = sorted(pods, key=lambda pod: blake3(pod.address.encode() + key).digest(8))
    return next((p for p in ranked if p.num_in_flight <= bound), ranked[0])
