"""Chat messages out of another form of the API, which remember where they come from."""

from services.gateway.forms.openai import Message


class ChatMessages:
    """The chat messages that another form of the API is made into, and where they come from.

    Attributes:
        found: in order.

    Args:
        paths: gets the client's path of each message, for `RequestContext.paths`.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self.found: list[Message] = []
        self._paths = paths

    def add(self, message: Message, path: str) -> None:
        self._paths[f"messages[{len(self.found)}]"] = path
        self.found.append(message)
