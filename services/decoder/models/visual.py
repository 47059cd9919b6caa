"""The image embeddings of a step, as the language model reads them.

`engine.run.images` makes the views of the embeddings. A model reads them through `VisualInput` and
does not know where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.models.stream import Stream


@dataclass(frozen=True, slots=True)
class Transfer:
    """Events between two streams of a GPU.

    One stream copies embeddings to a buffer, feature by feature. The other stream runs the steps
    that read the buffer. Each method is called while its stream is the current stream.

    The events are external: a CUDA graph waits for the event that was last recorded before the
    graph's launch.

    Attributes:
        arrivals: event after the copy of each feature.
        last_read: event after the last feature of a step was read.
    """

    arrivals: Sequence[torch.cuda.Event]
    last_read: torch.cuda.Event

    @classmethod
    def create(cls, num_features: int) -> "Transfer":
        """Creates events for `num_features` features; nothing waits before the first copy."""
        *arrivals, last_read = (torch.cuda.Event(external=True) for _ in range(num_features + 1))
        for event in (*arrivals, last_read):
            event.record()  # an event that was never recorded adds no wait to a graph
        return cls(arrivals, last_read)

    def wait_until_read(self) -> None:
        """Makes the copying stream wait until the last copy has been read."""
        torch.cuda.current_stream().wait_event(self.last_read)

    def record_arrival(self, feature: int) -> None:
        """Records on the copying stream that the feature's copy is enqueued."""
        self.arrivals[feature].record()

    def wait_for_arrival(self, feature: int) -> None:
        """Makes the reading stream wait until the feature has arrived."""
        torch.cuda.current_stream().wait_event(self.arrivals[feature])

    def record_read(self, feature: int) -> None:
        """Records on the reading stream that the feature was read; features are read in order."""
        if feature == len(self.arrivals) - 1:
            self.last_read.record()


@dataclass(frozen=True, slots=True)
class VisualInput:
    """The image embeddings of one step, in the rows of their tokens.

    Feature 0, the tower's merged output, replaces the embedding of a visual token. Feature i is
    added to the hidden state after decoder layer i - 1 (DeepStack). No shape depends on how many
    tokens are visual, so one CUDA graph serves any number of them.

    Attributes:
        mask: `[T, 1]` bool, true in the rows of visual tokens.
        embeddings: `[num_features, T, hidden]`. The rows of other tokens hold any values.
        transfer: the copy of the embeddings to the device. None on a CPU, where embeddings are not
            copied.
    """

    mask: Tensor
    embeddings: Tensor
    transfer: Transfer | None

    @property
    def num_features(self) -> int:
        """Number of embeddings of a visual token."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """Overwrites the visual rows of `hidden` `[T, hidden]` with feature 0, in place."""
        hidden.copy_(self._read(0, hidden))

    def adds_after(self, layer: int) -> bool:
        """Returns whether a feature is added after decoder layer `layer`."""
        return layer + 1 < self.num_features

    def deepstack(self, layer: int, stream: Stream) -> Stream:
        """Returns the stream after decoder layer `layer` with the layer's feature added, if any."""
        if not self.adds_after(layer):
            return stream
        hidden = stream.hidden()
        hidden.add_(self._read(layer + 1, 0.0))
        return Stream(hidden)

    def _read(self, feature: int, other: Tensor | float) -> Tensor:
        """Returns `[T, hidden]`: the feature in visual rows, and `other` in the other rows."""
        if self.transfer is None:
            return self.embeddings[feature].where(self.mask, other)
        self.transfer.wait_for_arrival(feature)
        found = self.embeddings[feature].where(self.mask, other)
        self.transfer.record_read(feature)
        return found
