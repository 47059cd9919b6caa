"""Messages by which a front sees that its engine process works. `engine_watch` sends the pings."""

import msgspec


class Ping(msgspec.Struct, tag="ping"):
    """A ping to the engine, which answers with `Pong` between two steps."""


class Pong(msgspec.Struct, tag="pong"):
    """The engine's answer to a `Ping`."""
