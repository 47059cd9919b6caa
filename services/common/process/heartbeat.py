"""Messages by which a front sees that its engine process works; `engine_watch` sends them."""

import msgspec


class Ping(msgspec.Struct, tag="ping"):
    """To an engine, which answers with `Pong` when it is between two steps."""


class Pong(msgspec.Struct, tag="pong"):
    """The engine's answer."""
