"""A circuit breaker between a service and a Redis that does not answer."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0


class Breaker:
    """Decides which commands are sent. All times are in seconds of one monotonic clock.

    A failure opens the breaker for 50 ms. After that, one command may try, and after each further
    failure the next command may try after twice the pause, at most 1 s. Any answer closes the
    breaker. A command that fails although a later command has been answered, as in a burst, does
    not open it.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._next_try = 0.0
        self._answered_at = 0.0

    @property
    def is_open(self) -> bool:
        """Returns whether the last command failed, so that commands are held back."""
        return self._pause_s > 0

    def lets_through(self, now: float) -> bool:
        """Returns whether a command may be sent. The caller then reports `answered` or `failed`,
        unless the command is cancelled.
        """
        if self.is_open:
            if now < self._next_try:
                return False
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._next_try = now + self._pause_s
        return True

    def answered(self, now: float) -> None:
        """Records that Redis has answered a command."""
        self._pause_s = 0.0
        self._answered_at = now

    def failed(self, sent_at: float, now: float) -> None:
        """Records that a command, which was sent at `sent_at`, has failed."""
        if not self.is_open and sent_at >= self._answered_at:
            self._pause_s = _FIRST_PAUSE_S
            self._next_try = now + _FIRST_PAUSE_S
