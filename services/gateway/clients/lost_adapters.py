"""The adapters of decoders that were lost and may come back.

A decoder that restarts has the adapters of its settings again. The gateway does not know which
adapters these are, so it remembers all: for `PodTimes.restart_s`, and, because decoders may be
scaled to zero, for as long as no decoder is healthy. If a decoder comes back at its address without
an adapter, the adapter is forgotten.
"""

import math
import time
from collections.abc import Sequence
from typing import Protocol

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.pods import PodDialer


class AdapterPod(Protocol):
    """A decoder pod, see `Pod` and `DecoderPod`."""

    adapters: Sequence[pb.Adapter]
    reported_at: float
    unlisted: bool

    @property
    def healthy(self) -> bool: ...

    @property
    def misfit(self) -> str: ...


class AdapterPods(Protocol):
    """All decoder pods, see `DecoderPool`."""

    @property
    def pods(self) -> Sequence[AdapterPod]: ...

    def healthy(self) -> Sequence[AdapterPod]: ...


class LostAdapters:
    """Remembers the adapters of lost decoders.

    Args:
        decoders: all decoders.
        dialer: dialer of the decoders, whose times say how long a restart may take.
    """

    def __init__(self, decoders: AdapterPods, dialer: PodDialer) -> None:
        self._decoders, self._dialer = decoders, dialer
        # For each adapter of the decoders that were removed: monotonic time of the last report.
        self._removed: dict[str, float] = {}

    def names(self) -> list[str]:
        """Returns the names of the adapters of lost decoders."""
        oldest = self._oldest()
        names = [name for name, at in self._removed.items() if at > oldest]
        for pod in self._lost():
            if not pod.misfit and pod.reported_at > oldest:
                names += (adapter.name for adapter in pod.adapters)
        return list(dict.fromkeys(names))

    def forget(self, name: str) -> None:
        """Forgets that lost decoders had an adapter, because the adapter was unloaded."""
        self._removed.pop(name, None)
        for pod in self._lost():
            pod.adapters = [adapter for adapter in pod.adapters if adapter.name != name]

    def removed(self, pod: AdapterPod) -> None:
        """Remembers the adapters of a decoder whose address is no longer listed."""
        oldest = self._oldest()
        self._removed = {name: at for name, at in self._removed.items() if at > oldest}
        if not pod.misfit:
            for adapter in pod.adapters:
                before = self._removed.get(adapter.name, -math.inf)
                self._removed[adapter.name] = max(before, pod.reported_at)

    def _oldest(self) -> float:
        """Returns the time of the oldest report that counts."""
        if not self._decoders.healthy():
            return -math.inf
        return time.monotonic() - self._dialer.times.restart_s

    def _lost(self) -> list[AdapterPod]:
        return [pod for pod in self._decoders.pods if not pod.healthy or pod.unlisted]
