"""The work that this gateway has under way at encoders, and the division of more work among them.

Work is measured in seconds, so that a large image counts for more than a small image, and a fast
encoder takes more than a slow encoder. The work of other gateways is not known.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from services.gateway.clients.pods import rank

# Seconds per patch of an encoder that has not said its speed: the tower of an 8B model on an H200.
_PATCH_S = 2e-6
# Seconds per byte of a file on its way: the transfer, its copies and, of an image, the decoding. A
# JPEG of 1024 x 1024 takes 3 to 6 ms (benchmarks/LOG.md), and has some 400 kB.
_BYTE_S = 10e-9


class EncoderWork:
    """The calls that this gateway has under way at one encoder.

    Attributes:
        patch_s: seconds per patch on the encoder's device, as the encoder says. 0 if unknown.
        clip_s: seconds of the decoding of clips under way. Images do not wait for it, because the
            encoder decodes an image between two units of a clip.
    """

    def __init__(self) -> None:
        self.patch_s = 0.0
        self.clip_s = 0.0
        self._num_patches = 0
        self._num_bytes = 0

    @property
    def seconds(self) -> float:
        """Backlog in seconds: the vision tower's work, and the bytes on their way."""
        return self.cost(self._num_patches, self._num_bytes)

    def cost(self, num_patches: int, num_bytes: int) -> float:
        """Returns the seconds that some work takes here."""
        return num_patches * (self.patch_s or _PATCH_S) + num_bytes * _BYTE_S

    @contextmanager
    def under_way(self, num_patches: int, num_bytes: int, clip_s: float) -> Generator[None]:
        """Counts a call while it runs.

        Args:
            num_patches: patches of the call's unit. 0 for a call that only sends a file.
            num_bytes: bytes of the call's message.
            clip_s: seconds in which the unit's frames are decoded. 0 if the unit is no clip's.
        """
        self._num_patches += num_patches
        self._num_bytes += num_bytes
        self.clip_s += clip_s
        try:
            yield
        finally:
            self._num_patches -= num_patches
            self._num_bytes -= num_bytes
            # Rounding must not leave a rest, by which an idle encoder would look busy.
            self.clip_s = self.clip_s - clip_s if self._num_patches else 0.0


class Encoder(Protocol):
    """An encoder that can be chosen."""

    address: str

    @property
    def work(self) -> EncoderWork:
        """Work that this gateway has under way at the encoder."""
        ...


EncoderT = TypeVar("EncoderT", bound=Encoder)


class EncoderShares(Generic[EncoderT]):
    """The division of some units among encoders by their work.

    A unit goes to the first encoder in the order of `rank` with less work than the share of an
    encoder. Shares let all encoders end at the same time T: for work L_i under way at encoder i,
    and C_i seconds of all units there, the parts (T - L_i) / C_i of the units sum to 1.

    Args:
        encoders: encoders among which the units are divided. At least one.
        units: number of patches and number of bytes of each unit. At least one.
        with_clips: True if decoding of clips under way counts as an encoder's work.
    """

    def __init__(
        self,
        encoders: Sequence[EncoderT],
        units: Sequence[tuple[int, int]],
        *,
        with_clips: bool = False,
    ) -> None:
        self._encoders = encoders
        self._loads = {
            encoder.address: encoder.work.seconds + with_clips * encoder.work.clip_s
            for encoder in encoders
        }
        num_patches, num_bytes = map(sum, zip(*units, strict=True))
        costs = {
            encoder.address: encoder.work.cost(num_patches, max(num_bytes, 1))
            for encoder in encoders
        }
        begun = sum(self._loads[address] / cost for address, cost in costs.items())
        self._end_s = (1 + begun) / sum(1 / cost for cost in costs.values())

    def take(self, key: bytes, unit: tuple[int, int]) -> EncoderT:
        """Assigns the next unit to an encoder. Call it with the largest unit first.

        Args:
            key: key of the unit. Equal keys get the same encoder where the shares allow it.
            unit: number of patches and number of bytes of the unit.
        """
        loads, end_s = self._loads, self._end_s
        fitting = [encoder for encoder in self._encoders if loads[encoder.address] < end_s]
        if fitting:
            chosen = min(fitting, key=lambda encoder: rank(encoder.address, key))
        else:  # Slow encoders have taken units that would have been less work for others.
            chosen = min(self._encoders, key=lambda encoder: loads[encoder.address])
        loads[chosen.address] += chosen.work.cost(*unit)
        return chosen
