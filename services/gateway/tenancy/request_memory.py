"""The memory that requests hold, counted in bytes before they are allocated."""

from services.common.errors import Overloaded

# A request that holds at most this many bytes is small. A part of the memory, one in
# `_RESERVED_PART` bytes, is for small requests, so that large requests do not refuse them.
SMALL_BYTES = 4 << 20
_RESERVED_PART = 16


class MemoryBudget:
    """The memory for all requests of the gateway.

    Args:
        max_bytes: most bytes that all requests may hold.

    Attributes:
        held_bytes: bytes that running requests hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    @property
    def max_large_bytes(self) -> int:
        """Most bytes that are held when a large request may add more."""
        return self.max_bytes - self.max_bytes // _RESERVED_PART


class RequestMemory:
    """The memory that one request holds. It is freed at the end of a `with`.

    Args:
        budget: memory for all requests.

    Attributes:
        num_bytes: bytes that the request holds.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> "RequestMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def add(self, num_bytes: int) -> None:
        """Counts bytes before they are allocated.

        Raises:
            Overloaded: all requests together would take too much memory.
        """
        budget = self._budget
        is_small = self.num_bytes + num_bytes <= SMALL_BYTES
        limit = budget.max_bytes if is_small else budget.max_large_bytes
        if budget.held_bytes + num_bytes > limit:
            raise Overloaded(
                "the gateway's memory is full of the data of running requests", retry_after_s=1
            )
        budget.held_bytes += num_bytes
        self.num_bytes += num_bytes

    def free(self) -> None:
        """Counts all bytes of the request as free. Call it when the request has ended."""
        self._budget.held_bytes -= self.num_bytes
        self.num_bytes = 0
