"""The interface through which a sequence's inputs, images and token masks, report failures."""

from typing import Protocol

from services.common.errors import TriptychError


class InputListener(Protocol):
    """The owner of the sequences. `images` and `masks` know it only by this interface."""

    def input_failed(self, number: int, error: TriptychError) -> None:
        """Ends a sequence for which an image or a token mask cannot be obtained.

        Args:
            number: the engine's number of the sequence.
            error: reason why the sequence cannot continue.
        """
        ...
